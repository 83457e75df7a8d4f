"""What clients must not send (T6-T12, T26, T28, T30 of security.md; H07-H09, H16, H18 of public-bugs.md).

Each row is refused by name, and the next good request is answered as if nothing had been.
"""
# ruff: noqa: E501  (tables)

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import re
import time
import tracemalloc
import zlib
from typing import Any

import orjson
import pytest

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
)
HELLO = [{"role": "user", "content": "hello"}]
CANARY = {"prompt": "canary", "max_tokens": 24, "seed": 1}
LEAKS = re.compile(
    r"(/\w+/|\.py|Traceback|0x[0-9a-f]{6}|site-packages|line \d+, in|python3|orjson|aiohttp|msgspec)"
)
VOCAB = 264
CONTEXT = 256


def check_error(answer: Any, status: int, kind: str, param: str | None) -> None:
    """The wire format of an error, free of anything about the machine."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["code"] == status
    assert error["param"] == param
    assert error["message"]
    assert len(error["message"]) < 500
    assert not LEAKS.search(json.dumps(answer)), answer


async def canary(server: Any) -> Any:
    status, answer = await server.post(COMPLETIONS, CANARY)
    assert status == 200
    assert (await server.get("/health"))[0] == 200
    return answer["choices"]


@pytest.fixture
async def guarded(server: Any) -> Any:
    """The server; afterwards it must be as it was: same canary, nothing running."""
    before = await canary(server)
    yield server
    await server.settled()
    assert await canary(server) == before


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 4, **fields}


BOTH_ROUTES = [
    # T7: numbers out of range, negatives on every integer
    ("n", 10**9), ("n", 0), ("n", -1), ("n", 129), ("n", True), ("n", "2"), ("n", 1.5), ("n", 2**70),
    ("max_tokens", 2**63), ("max_tokens", -1), ("max_tokens", 10**10), ("max_tokens", "5"), ("max_tokens", [1]),
    ("min_tokens", 10**12), ("min_tokens", -1), ("min_tokens", 5),
    ("seed", 2**70), ("seed", -(2**70)), ("seed", "x"), ("seed", 1.5),
    ("top_k", -2), ("top_k", 2**40), ("top_k", 0.5),
    ("priority", 2**70), ("priority", -(2**70)), ("priority", 1),
    ("stop", ["x"] * 10**5), ("stop", "x" * (10 << 20)), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5),
    ("stop", {}), ("stop", ["x"] * 17),
    ("logit_bias", {str(i): 1 for i in range(5000)}), ("logit_bias", {"a": 1}), ("logit_bias", []),
    ("bad_words", ["x"] * 10**4), ("bad_words", ["x" * 257]), ("bad_words", ["x" * 65]), ("bad_words", "x"), ("bad_words", [""]),
    ("bad_words", [1]), ("stop_token_ids", [1] * 10**5),
    ("cache_salt", "x" * (1 << 20)), ("cache_salt", "x" * 129), ("cache_salt", ""), ("cache_salt", "a b"),
    ("cache_salt", "sälz"), ("cache_salt", 5), ("request_id", "a/b"), ("request_id", "x" * 65),
    # T8: what is no finite number in range
    ("temperature", -0.1), ("temperature", "nan"), ("temperature", 1e300), ("temperature", True), ("temperature", 101),
    ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_p", "1"), ("min_p", -0.5), ("min_p", 2),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("frequency_penalty", "a"),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 1e9),
    # T9, H08: token ids
    ("logit_bias", {str(VOCAB): 5}), ("logit_bias", {str(VOCAB + 100): 5}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"abc": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": -101}), ("logit_bias", {"1": "5"}),
    ("logit_bias", {"1": True}), ("logit_bias", {"1.0": 1}), ("logit_bias", {"99999999999999": 1}),
    ("logit_bias", {"٣": 1}),
    ("prompt_logprobs", -2), ("prompt_logprobs", 21), ("prompt_logprobs", VOCAB), ("prompt_logprobs", 2**63),
    ("prompt_logprobs", "1"), ("prompt_logprobs", True),
    ("stop_token_ids", [VOCAB]), ("stop_token_ids", [-1]), ("stop_token_ids", [2**40]), ("stop_token_ids", ["1"]),
    ("allowed_token_ids", [VOCAB]), ("allowed_token_ids", [-1]), ("allowed_token_ids", [2**40]),
    ("allowed_token_ids", ["1"]), ("allowed_token_ids", []),
    ("logprob_token_ids", [VOCAB]), ("logprob_token_ids", [-1]), ("logprob_token_ids", [2**40]), ("logprob_token_ids", "1"),
    ("logprob_token_ids", [1]), ("logprob_token_ids", [1] * 10**5),
    ("stop_token_ids", [1.5]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
    # wrong types
    ("stream", "yes"), ("stream", 1), ("model", 5), ("model", ["fake"]), ("ignore_eos", "true"),
    ("deterministic", "yes"), ("deterministic", 1), ("skip_special_tokens", 0), ("include_stop_str_in_output", "no"), ("stream_options", {"include_usage": True}),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 257),
    ("truncate_prompt_tokens", "all"), ("truncation_side", "middle"), ("return_token_ids", "yes"),
    ("return_tokens_as_token_ids", 1), ("return_token_offsets", 0), ("return_prompt_text", [True]),
    # known, not supported
    ("prompt_embeds", "AAAA"), ("vllm_xargs", {"a": 1}), ("prompt_logprobs", -1), ("length_penalty", 0.5),
    ("logits_processors", ["x"]), ("kv_transfer_params", {"a": 1}), ("stream_interval", 2), ("watermarking", True),
]  # fmt: skip

CHAT_ONLY = [
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"), ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": VOCAB, "logprobs": True}, "top_logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_completion_tokens": 2**63}, "max_completion_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 10**6}, "max_completion_tokens"),
    # T10
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"), ({"messages": [[]]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"), ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": 5}]}, "messages[1].role"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "name": "n" * 300}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": HELLO * 5000}, "messages"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    # T6
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    *[({"chat_template_kwargs": {name: True}}, "chat_template_kwargs")
      for name in ("chat_template", "tokenize", "tools", "padding", "truncation", "return_dict", "__class__", "a.b", "")],
    ({"chat_template_kwargs": {"a": "x" * (1 << 20)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"k{i}": 1 for i in range(10**4)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": functools.reduce(lambda inner, _: [inner], range(500), 1)}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    # not supported
    ({"tools": []}, "tools"), ({"tools": [{"type": "function"}]}, "tools[0].function.name"), ({"tools": {}}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{}]}, "functions"), ({"function_call": "auto"}, "function_call"), ({"echo": 1}, "echo"),
    ({"modalities": ["audio"]}, "modalities"), ({"audio": {}}, "audio"), ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"documents": [5]}, "documents[0]"), ({"documents": [{}] * 1025}, "documents"),
    ({"documents": [{"text": "x" * (4 << 20)}]}, "documents"), ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    # H18, on the chat route: 7 characters of template around the content
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
]  # fmt: skip

COMPLETIONS_ONLY = [
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": 10**9}, "logprobs"),
    ({"logprobs": True}, "logprobs"), ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "logprob_token_ids": [1] * 129}, "logprob_token_ids"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "max_tokens": 0, "n": 2}, "n"), ({"echo": "yes"}, "echo"),
    ({"best_of": 10**9}, "best_of"), ({"best_of": 2}, "best_of"), ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 0}, "best_of"), ({"suffix": "x"}, "suffix"),
    # T9
    ({"prompt": [999999999]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"), ({"prompt": [[1, 2], [-5]]}, "prompt[1]"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"), ({"prompt": [1, 2.0]}, "prompt"), ({"prompt": [2**70]}, "prompt[0]"),
    ({"prompt": [VOCAB - 1], "echo": True}, "prompt"),
    # T10
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt[0]"), ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": None}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"), ({"prompt": [None]}, "prompt[0]"), ({"prompt": [[[1]]]}, "prompt[0]"),
    # T30
    ({"prompt": ["x"] * 10**5}, "prompt"), ({"prompt": [[1]] * 6 * 10**4}, "prompt"), ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ({"prompt": ["x"] * 10**4, "n": 16}, "prompt"),
    # H18: the context is 256; a text prompt gets one begin token
    ({"prompt": [1] * 256}, "prompt"), ({"prompt": [1] * 257, "max_tokens": 0}, "prompt"),
    ({"prompt": [1] * 255, "max_tokens": 2}, "max_tokens"), ({"prompt": [1] * 254, "max_tokens": 2560}, "max_tokens"),
    ({"prompt": "x" * 255}, "prompt"), ({"prompt": [1] * 200000}, "prompt"), ({"prompt": "x" * (4 << 20)}, "prompt"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"), ({"max_tokens": None, "min_tokens": 255}, "min_tokens"),
]  # fmt: skip

HELPERS = [
    (TOKENIZE, {}, "prompt"), (TOKENIZE, {"prompt": 5}, "prompt"), (TOKENIZE, {"messages": []}, "messages"),
    (TOKENIZE, {"prompt": "a", "messages": HELLO}, "prompt"), (TOKENIZE, {"prompt": "x" * (4 << 20)}, "prompt"),
    (TOKENIZE, {"messages": HELLO, "chat_template": "x"}, "chat_template"),
    (DETOKENIZE, {}, "tokens"), (DETOKENIZE, {"tokens": "abc"}, "tokens"), (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (DETOKENIZE, {"tokens": [VOCAB]}, "tokens"), (DETOKENIZE, {"tokens": [2**40]}, "tokens"),
    (DETOKENIZE, {"tokens": [VOCAB - 1]}, "tokens"), (DETOKENIZE, {"tokens": [1.5]}, "tokens"),
    (DETOKENIZE, {"tokens": [1] * 70000}, "tokens"),
]  # fmt: skip


def short(value: object) -> str:
    return repr(value)[:50]


CASES = [
    *[(CHAT, chat(**{field: value}), field) for field, value in BOTH_ROUTES],
    *[(COMPLETIONS, completion(**{field: value}), field) for field, value in BOTH_ROUTES],
    *[(CHAT, chat(**fields), param) for fields, param in CHAT_ONLY],
    *[(COMPLETIONS, completion(**fields), param) for fields, param in COMPLETIONS_ONLY],
    *HELPERS,
]


@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=short)
async def test_refused_by_name(guarded: Any, path: str, body: Any, param: str) -> None:
    begin = time.monotonic()
    data = orjson_or_json(body)
    status, answer = await guarded.post_raw(path, data)
    assert time.monotonic() - begin < 1.0
    assert status == 400, answer
    check_error(answer, 400, "BadRequestError", param)


def orjson_or_json(body: Any) -> bytes:
    """json for integers beyond 64 bits, which orjson does not write."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_refused_before_a_stream_starts(guarded: Any, path: str) -> None:
    """H07: errors that are known at once are a status, not an event."""
    base = chat(stream=True) if path == CHAT else completion(stream=True)
    long = {"messages": [{"role": "user", "content": "x" * 300}]} if path == CHAT else {"prompt": [1] * 300}
    for fields, expected in (
        ({"n": 0}, 400), ({"model": "nope"}, 404), ({"max_tokens": 10**6}, 400), (long, 400),
    ):  # fmt: skip
        status, answer = await guarded.post(path, {**base, **fields})
        assert status == expected
        assert "error" in answer


