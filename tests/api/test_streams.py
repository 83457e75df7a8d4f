"""A stream says what the whole reply says (B-25, H02, H04, H06, H10), and ends in order when something breaks."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from oneloop_core import LogprobsEncoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
ROUNDS = 150


def random_request(source: random.Random) -> tuple[str, dict[str, Any]]:
    """Any mix of options the routes take."""
    path = source.choice([CHAT, COMPLETIONS])
    body: dict[str, Any] = {
        "seed": source.randrange(10**6),
        "max_tokens": source.choice([1, 2, 5, 20, 100]),
        "n": source.choice([1, 1, 2, 3]),
        "temperature": source.choice([0, 1]),
    }
    if source.random() < 0.3:
        body["stop"] = source.sample(["two", "語", "👩‍🚀", "x) ", "e t", "\n", "🙂"], k=source.randint(1, 3))
        body["include_stop_str_in_output"] = source.random() < 0.5
    if source.random() < 0.2:
        body["stop_token_ids"] = [source.choice([0x20, 0xE8, 0x0A])]
    if source.random() < 0.2:
        body["min_tokens"] = source.randint(0, body["max_tokens"])
    if source.random() < 0.1:
        body["ignore_eos"] = True
    if source.random() < 0.2:
        body["skip_special_tokens"] = False
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": source.choice(["a", "日本", "x" * 50])}]
        if source.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": source.choice([0, 1, 5])}
    else:
        body["prompt"] = source.choice(["a", [1, 2], ["a", "日本"], [[1], [2, 3], [4]]])
        if source.random() < 0.4:
            body["logprobs"] = source.choice([0, 1, 5])
        elif source.random() < 0.4:
            body["echo"] = True
    return path, body


def joined_chat(chunks: list[Any], n: int) -> list[dict[str, Any]]:
    """What a chat stream adds up to; checks the order of its chunks."""
    choices: list[dict[str, Any]] = [
        {"role": None, "content": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        for _ in range(n)
    ]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "nothing comes after the finish"
            delta = part["delta"]
            if choice["role"] is None:
                assert part == {
                    "index": part["index"],
                    "delta": {"role": "assistant", "content": ""},
                    "finish_reason": None,
                }
                choice["role"] = "assistant"
                continue
            assert "role" not in delta
            assert delta.get("content") != "", "no empty content"
            assert delta or part["finish_reason"], "no empty chunk"
            choice["content"] += delta.get("content", "")
            if "logprobs" in part:
                choice["logprobs"] = (choice["logprobs"] or []) + part["logprobs"]["content"]
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
            assert ("stop_reason" in part) == (part["finish_reason"] is not None)
    return choices


def whole_chat(answer: Any) -> list[dict[str, Any]]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        {
            "role": choice["message"]["role"],
            "content": choice["message"]["content"],
            "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    ]


def joined_completion(chunks: list[Any], num_choices: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [
        {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None} for _ in range(num_choices)
    ]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None
            assert part["text"] or part["finish_reason"], "no empty chunk"
            choice["text"] += part["text"]
            if "logprobs" in part:
                lists = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {name: lists[name] + part["logprobs"][name] for name in lists}
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
    return choices


def whole_completion(answer: Any) -> list[dict[str, Any]]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    names = ("text", "logprobs", "finish_reason", "stop_reason")
    return [{name: choice[name] for name in names} for choice in answer["choices"]]


@pytest.fixture(params=["null", "in step", "merged"])
async def any_server(
    request: pytest.FixtureRequest, serve: Any, null_engine_type: Any, fake_engine_type: Any
) -> AsyncIterator[Any]:
    """The real engine; and the double, once token by token, once with steps merged as they come."""
    engine = null_engine_type(
        enable_prefix_caching=False
    )  # or the second of two requests finds the first's blocks
    if request.param != "null":
        engine = fake_engine_type()
        engine.in_step = request.param == "in step"
    async with serve(engine) as server:
        yield server


async def test_stream_is_the_whole_reply(any_server: Any) -> None:
    """Random requests."""
    server, source = any_server, random.Random(7)
    for _ in range(ROUNDS):
        path, body = random_request(source)
        status, whole = await server.post(path, body)
        assert status == 200, whole
        events = await server.stream(path, {**body, "stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]"
        *chunks, last = [json.loads(event) for event in events[:-1]]
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, last]}) == 1
        if path == CHAT:
            assert joined_chat(chunks, body["n"]) == whole_chat(whole)
        else:
            assert joined_completion(chunks, len(whole["choices"])) == whole_completion(whole)


async def test_usage_counts(server: Any) -> None:
    """H10: exact counts; the prompt counts once; the cached part shows in the details."""
    messages = [{"role": "user", "content": "hello" * 8}]
    prompt = len("[user][assistant]") + 5 * 8
    for n, cached in ((1, 0), (3, prompt // 16 * 16)):
        body = {
            "messages": messages,
            "max_tokens": 37,
            "n": n,
            "ignore_eos": True,
            "logit_bias": {"257": -100},
        }
        events = await server.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
        usage = json.loads(events[-2])["usage"]
        assert usage == {
            "prompt_tokens": prompt,
            "completion_tokens": 37 * n,
            "total_tokens": prompt + 37 * n,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def test_continuous_usage(server: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.stream(
        CHAT, {"messages": HELLO, "max_tokens": 9, "seed": 1, "stream_options": options}
    )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 9


async def test_no_usage_unless_asked(server: Any) -> None:
    events = await server.stream(CHAT, {"messages": HELLO, "max_tokens": 9})
    assert all("usage" not in json.loads(event) for event in events[:-1])


async def test_usage_that_the_server_forces(serve: Any) -> None:
    """--enable-force-include-usage: as if every stream had asked for it; whole replies are as ever."""
    async with serve(enable_force_include_usage=True) as server:
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
            for options in ({}, {"stream_options": {"include_usage": False}}):
                *chunks, last, end = await server.stream(
                    path, {**body, "max_tokens": 5, "ignore_eos": True, **options}
                )
                assert end == "[DONE]"
                assert json.loads(last)["usage"]["completion_tokens"] == 5
                assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
            assert (await server.post(path, {**body, "max_tokens": 5}))[0] == 200


async def test_choices_are_complete_and_differ(server: Any) -> None:
    """H06."""
    body = {"prompt": "x", "n": 8, "temperature": 1, "max_tokens": 16, "seed": 3}
    for ends in ({}, {"stop": ["e", "a"]}):  # some end early
        texts = []
        for _ in range(5):
            answers = await asyncio.gather(*[server.post(COMPLETIONS, {**body, **ends}) for _ in range(30)])
            for _, answer in answers:
                assert [choice["index"] for choice in answer["choices"]] == list(range(8))
                texts.append([choice["text"] for choice in answer["choices"]])
        assert all(one == texts[0] for one in texts)
        assert len(set(texts[0])) > 1


async def test_prompt_major_indexes(server: Any) -> None:
    status, both = await server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 1, "echo": True})
    assert status == 200
    alone = [
        (await server.post(COMPLETIONS, {"prompt": p, "n": 2, "seed": 1, "echo": True}))[1]
        for p in ("a", "b")
    ]
    assert [c["text"] for c in both["choices"]] == [c["text"] for one in alone for c in one["choices"]]
    assert both["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


async def test_stop_string_never_leaks(server: Any) -> None:
    """H02: nothing of a stop string is sent; with include_stop_str_in_output all of it is."""
    body = {"prompt": "count", "seed": 8, "max_tokens": 200}
    whole = (await server.post(COMPLETIONS, body))[1]["choices"][0]["text"]
    stop = whole[12:20]
    at = whole.index(stop)
    for include in (False, True):
        events = await server.stream(
            COMPLETIONS, {**body, "stop": stop, "include_stop_str_in_output": include}
        )
        parts = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(part["text"] for part in parts) == whole[: at + (len(stop) if include else 0)]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("content", ["hello", "日本語で答えて"])
@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
async def test_chat_logprobs(server: Any, top: int | None, content: str) -> None:
    """H04: one entry per token, its top list as long as asked, the bytes joining up to the text; streamed as whole."""
    messages = [{"role": "user", "content": content}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 20, "seed": 2, "logprobs": True}
    if top is not None:
        body["top_logprobs"] = top
    _, answer = await server.post(CHAT, body)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == (top or 0) for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
    chunks = [json.loads(event) for event in (await server.stream(CHAT, body))[:-1]]
    assert joined_chat(chunks, 1)[0]["logprobs"] == entries
    _, plain = await server.post(CHAT, {"messages": messages, "max_tokens": 20, "seed": 2})
    assert plain["choices"][0]["message"] == choice["message"]
    assert plain["choices"][0]["logprobs"] is None


async def test_completion_logprobs(server: Any) -> None:
    _, answer = await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 30, "seed": 5, "logprobs": 3})
    choice = answer["choices"][0]
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {answer["usage"]["completion_tokens"]}
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        if not token.startswith("bytes:") and token != "<|end|>":
            assert choice["text"][offset : offset + len(token)] == token
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert all(3 <= len(top) <= 4 for top in lists["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_many_logprobs_do_not_hold_the_loop(server: Any, path: str, stream: bool) -> None:
    """100,000 entries in one reply; the lag guard looks on."""
    body: dict[str, Any] = {"n": 32, "max_tokens": 150, "ignore_eos": True, "seed": 1}
    if path == CHAT:
        body |= {"messages": HELLO, "logprobs": True, "top_logprobs": 20}
    else:
        body |= {"prompt": "a", "logprobs": 20}
    data = orjson.dumps({**body, "stream": stream})
    async with server.session.post(
        server.url + path, data=data, headers={"Content-Type": "application/json"}
    ) as reply:
        num_bytes = len(await reply.read())  # not decoded here: the guard looks at this test's own work too
    assert reply.status == 200
    assert num_bytes > 32 * 150 * 20 * 10


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
async def test_logprobs_that_json_cannot_say(server: Any, value: float) -> None:
    vocabulary = server.engine.vocabulary
    for form, count in (("chat", 2), ("completion", 3)):
        encoder = LogprobsEncoder(vocabulary, form, num_top=1, skip_special_tokens=True)
        encoder.add([(1, [(65, value), (66, value)])])
        assert encoder.take().count(b"-9999.0") == count
        assert b"-9999.0" not in encoder.take()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_failure_under_way(scripted: Any, path: str) -> None:
    """One error event, then the end of the body, and no end mark."""
    scripted.engine.fail_after = 5
    body = {"messages": HELLO, "prompt": "a", "max_tokens": 50, "ignore_eos": True}
    del body["prompt" if path == CHAT else "messages"]
    events = await scripted.stream(path, body)
    error = json.loads(events[-1])["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "step" not in error["message"]
    assert all("error" not in json.loads(event) for event in events[:-1])
    status, answer = await scripted.post(path, body)
    assert status == 500
    assert answer["error"] == error


async def test_failure_before_the_first_token_is_a_status(scripted: Any) -> None:
    scripted.engine.fail_after = 0
    status, answer = await scripted.post(CHAT, {"messages": HELLO, "stream": True})
    assert status == 500
    assert answer["error"]["type"] == "InternalServerError"


async def test_engine_death_under_way(scripted: Any) -> None:
    engine = scripted.engine
    engine.step_s = 0.01
    body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True}
    task = asyncio.create_task(scripted.stream(CHAT, body))
    await asyncio.sleep(0.1)
    engine.state = "dead"
    for stream in list(engine.live.values()):
        stream.end("error", "the engine has stopped: reason")
    events = await task
    assert json.loads(events[-1])["error"]["type"] == "ServiceUnavailableError"
    assert (await scripted.get("/health"))[0] == 503
    assert (await scripted.post(CHAT, body))[0] == 503


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})])
async def test_overload(scripted: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any) -> None:
    """Refused before anything is done for it."""
    scripted.engine.overloaded = True
    monkeypatch.delattr(type(scripted.engine), "encode")
    async with scripted.session.post(scripted.url + path, json=body) as reply:
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "3"
        assert (await reply.json())["error"]["type"] == "ServiceUnavailableError"


async def test_defaults_of_max_tokens(server: Any) -> None:
    """Completions: 16; chat: what the context holds."""
    _, answer = await server.post(COMPLETIONS, {"prompt": "a", "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16
    _, answer = await server.post(CHAT, {"messages": HELLO, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == 256
    _, answer = await server.post(
        CHAT, {"messages": HELLO, "ignore_eos": True, "max_tokens": 9, "max_completion_tokens": 5}
    )
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_min_tokens_hold_off_text_stops(server: Any) -> None:
    """H09: the first match behind min_tokens ends it, and no earlier one."""
    body = {"prompt": "notes", "max_tokens": 100, "seed": 4, "allowed_token_ids": list(b"abcdefgh")}
    body["return_token_ids"] = True
    _, answer = await server.post(COMPLETIONS, body)
    tokens = answer["choices"][0]["token_ids"]  # bytes
    stop = bytes(tokens[70:71]).decode()
    assert stop.encode() in bytes(tokens[:50])
    place = bytes(tokens).index(stop.encode(), 50)
    _, answer = await server.post(COMPLETIONS, {**body, "min_tokens": 50, "stop": stop})
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == tokens[: place + 1]
    assert choice["text"].encode() == bytes(tokens[:place])
    assert answer["usage"]["completion_tokens"] == place + 1 > 50
