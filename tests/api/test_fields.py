"""Fields that are taken: what they do, and that those without effect are listed; and what refusals say."""
# ruff: noqa: E501  (tables)

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def ignored(server: Any, path: str, body: Any) -> str | None:
    async with server.session.post(server.url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
        value: str | None = reply.headers.get("X-Oneloop-Ignored")
        return value


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_listed(server: Any, stream: bool) -> None:
    body = {"messages": HELLO, "stream": stream, "max_tokens": 3}
    assert await ignored(server, CHAT, body) is None
    extra = {"user": "bob", "metadata": {"a": {"b": 1}}, "store": True, "service_tier": "auto", "frobnicate": 1,
             "parallel_tool_calls": True, "typo": None}  # fmt: skip
    listed = await ignored(server, CHAT, {**body, **extra})
    assert listed == "user, metadata, store, service_tier, frobnicate, parallel_tool_calls"


async def test_listed_names_are_safe(server: Any) -> None:
    """Names become a header, so only plain ones are repeated; the rest is counted."""
    names = ["a\r\nX-Evil: 1", "ä", "x" * 65, "a,b", "", "ok"]
    listed = await ignored(server, COMPLETIONS, {"prompt": "a", **dict.fromkeys(names, 1)})
    assert listed == "ok, (+5 more)"
    listed = await ignored(server, COMPLETIONS, {"prompt": "a", **{f"field_{i}": 1 for i in range(5000)}})
    assert listed is not None
    assert len(listed) < 600
    assert listed.endswith("(+4968 more)")


HARMLESS = {
    "response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None, "prompt_logprobs": None,
    "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "allowed_token_ids": None, "logit_bias": {},
    "spaces_between_special_tokens": True, "watermarking": False, "return_token_ids": False, "priority": 0, "stop": [],
    "stop_token_ids": [], "min_tokens": 0, "ignore_eos": False, "top_k": 0, "min_p": 0, "repetition_penalty": 1,
    "presence_penalty": 0, "frequency_penalty": 0, "seed": None, "stream": False, "stream_options": None, "n": 1,
    "temperature": 1, "top_p": 1, "kv_transfer_params": None, "vllm_xargs": {}, "stream_interval": 1, "cache_salt": None,
    "deterministic": False,
}  # fmt: skip
HARMLESS_CHAT = {
    "tools": None, "tool_choice": "none", "functions": [], "function_call": "none", "modalities": ["text"], "audio": None,
    "echo": False, "documents": [], "chat_template": None, "chat_template_kwargs": {}, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "reasoning_effort": "none", "logprobs": False,
    "top_logprobs": None, "max_completion_tokens": None,
}  # fmt: skip
HARMLESS_COMPLETION = {
    "suffix": None,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "add_special_tokens": True,
}


async def test_values_that_ask_for_nothing_are_taken(server: Any) -> None:
    base = {"messages": HELLO, "max_tokens": 3}
    assert await ignored(server, CHAT, {**base, **HARMLESS, **HARMLESS_CHAT}) is None
    assert await ignored(server, COMPLETIONS, {"prompt": "a", **HARMLESS, **HARMLESS_COMPLETION}) is None
    for name, value in HARMLESS.items():
        assert await ignored(server, COMPLETIONS, {"prompt": "a", name: value}) is None, name
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await ignored(server, CHAT, {**base, "tools": tools, "tool_choice": "none"}) is None


async def test_sampling_fields_reach_the_engine(server: Any) -> None:
    body = {
        "prompt": "a", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": -5, "max_tokens": 9, "min_tokens": 2,
        "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "logprobs": 2, "logit_bias": {"5": -1.5}, "n": 2, "cache_salt": "tenant-1",
    }  # fmt: skip
    assert (await server.post(COMPLETIONS, body))[0] == 200
    _, params, priority, salt = server.engine.submitted[-1]
    names = set(body) - {"prompt", "stop", "stop_token_ids", "logit_bias", "cache_salt"}
    assert {name: getattr(params, name) for name in names} == {name: body[name] for name in names}
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (3,), ((5, -1.5),))
    assert (priority, salt) == (0, "tenant-1")


async def test_priority_needs_its_policy(serve: Any, null_engine_type: Any) -> None:
    async with serve(null_engine_type(scheduling_policy="priority")) as server:
        assert (await server.post(COMPLETIONS, {"prompt": "a", "priority": -3}))[0] == 200
        assert server.engine.submitted[-1][2] == -3
        assert (await server.post(COMPLETIONS, {"prompt": "a", "priority": 2**31}))[0] == 400