RAW = [
    # T8: strict JSON has no such numbers
    *[(b'{"prompt":"a","temperature":%b}' % number, 400)
      for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"01", b"+1", b"1.", b".5", b"0x10", b"nan")],
    # T10
    (b"", 400), (b"[]", 400), (b'"x"', 400), (b"{}", 400), (b"null", 400), (b"5", 400), (b"   ", 400),
    # T11
    (b'{"prompt":"\xff"}', 400), (b'{"prompt":"\xed\xa0\x80"}', 400), (b'{"prompt":"\\ud800"}', 400),
    (b'{"prompt":"a","stop":"\\udc00"}', 400), (b'{"prompt":"a","model":"\\ud800"}', 400),
    (b'{"prompt":"a","user":"\\ud800"}', 400), (b'{"prompt":"a","\\ud800":1}', 400),
    (b'{"prompt":"a\x00"}', 400), (b"\xef\xbb\xbf" + b'{"prompt":"a"}', 400),
    ('{"prompt":"a"}'.encode("utf-16"), 400), ('{"prompt":"a"}'.encode("utf-32"), 400), (b'{"prompt":"\xc0\x80"}', 400),
    # T12
    (b"[" * 10**5, 400), (b'{"a":' * 10**4, 400), (b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", 400),
    (b"{" + b",".join([b'"prompt":"a"'] * 10**6) + b"}", 400),
    (b'{"prompt":"a","max_tokens":' + b"1" * 4000 + b"}", 400), (b'{"prompt":"a","seed":' + b"9" * 300 + b"}", 400),
    (b"{" + b" " * (17 << 20) + b"}", 413), (b'{"prompt":[' + b",".join([b"1"] * 10**6) + b"]}", 400),
    (b'{"prompt":"a"}x', 400), (b"{'prompt':'a'}", 400), (b'{"prompt":"a",}', 400), (b'{"prompt":"a"', 400),
    (b'{"prompt":"a","x":' + b"[" * 70000 + b"]" * 70000 + b"}", 400),
]  # fmt: skip


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "a", "temperature": %s, "top_p": 0.5}', "temperature"),
        ('{"min_p": %s}', "min_p"),
        ('{"prompt": "NaN 1e999", "logit_bias": {"5": 1.5, "6": %s}}', "logit_bias"),
        ('{"stream_options": {"a": [0, [{"b": %s}]]}, "prompt": "a"}', "stream_options"),
        ('{"prompt": [1, %s], "n": 1}', "prompt"),
        ('{"no name": %s}', None),
        ('{"temperature": %s', None),
        ('[%s]', None),
        ('{"temperature": %s, "x": "' + "y" * 70_000 + '"}', None),
    ],
    ids=short,
)  # fmt: skip
async def test_a_number_that_is_not_finite_is_refused_by_field(
    guarded: Any, body: str, param: str | None, number: str
) -> None:
    """T8: such a body is no JSON, yet its sender learns which field to mend."""
    status, answer = await guarded.post_raw(COMPLETIONS, (body % number).encode())
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("data", "expected"), RAW, ids=short)
async def test_raw_bodies(guarded: Any, data: bytes, expected: int) -> None:
    begin = time.monotonic()
    status, answer = await guarded.post_raw(COMPLETIONS, data)
    assert time.monotonic() - begin < 1.0
    assert status == expected
    kind = {400: "BadRequestError", 413: "PayloadTooLargeError"}[expected]
    check_error(answer, expected, kind, answer["error"]["param"])


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 5e-324}, {"temperature": -0.0}, {"top_p": 1e-300}, {"temperature": 1e-100},
        {"prompt": "a\u0000b"}, {"prompt": "a" + "\u0301" * 100}, {"max_tokens": 4.0}, {"seed": -(2**63)},
        {"seed": 2**63 - 1}, {"logit_bias": {str(i): 1 for i in range(VOCAB)}}, {"stop_token_ids": [VOCAB - 1]},
        {"allowed_token_ids": [VOCAB - 1]}, {"allowed_token_ids": list(range(VOCAB))}, {"bad_words": ["x" * 63]},
        {"prompt": [VOCAB - 1]}, {"prompt": [0]}, {"cache_salt": "a/b"}, {"cache_salt": "x" * 128}, {"top_k": -1},
        {"priority": 0}, {"prompt": "  leading"}, {"temperature": 0}, {"n": 128, "max_tokens": 1},
        {"prompt": ["x"] * 64, "n": 2, "max_tokens": 1}, {"prompt": [1] * 255, "max_tokens": 1},
        {"prompt": [1] * 256, "max_tokens": 0}, {"prompt": [1] * 254, "max_tokens": None}, {"best_of": 1},
        {"n": 2, "best_of": 2},
    ],
    ids=short,
)  # fmt: skip
async def test_legal_edges(guarded: Any, body: dict[str, Any]) -> None:
    status, answer = await guarded.post(COMPLETIONS, completion(**body))
    assert status == 200, answer


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
        [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "", "tool_call_id": "c"},
        ],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "A"}]}],
        [{"role": "developer", "content": "A"}, {"role": "user", "content": "B", "name": "bob"}],
    ],
    ids=short,
)  # fmt: skip
async def test_empty_contents(guarded: Any, messages: Any) -> None:
    """H16: an empty turn is a turn, and no "None" reaches the template."""
    status, _ = await guarded.post(CHAT, {"messages": messages, "max_tokens": 4})
    assert status == 200
    prompt = bytes(guarded.engine.submitted[-1][0]).decode()
    assert "None" not in prompt
    assert prompt.count("[") == len(messages) + 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
