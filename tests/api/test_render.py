"""/render, /inference/v1/generate and /derender: together they are the plain routes; apart they trust nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello 日本"}]
ASKED = {"messages": HELLO, "max_tokens": 40, "seed": 11, "temperature": 0.7}
NAMED = {"X-Request-Id": "one"}


@pytest.fixture
async def server(serve: Any, null_engine_type: Any) -> Any:
    """Without a prefix cache, or usage tells which of two equal requests was the first."""
    async with serve(null_engine_type(enable_prefix_caching=False)) as served:
        yield served


async def derendered(server: Any, body: dict[str, Any], chunks: list[dict[str, Any]], path: str) -> list[Any]:
    """Each chunk's reply, the state carried as JSON."""
    state: Any = None
    found = []
    for chunk in chunks:
        sent = {**body, "stream": True, "generate_chunk": chunk, "stream_state": state}
        status, reply = await server.post(path, json.loads(json.dumps(sent)))
        assert status == 200, reply
        state = reply["stream_state"]
        found.append(reply["chunk"])
    return found


def joined(chunks: list[dict[str, Any]], field: str) -> dict[int, str]:
    """Index → text of all chunks."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get(field) if "delta" in choice else choice.get(field)
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
    return texts


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop_string": {"stop": ["three", "語"], "max_tokens": 200},
    "stop_string_shown": {"stop": ["three", "語"], "include_stop_str_in_output": True, "max_tokens": 200},
    "stop_token": {"stop_token_ids": [ord("e")]},
    "special_tokens_shown": {"skip_special_tokens": False, "max_tokens": 200},
    "n": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "cut_character": {"max_tokens": 21, "seed": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_the_three_together_are_chat(server: Any, variant: str) -> None:
    asked = {**ASKED, **VARIANTS[variant]}
    status, whole = await server.post(CHAT, asked, headers=NAMED)
    assert status == 200
    status, body = await server.post(f"{CHAT}/render", asked, headers=NAMED)
    assert status == 200
    assert body["token_ids"] == server.engine.submitted[-1][0]
    status, generated = await server.post(GENERATE, body)
    assert status == 200, generated
    assert generated["request_id"] == whole["id"]
    assert "text" not in generated["choices"][0]
    status, reply = await server.post(
        f"{CHAT}/derender",
        {"generate_response": generated, "prompt_token_ids": body["token_ids"], "chat_request": asked},
    )
    assert status == 200, reply
    reply["created"] = whole["created"]
    assert reply == whole


@pytest.mark.parametrize("variant", VARIANTS)
async def test_streamed_they_are_the_same_text(server: Any, variant: str) -> None:
    asked = {**ASKED, **VARIANTS[variant]}
    _, whole = await server.post(CHAT, asked, headers=NAMED)
    _, body = await server.post(
        f"{CHAT}/render",
        {**asked, "stream": True, "stream_options": {"include_usage": True}},
        headers=NAMED,
    )
    events = await server.stream(GENERATE, body)
    assert events[-1] == "[DONE]"
    chunks = await derendered(
        server,
        {"prompt_tokens": len(body["token_ids"]), "chat_request": asked},
        [json.loads(event) for event in events[:-1]],
        f"{CHAT}/derender",
    )
    texts = joined(chunks, "content")
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
    assert roles.count("assistant") == len(whole["choices"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        end = next(end for end in ends if end["index"] == choice["index"])
        assert texts[choice["index"]] == choice["message"]["content"]
        assert (end["finish_reason"], end["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    if asked.get("logprobs"):
        told = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            for entry in choice["logprobs"]["content"]
        ]
        assert told == whole["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"stop": ["two"], "max_tokens": 100}, {"n": 2}])
async def test_the_three_together_are_completions(server: Any, fields: dict[str, Any]) -> None:
    asked = {"prompt": ["hello", "日本"], "seed": 4, **fields}
    _, whole = await server.post(COMPLETIONS, asked, headers=NAMED)
    status, bodies = await server.post(f"{COMPLETIONS}/render", asked, headers=NAMED)
    assert status == 200
    assert [body["request_id"] for body in bodies] == ["cmpl-one-0", "cmpl-one-1"]
    generated = [(await server.post(GENERATE, body))[1] for body in bodies]
    status, reply = await server.post(
        f"{COMPLETIONS}/derender",
        {
            "generate_responses": generated,
            "prompt_tokens": [len(body["token_ids"]) for body in bodies],
            "completion_request": asked,
        },
    )
    assert status == 200, reply
    assert reply | {"id": whole["id"], "created": whole["created"]} == whole
    # streamed, one prompt at a time
    events = await server.stream(GENERATE, bodies[0])
    chunks = await derendered(
        server,
        {"completion_request": asked},
        [json.loads(event) for event in events[:-1]],
        f"{COMPLETIONS}/derender",
    )
    n = asked.get("n", 1)
    assert [joined(chunks, "text")[index] for index in range(n)] == [
        choice["text"] for choice in whole["choices"][:n]
    ]
    if "logprobs" in asked:
        offsets = [
            offset
            for chunk in chunks
            for choice in chunk["choices"]
            for offset in choice["logprobs"]["text_offset"]
        ]
        assert offsets == whole["choices"][0]["logprobs"]["text_offset"]


async def test_output_modes(server: Any) -> None:
    _, whole = await server.post(CHAT, ASKED, headers=NAMED)
    _, body = await server.post("/render", ASKED, headers=NAMED)
    status, text = await server.post(GENERATE, {**body, "output_mode": "text"})
    assert status == 200
    assert text["choices"][0]["text"] == whole["choices"][0]["message"]["content"]
    _, chat = await server.post(GENERATE, {**body, "output_mode": "derender"})
    assert chat | {"created": whole["created"]} == whole
    events = await server.stream(GENERATE, {**body, "output_mode": "derender"})
    plain = await server.stream(CHAT, ASKED)
    contents = [
        "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in some[:-1])
        for some in (events, plain)
    ]
    assert contents[0] == contents[1] == whole["choices"][0]["message"]["content"]
    status, answer = await server.post(GENERATE, {**body, "output_mode": "pictures"})
    assert (status, answer["error"]["param"]) == (400, "output_mode")


async def test_aliases_go_by_the_body(server: Any) -> None:
    _, chat = await server.post("/render", ASKED, headers=NAMED)
    assert chat == (await server.post(f"{CHAT}/render", ASKED, headers=NAMED))[1]
    _, bodies = await server.post("/render", {"prompt": "a"}, headers=NAMED)
    assert bodies == (await server.post(f"{COMPLETIONS}/render", {"prompt": "a"}, headers=NAMED))[1]
    assert (await server.post("/render", {"input": "a"}))[0] == 400
    generated = (await server.post(GENERATE, chat))[1]
    assert (await server.post("/derender", {"generate_response": generated}))[1][
        "object"
    ] == "chat.completion"
    _, several = await server.post("/derender", {"generate_responses": [generated]})
    assert several["object"] == "text_completion"


async def test_what_render_tells(server: Any) -> None:
    asked = {**ASKED, "return_prompt_text": True, "return_token_offsets": True}
    _, body = await server.post(f"{CHAT}/render", asked)
    text = "[system]be brief[user]hello 日本[assistant]"
    assert body["prompt_text"] == text
    assert bytes(body["token_ids"]).decode() == text
    assert body["token_offsets"][0] == [0, 1]
    assert [text[start:end] for start, end in body["token_offsets"][-14:-11]] == ["本"] * 3
    assert body["model"] == "fake"
    assert body["sampling_params"]["temperature"] == 0.7
    assert body["sampling_params"]["max_tokens"] == 40
    # what is left open is settled: the answer fills the context
    del asked["max_tokens"]
    _, body = await server.post(f"{CHAT}/render", asked)
    assert "max_tokens" not in body["sampling_params"]
    _, (body,) = await server.post(f"{COMPLETIONS}/render", {"prompt": [1] * 250})
    assert body["sampling_params"]["max_tokens"] == 6
    assert not server.engine.submitted


def generated(**choice: Any) -> dict[str, Any]:
    return {"request_id": "x", "choices": [{"index": 0, "token_ids": [104, 105], **choice}]}


BAD_RESPONSES = [
    ({}, "generate_response"), ({"generate_response": 5}, "generate_response"),
    ({"generate_response": {}}, "generate_response.request_id"),
    ({"generate_response": {"request_id": "a b"}}, "generate_response.request_id"),
    ({"generate_response": {"request_id": "x"}}, "generate_response.choices"),
    ({"generate_response": {"request_id": "x", "choices": []}}, "generate_response.choices"),
    ({"generate_response": {"request_id": "x", "choices": [5]}}, "generate_response.choices[0]"),
    ({"generate_response": {"request_id": "x", "choices": [{"index": 0}] * 2}}, "generate_response.choices"),
    ({"generate_response": {"request_id": "x", "choices": [{"index": 1}]}}, "generate_response.choices"),
    ({"generate_response": {"request_id": "x", "choices": [{}] * 129}}, "generate_response.choices"),
    ({"generate_response": generated(token_ids=[-1])}, "generate_response.choices[0].token_ids"),
    ({"generate_response": generated(token_ids=[264])}, "generate_response.choices[0].token_ids"),
    ({"generate_response": generated(token_ids=[263])}, "token_ids"),
    ({"generate_response": generated(token_ids="hi")}, "generate_response.choices[0].token_ids"),
    ({"generate_response": generated(token_ids=[1] * 70000)}, "generate_response.choices[0].token_ids"),
    ({"generate_response": generated(finish_reason="why")}, "generate_response.choices[0].finish_reason"),
    ({"generate_response": generated(stop_reason=[1])}, "generate_response.choices[0].stop_reason"),
    ({"generate_response": generated(logprobs={"content": [5]})}, "generate_response.choices[0].logprobs.content[0]"),
    ({"generate_response": generated(logprobs={"content": [{"token": "hi", "logprob": -1}]})},
     "generate_response.choices[0].logprobs.content[0].token"),
    ({"generate_response": generated(logprobs={"content": [{"token": "token_id:264", "logprob": -1}]})},
     "generate_response.choices[0].logprobs.content[0].token"),
    ({"generate_response": generated(logprobs={"content": [{"token": "token_id:4"}]})},
     "generate_response.choices[0].logprobs.content[0].logprob"),
    ({"generate_response": generated(), "prompt_tokens": -1}, "prompt_tokens"),
    ({"generate_response": generated(), "prompt_tokens": [1, 2]}, "prompt_tokens"),
    ({"generate_response": generated(), "chat_request": 5}, "chat_request"),
    ({"generate_response": generated(), "chat_request": {"stop": 5}}, "chat_request.stop"),
    ({"generate_response": generated(), "chat_request": {"min_tokens": 2**63}}, "chat_request.min_tokens"),
    ({"generate_response": generated(), "chat_request": {"min_tokens": -1}}, "chat_request.min_tokens"),
    ({"generate_response": generated(), "model": "nobody"}, "model"),
    ({"stream": True}, "generate_chunk"), ({"stream": True, "generate_response": generated()}, "generate_chunk"),
]  # fmt: skip

STATE = {"version": 1, "choices": [{"index": 0, "num_tokens": 3, "tail": [], "num_shown": 0}]}
BAD_STATES = [
    (5, "stream_state"), ({}, "stream_state.version"), ({"version": 2}, "stream_state.version"),
    ({**STATE, "choices": [5]}, "stream_state.choices[0]"),
    ({**STATE, "choices": STATE["choices"] * 2}, "stream_state.choices"),
    ({"version": 1, "choices": [{"index": -1}]}, "stream_state.choices[0].index"),
    ({"version": 1, "choices": [{"index": 10**9}]}, "stream_state.choices[0].index"),
    ({"version": 1, "choices": [{"index": 0, "tail": [999]}]}, "stream_state.choices[0].tail"),
    ({"version": 1, "choices": [{"index": 0, "tail": [260]}]}, "token_ids"),
    ({"version": 1, "choices": [{"index": 0, "tail": [1] * 9000}]}, "stream_state.choices[0].tail"),
    ({"version": 1, "choices": [{"index": 0, "num_tokens": -1}]}, "stream_state.choices[0].num_tokens"),
    ({"version": 1, "choices": [{"index": 0, "num_shown": 2**70}]}, "stream_state.choices[0].num_shown"),
    ({"version": 1, "choices": [{"index": 0, "num_tokens": 1e300}]}, "stream_state.choices[0].num_tokens"),
    ({"version": 1, "choices": [{"index": 0, "ended": 1}]}, "stream_state.choices[0].ended"),
    ({"version": 1, "choices": [{"index": 0, "ended": True}]}, "generate_chunk"),
    ({"version": 1, "choices": [{}] * 200}, "stream_state.choices"),
    ({"version": 1, "choices": [{"thinking_end": 5}]}, "stream_state.choices[0].thinking_end"),
    ({"version": 1, "choices": [{"thinking_end": {"tail": "0"}}]}, "stream_state.choices[0].thinking_end.tail"),
    (
        {"version": 1, "choices": [{"thinking_end": {"num_marks": -1}}]},
        "stream_state.choices[0].thinking_end.num_marks",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), BAD_RESPONSES, ids=lambda value: str(value)[:60])
async def test_bad_responses_are_refused_by_name(server: Any, body: dict[str, Any], field: str) -> None:
    status, answer = await server.post_raw(f"{CHAT}/derender", json.dumps(body).encode())
    assert status == (404 if field == "model" else 400), answer
    assert answer["error"]["param"] == field


@pytest.mark.parametrize(("state", "field"), BAD_STATES, ids=lambda value: str(value)[:60])
async def test_bad_states_are_refused_by_name(server: Any, state: Any, field: str) -> None:
    body = {"stream": True, "generate_chunk": generated(), "stream_state": state}
    status, answer = await server.post_raw(f"{CHAT}/derender", json.dumps(body).encode())
    assert status == 400, answer
    assert answer["error"]["param"] == field


async def test_a_forged_state_changes_the_forgers_text_alone(server: Any) -> None:
    """What a state claims was shown is left out, whatever that is; the next client's text is whole."""
    forged = {"version": 1, "choices": [{"index": 0, "tail": [1, 2, 3], "num_shown": 10**9}]}
    body = {"stream": True, "generate_chunk": generated(), "stream_state": forged}
    status, reply = await server.post(f"{CHAT}/derender", body)
    assert status == 200
    assert reply["chunk"]["choices"][0]["delta"] == {}
    status, reply = await server.post(f"{CHAT}/derender", {"stream": True, "generate_chunk": generated()})
    assert reply["chunk"]["choices"][0]["delta"] == {"role": "assistant", "content": "hi"}