async def test_special_tokens_are_added_once(server: Any) -> None:
    """H17: by the template in chat, by the flag in completions; /tokenize says the same."""
    await server.post(CHAT, {"messages": HELLO, "max_tokens": 1})
    assert 256 not in server.engine.submitted[-1][0]
    assert (await server.post("/tokenize", {"messages": HELLO}))[1]["tokens"] == server.engine.submitted[-1][
        0
    ]
    for flag in (True, False):
        await server.post(COMPLETIONS, {"prompt": " a", "max_tokens": 1, "add_special_tokens": flag})
        expected = [256] * flag + [32, 97]
        assert server.engine.submitted[-1][0] == expected
        answer = (await server.post("/tokenize", {"prompt": " a", "add_special_tokens": flag}))[1]
        assert answer["tokens"] == expected
        assert answer["count"] == len(expected)


async def test_chat_template_arguments(server: Any) -> None:
    await server.post(
        CHAT, {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert b"enable_thinking" in bytes(server.engine.submitted[-1][0])
    body = {"messages": [*HELLO, {"role": "assistant", "content": "Sure, "}], "continue_final_message": True}
    assert (await server.post(CHAT, {**body, "max_tokens": 1}))[0] == 200
    assert bytes(server.engine.submitted[-1][0]).endswith(b"[assistant]Sure, ")


async def test_model_names(server: Any) -> None:
    for name, shown in ((None, "fake"), ("", "fake"), ("fake", "fake"), ("alias", "alias")):
        _, answer = await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "model": name})
        assert answer["model"] == shown
    assert (await server.get("/v1/models/alias"))[0] == 200
    assert (await server.get("/v1/models/none"))[0] == 404
    assert (await server.get("/v1/models/a/b"))[0] == 404


async def test_what_is_told_of_a_model_holds(server: Any) -> None:
    """Every token id is below vocab_size, and a prompt with its answer fits max_model_len."""
    _, listed = await server.get("/v1/models")
    cards = json.loads(listed)["data"]
    assert [card["id"] for card in cards] == ["fake", "alias"]
    assert json.loads((await server.get("/v1/models/alias"))[1]) == cards[1]
    size, longest = cards[0]["vocab_size"], cards[0]["max_model_len"]
    for prompt, status in (
        ([size - 1], 200), ([size], 400), ([1] * (longest - 1), 200), ([1] * longest, 400),
    ):  # fmt: skip
        assert (await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}))[0] == status


async def test_request_ids(server: Any) -> None:
    """T26: the same id from many clients at once: separate answers."""

    async def one(number: int) -> tuple[str, str]:
        body = {"prompt": str(number), "max_tokens": 30, "temperature": 0, "echo": True}
        headers = {"X-Request-Id": "mine-1.a_B"}
        async with server.session.post(server.url + COMPLETIONS, json=body, headers=headers) as reply:
            answer = await reply.json()
            assert reply.headers["X-Request-Id"] == "mine-1.a_B"
            return answer["id"], answer["choices"][0]["text"]

    answers = await asyncio.gather(*[one(number) for number in range(50)])
    assert {identity for identity, _ in answers} == {"cmpl-mine-1.a_B"}
    assert all(text.startswith(str(number)) for number, (_, text) in enumerate(answers))
    _, answer = await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "request_id": "body-id"})
    assert answer["id"] == "cmpl-body-id"


async def test_detokenize_round_trip(server: Any) -> None:
    text = "a 日本 🙂\n"
    tokens = (await server.post("/tokenize", {"prompt": text, "add_special_tokens": False}))[1]["tokens"]
    assert (await server.post("/detokenize", {"tokens": tokens}))[1] == {"prompt": text}
    assert (await server.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "lists of token ids, got an empty list"),
        ({"seed": 1e23}, "seed must be an integer of at most 64 bits, without exponent; got 1e+23"),
        ({"seed": 10**23}, "seed must be an integer of at most 64 bits"),
        (
            {"max_tokens": 10**6},
            "context_length_exceeded: this model's maximum context length is 256 tokens; the prompt has 6",
        ),
    ],
)
async def test_refused_in_words_that_help(server: Any, fields: dict[str, Any], says: str) -> None:
    status, answer = await server.post_raw(COMPLETIONS, json.dumps({"prompt": "hello", **fields}).encode())
    assert status == 400
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_allowed_tokens_and_bad_words(server: Any, stream: bool) -> None:
    """Tokens are bytes; "ab" is two of them, and " c" behind a space."""
    body = {
        "prompt": "a", "max_tokens": 40, "ignore_eos": True, "seed": 3, "stream": stream,
        "allowed_token_ids": list(b"abc "), "bad_words": ["ab", "c"],
    }  # fmt: skip
    async with server.session.post(server.url + COMPLETIONS, json=body) as reply:
        assert reply.status == 200, await reply.text()
        text = await reply.text()
    if stream:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    else:
        said = json.loads(text)["choices"][0]["text"]
    assert len(said) == 40
    assert set(said) == set("ab ")
    assert "ab" not in said