async def test_unknown_model(guarded: Any, path: str) -> None:
    body = {**chat(), **completion(), "model": "no/such"}
    del body["prompt" if path == CHAT else "messages"]
    status, answer = await guarded.post(path, body)
    assert status == 404
    check_error(json.loads(json.dumps(answer).replace("no/such", "")), 404, "NotFoundError", "model")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json",
                                  "application/json; charset=utf-16", "application/jsonx"])  # fmt: skip
async def test_wrong_content_type(guarded: Any, kind: str) -> None:
    status, answer = await guarded.post_raw(COMPLETIONS, b'{"prompt":"a"}', **{"Content-Type": kind})
    assert status == 415
    check_error(answer, 415, "UnsupportedMediaTypeError", None)


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", "application/vnd.api+json"]
)
async def test_json_content_types(guarded: Any, kind: str) -> None:
    assert (await guarded.post_raw(COMPLETIONS, b'{"prompt":"a"}', **{"Content-Type": kind}))[0] == 200


def packed(kind: str, data: bytes) -> bytes:
    if kind == "gzip":
        return gzip.compress(data)
    return zlib.compress(data)


BOMBS = {kind: packed(kind, b" " * (64 << 20)) for kind in ("gzip", "deflate")}


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
async def test_packed_bodies(guarded: Any, kind: str) -> None:
    """A small packed body is read; for one that inflates 1,000 times the inflated size counts."""
    good = packed(kind, b'{"prompt":"a"}')
    assert (await guarded.post_raw(COMPLETIONS, good, **{"Content-Encoding": kind}))[0] == 200
    bomb = BOMBS[kind]
    assert len(bomb) < 100_000
    tracemalloc.start()
    begin = time.monotonic()
    status, answer = await guarded.post_raw(COMPLETIONS, bomb, **{"Content-Encoding": kind})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 413
    check_error(answer, 413, "PayloadTooLargeError", None)
    assert time.monotonic() - begin < 3.0
    assert peak < 64 << 20