BAD_GENERATE = [
    ({}, "token_ids"), ({"token_ids": []}, "token_ids"), ({"token_ids": "hi"}, "token_ids"),
    ({"token_ids": [264]}, "token_ids"), ({"token_ids": [-1]}, "token_ids"), ({"token_ids": [1] * 257}, "token_ids"),
    ({"token_ids": [1] * 256}, "token_ids"), ({"token_ids": [1], "features": {"a": 1}}, "features"),
    ({"token_ids": [1], "request_id": "a b"}, "request_id"),
    ({"token_ids": [1], "sampling_params": []}, "sampling_params"),
    ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"token_ids": [1], "sampling_params": {"n": 10**9}}, "sampling_params.n"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 256}}, "sampling_params.max_tokens"),
    ({"token_ids": [1], "sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
    ({"token_ids": [1], "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
    ({"token_ids": [1], "sampling_params": {"logprob_token_ids": [1]}}, "sampling_params.logprob_token_ids"),
    (
        {"token_ids": [1], "sampling_params": {"logprobs": 0, "logprob_token_ids": [264]}},
        "sampling_params.logprob_token_ids",
    ),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 21}}, "sampling_params.prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"use_beam_search": True, "bad_words": ["a"]}}, "sampling_params.bad_words"),
    ({"token_ids": [1], "sampling_params": {"use_beam_search": True, "stop": "a"}}, "sampling_params.stop"),
    ({"token_ids": [1], "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"token_ids": [1], "priority": 1}, "priority"), ({"token_ids": [1], "cache_salt": ""}, "cache_salt"),
    ({"token_ids": [1], "stream_options": {}}, "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), BAD_GENERATE, ids=lambda value: str(value)[:60])
async def test_bad_token_requests_are_refused_by_name(server: Any, body: dict[str, Any], field: str) -> None:
    status, answer = await server.post_raw(GENERATE, json.dumps(body).encode())
    assert status == 400, answer
    assert answer["error"]["param"] == field
    assert not server.engine.submitted


async def test_render_refuses_what_the_route_refuses(server: Any) -> None:
    for path, body, field in (
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {**ASKED, "temperature": -1}, "temperature"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": [999999]}, "prompt"),
    ):
        status, answer = await server.post(f"{path}/render", body)
        assert (status, answer["error"]["param"]) == (400, field)


SCRIPT = (
    '<think>Hm, 日本?</think>Let me see.<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_time", "get_weather")
]
CALLING = {"messages": HELLO, "tools": TOOLS, "max_tokens": 400}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls are drawn."""
    return {**message, "tool_calls": [{**call, "id": ""} for call in message["tool_calls"]]}


@pytest.fixture
async def calling(serve: Any, fake_engine_type: Any) -> Any:
    """A server whose model thinks, speaks and calls."""
    template = '<tool_call>{"name": …, "arguments": …}</tool_call><think></think>'
    tokenizer = fake_engine_type().tokenizer.__class__(("<think>", "</think>"), template)
    engine = fake_engine_type(tokenizer=tokenizer, script=SCRIPT, max_model_len=4096)
    async with serve(engine) as served:
        yield served


async def test_calls_and_thoughts_are_told_as_chat_tells_them(calling: Any) -> None:
    _, whole = await calling.post(CHAT, CALLING, headers=NAMED)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, 日本?", "Let me see.")
    assert len(message["tool_calls"]) == 2
    _, body = await calling.post("/render", CALLING, headers=NAMED)
    _, generated = await calling.post(GENERATE, body)
    sent = {"prompt_token_ids": body["token_ids"], "chat_request": CALLING}
    status, reply = await calling.post("/derender", {**sent, "generate_response": generated})
    assert status == 200, reply
    assert reply["usage"] == whole["usage"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert without_ids(reply["choices"][0]["message"]) == without_ids(message)
    mode = {**body, "output_mode": "derender", "chat_request": CALLING}
    _, at_once = await calling.post(GENERATE, mode)
    assert without_ids(at_once["choices"][0]["message"]) == without_ids(message)
    calling.engine.in_step = True
    events = await calling.stream(GENERATE, body)
    chunks = [json.loads(event) for event in events[:-1]]
    assert len(chunks) > 50
    told = await derendered(calling, sent, chunks, f"{CHAT}/derender")
    assert joined(told, "content") == {0: message["content"]}
    assert joined(told, "reasoning") == {0: message["reasoning"]}
    calls: list[dict[str, Any]] = []
    for chunk in told:
        for piece in chunk["choices"][0]["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                calls.append(piece)
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    shown = [{**call, "id": ""} for call in calls]
    assert [call["function"] for call in shown] == [call["function"] for call in message["tool_calls"]]
    assert told[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_token_ids_beside_calls(calling: Any) -> None:
    """Every token once, whatever it came to: a mark, a thought, a piece of a call."""
    asked = {**CALLING, "return_token_ids": True}
    _, whole = await calling.post(CHAT, asked)
    calling.engine.in_step = True
    chunks = [json.loads(event) for event in (await calling.stream(CHAT, asked))[:-1]]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_a_form_behind_the_thinking_is_told_in_any_pieces(calling: Any) -> None:
    """The thinking ends with the token of its mark, not with what looks like it, whatever chunks the tokens come in."""
    tokenizer = calling.engine.tokenizer
    end = tokenizer.token_id("</think>")
    look_alike = list(b"</think>")
    tokens = [*b"so ", *look_alike, *b"? ", end, *b'{"a": 1}']
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    sent = {"prompt_token_ids": [*b"x", tokenizer.token_id("<think>")], "chat_request": asked}
    whole = {"request_id": "r", "choices": [{"index": 0, "token_ids": [*tokens, 0], "finish_reason": "stop"}]}
    status, reply = await calling.post("/derender", {**sent, "generate_response": whole})
    assert status == 200, reply
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so </think>?", '{"a": 1}')
    for size in (1, 2, 5, 100):
        pieces = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        ends: list[str | None] = [None] * len(pieces)
        chunks = [
            {"request_id": "r", "choices": [{"index": 0, "token_ids": piece, "finish_reason": reason}]}
            for piece, reason in zip([*pieces, [0]], [*ends, "stop"], strict=True)
        ]
        told = await derendered(calling, sent, chunks, f"{CHAT}/derender")
        assert joined(told, "content") == {0: message["content"]}, size
        assert joined(told, "reasoning") == {0: message["reasoning"]}, size