@pytest.mark.parametrize("kind", ["gzip", "deflate", "br", "zstd"])
async def test_wrongly_packed_bodies(guarded: Any, kind: str) -> None:
    status, answer = await guarded.post_raw(
        COMPLETIONS, b"no such packing" * 10, **{"Content-Encoding": kind}
    )
    assert status == 400
    check_error(answer, 400, "BadRequestError", None)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data + data, lambda data: data + b"x"]
)
async def test_damaged_packed_bodies(guarded: Any, damage: Any) -> None:
    data = damage(packed("gzip", b'{"prompt":"a"}'))
    status, answer = await guarded.post_raw(COMPLETIONS, data, **{"Content-Encoding": "gzip"})
    assert status == 400
    check_error(answer, 400, "BadRequestError", None)


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1])
async def test_context_errors_name_both_numbers(guarded: Any, num_tokens: int) -> None:
    status, answer = await guarded.post(COMPLETIONS, completion(prompt=[1] * num_tokens, max_tokens=1))
    assert status == 400
    assert str(num_tokens) in answer["error"]["message"]
    assert str(CONTEXT) in answer["error"]["message"]
    assert "context_length_exceeded" in answer["error"]["message"]


@pytest.mark.parametrize("header", ["x" * 65, "x" * 8000, "a b", "127.0.0.1:80", "a/b", "ä", ""])
async def test_request_ids_that_are_not_repeated(guarded: Any, header: str) -> None:
    """T26."""
    url = guarded.url + COMPLETIONS
    async with guarded.session.post(url, json=completion(), headers={"X-Request-Id": header}) as reply:
        answer = await reply.json()
        assert reply.status == 200
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer["id"])
    assert reply.headers["X-Request-Id"] == answer["id"].removeprefix("cmpl-")


MEMBERS = {f"k{number}": number for number in range(200_000)}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 50}] * 600
CALLS = [
    {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}] * 90}
] * 120


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, **MEMBERS}, None),
        ({"messages": HELLO, "metadata": MEMBERS}, None),
        ({"messages": PARTS}, "messages"),
        ({"messages": CALLS}, "messages"),
    ],
    ids=["members", "nested members", "content parts", "tool calls"],
)
async def test_bodies_of_many_small_things(guarded: Any, body: Any, param: str | None) -> None:
    """Refused before the loop is held for long by reading them (the lag guard looks on)."""
    status, answer = await guarded.post_raw(CHAT, orjson.dumps(body))
    assert status == 400
    check_error(answer, 400, "BadRequestError", param)


async def test_names_without_effect_are_counted_not_read(guarded: Any) -> None:
    """As many members as a body may have, none of them known."""
    body = {"prompt": "a", "max_tokens": 1, **dict.fromkeys(list(MEMBERS)[:60_000], 1)}
    async with guarded.session.post(
        guarded.url + COMPLETIONS, data=orjson.dumps(body), headers={"Content-Type": "application/json"}
    ) as reply:
        assert reply.status == 200
        assert reply.headers["X-Oneloop-Ignored"].endswith("(+59968 more)")


async def test_large_bodies_are_bounded_together(serve: Any) -> None:
    """Clients that hold many large bodies open get 503; small requests are answered all the while; then all is free."""
    size = 100 << 10
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()
    async with serve(max_body_bytes=size) as server:
        before = await canary(server)
        connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(60)]
        for _, writer in connections:
            writer.write(head + b" " * (size - 1))
        answers = await asyncio.gather(*(_within(reader, 0.5) for reader, _ in connections))
        refused = [answer for answer in answers if answer]
        assert all(answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in answer for answer in refused)
        assert 60 - len(refused) == 16 * size // (size - 1 - (64 << 10))
        assert await canary(server) == before
        for _, writer in connections:
            writer.close()
        status, _ = await server.post_raw(COMPLETIONS, b" " * (size - 2) + b"{}")
        assert status == 400


async def _within(reader: asyncio.StreamReader, wait_s: float) -> bytes:
    """What arrives first; empty when nothing does."""
    try:
        async with asyncio.timeout(wait_s):
            return await reader.read(1 << 12)
    except TimeoutError:
        return b""
