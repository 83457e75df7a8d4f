"""POST /v1/messages and /v1/messages/count_tokens over the double of the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from oneloop.api.anthropic.history import read_history
from oneloop.api.protocol.fields import Fields
from oneloop.tokenize.conversation import Message, Tool, ToolCall

ASK = {"model": "fake", "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}]}
WEATHER = {"name": "get", "description": "weather", "input_schema": {"type": "object"}}


def prompt_of(server: Any, at: int = -1) -> str:
    """The text that the double was asked to go on with."""
    return bytes(server.engine.prompts[at]).decode()


async def ask(server: Any, **members: Any) -> dict[str, Any]:
    status, reply = await server.post("/v1/messages", {**ASK, **members})
    assert status == 200, reply
    return dict(reply)


async def streamed(server: Any, rules: Any, **members: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    body = {**ASK, **members, "stream": True}
    async with server.session.post(server.url + "/v1/messages", json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        events = rules.named_events(await reply.read())
    return events, rules.AnthropicRules.check(events)


async def test_a_whole_message(scripted: Any) -> None:
    reply = await ask(scripted, max_tokens=3)
    assert reply["id"].startswith("msg_")
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "fake")
    assert reply["stop_reason"] == "max_tokens"
    assert [block["type"] for block in reply["content"]] == ["text"]
    num_prompt = len(prompt_of(scripted))
    assert reply["usage"] == {
        "input_tokens": num_prompt - num_prompt // 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_prompt // 2,
        "output_tokens": 3,
    }


@pytest.mark.parametrize("step_by_step", [True, False])
async def test_a_stream_adds_up_to_the_whole(scripted: Any, rules: Any, step_by_step: bool) -> None:
    scripted.engine.in_step = step_by_step
    whole = await ask(scripted, max_tokens=60)
    events, message = await streamed(scripted, rules, max_tokens=60)
    assert events[1] == {"type": "ping"}
    assert {**message, "id": ""} == {**whole, "id": ""}


@pytest.mark.usefixtures("marked")
async def test_thinking_and_calls(scripted: Any, rules: Any) -> None:
    scripted.engine.script = rules.SCRIPT
    scripted.engine.in_step = True
    whole = await ask(scripted, max_tokens=100, tools=[WEATHER])
    _, message = await streamed(scripted, rules, max_tokens=100, tools=[WEATHER])
    for reply in (whole, message):
        assert reply["stop_reason"] == "tool_use"
        thinking, text, first, second = reply["content"]
        assert thinking == {"type": "thinking", "thinking": "let me see 日本", "signature": ""}
        assert text == {"type": "text", "text": "\n\nI call: "}
        assert first["id"].startswith("call_")
        assert first["id"] != second["id"]
        assert (first["name"], first["input"]) == ("get", {"city": "Köln"})
        assert (second["name"], second["input"]) == ("now", {})


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("arguments", ["", "[1", "7", "{", '{"a":' * 300 + "1" + "}" * 299])
async def test_calls_that_are_no_objects(roomy: Any, arguments: str) -> None:
    roomy.engine.script = f"[get|{arguments}]"
    reply = await ask(roomy, max_tokens=3000)
    assert reply["content"][0]["input"] == {}


@pytest.mark.usefixtures("marked")
async def test_a_call_as_deep_as_a_model_likes(roomy: Any) -> None:
    roomy.engine.script = "[get|" + '{"a":' * 300 + "1" + "}" * 300 + "]"
    found = (await ask(roomy, max_tokens=3000))["content"][0]["input"]
    for _ in range(300):
        found = found["a"]
    assert found == 1


@pytest.mark.usefixtures("marked")
async def test_a_call_that_is_cut(scripted: Any, rules: Any) -> None:
    scripted.engine.script = rules.SCRIPT
    reply = await ask(scripted, max_tokens=rules.SCRIPT.encode().index(b"city"))
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"][-1]["input"] == {}


@pytest.mark.usefixtures("marked")
async def test_a_call_without_an_end_is_not_to_be_made(scripted: Any, rules: Any) -> None:
    """The model has ended amid a call: its input is lost, so nobody may take the turn for one of calls."""
    scripted.engine.script, scripted.engine.in_step = '[get|{"city": "K', True
    reply = await ask(scripted, max_tokens=60)
    assert (reply["stop_reason"], reply["content"][0]["input"]) == ("end_turn", {})
    body = {**ASK, "max_tokens": 60, "stream": True}
    async with scripted.session.post(scripted.url + "/v1/messages", json=body) as streamed_reply:
        [last] = [e for e in rules.named_events(await streamed_reply.read()) if e["type"] == "message_delta"]
    assert last["delta"]["stop_reason"] == "end_turn"
    scripted.engine.script = '[now|{}][get|{"city": "K'
    assert (await ask(scripted, max_tokens=60))["stop_reason"] == "tool_use"


async def test_stop_sequences(scripted: Any, rules: Any) -> None:
    scripted.engine.script = "one two three"
    reply = await ask(scripted, max_tokens=50, stop_sequences=["two", "never"])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "two")
    assert reply["content"] == [{"type": "text", "text": "one "}]
    _, message = await streamed(scripted, rules, max_tokens=50, stop_sequences=["two"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")


async def test_max_tokens_beyond_the_context_is_cut(scripted: Any) -> None:
    scripted.engine.script = "x" * 1000
    reply = await ask(scripted, max_tokens=32000)
    assert reply["stop_reason"] == "model_context_window_exceeded"
    assert len(prompt_of(scripted)) + reply["usage"]["output_tokens"] == 256


@pytest.mark.usefixtures("marked")
async def test_history(server: Any) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    seen: list[Any] = []
    render = server.engine.render_chat

    async def watched(conversation: Any, form: Any) -> str:
        found = conversation()
        seen.append((found, form))
        return str(await render(found, form))

    server.engine.render_chat = watched
    await ask(server, system=[{"type": "text", "text": "be brief"}], messages=messages, tools=[WEATHER])
    given = seen[0][0]
    call = ToolCall(id="t1", name="get", arguments={"a": 1})
    assert given.messages == (
        Message(role="system", content="be brief"),
        Message(role="user", content="what?"),
        Message(role="assistant", content="I look", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", tool_call_id="t1", content="sun", name="get"),
        Message(role="tool", tool_call_id="t2", content="The tool failed."),
        Message(role="user", content="and?"),
    )
    tool = Tool(name="get", description="weather", parameters={"type": "object"})
    assert given.tools == (tool,)
    await ask(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert seen[1][0].tools == ()
    await ask(server, messages=[*ASK["messages"], {"role": "assistant", "content": "The answer is"}])
    assert (seen[2][1].add_generation_prompt, seen[2][1].continue_final_message) == (False, True)
    await ask(server, thinking={"type": "disabled"})
    assert seen[3][1].template_arguments == {"enable_thinking": False, "thinking": False}


BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cch={};\n"


async def test_the_billing_line_spoils_no_prefix(server: Any, serve: Any) -> None:
    systems: list[Any] = [
        BILLING.format(1) + "be brief",
        [{"type": "text", "text": BILLING.format(2)}, {"type": "text", "text": "be brief"}],
    ]
    for system in systems:
        await ask(server, system=system)
    assert prompt_of(server, 0) == prompt_of(server, 1) == "[system]be brief[user]hello[assistant]"
    async with serve(keep_billing_header=True) as other:
        await ask(other, system=systems[0])
        assert "billing" in prompt_of(other)


def test_blocks_keep_their_order() -> None:
    """Texts before, between and behind the results of calls are turns of their own there."""
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "ab"]
    texts = [{"type": "text", "text": text} for text in ("one", "two", "three", "four")]
    content = [texts[0], texts[1], results[0], texts[2], results[1], texts[3]]
    turns = read_history(Fields({"messages": [{"role": "user", "content": content}]}), "")
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "one\ntwo"), ("tool", "a"), ("user", "three"), ("tool", "b"), ("user", "four"),
    ]  # fmt: skip


async def test_counting(server: Any) -> None:
    body = {"messages": ASK["messages"], "system": "be brief"}
    assert await server.post("/v1/messages/count_tokens", body) == (200, {"input_tokens": 38})
    assert server.engine.prompts == []
    await ask(server, system="be brief")
    assert len(prompt_of(server)) == 38


async def test_headers_of_the_client_and_fields_without_effect(server: Any) -> None:
    body = {
        **ASK,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "nonsense": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "X-Request-Id": "mine"}
    async with server.session.post(server.url + "/v1/messages", json=body, headers=headers) as reply:
        assert reply.headers["X-Oneloop-Ignored"] == "thinking.budget_tokens, metadata, nonsense"
        assert (await reply.json())["id"] == "msg_mine"


async def test_names_within_objects_and_blocks(server: Any) -> None:
    """`cache_control` may stand anywhere, and what comes back from a reply is known."""
    marked = {"cache_control": {"type": "ephemeral"}}
    body = {
        **ASK,
        "system": [{"type": "text", "text": "x", **marked, "lang": "en"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", **marked, "txt": 1}], "nam": "n"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "x", "citations": None},
                    {"type": "tool_use", "id": "1", "name": "get", "inputs": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "result": "x"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "source": {"type": "text", "data": "x", "media_type": "text/plain", "url": "u"},
                        "title": "t",
                    }
                ],
            },
        ],
        "tools": [{**WEATHER, **marked, "inputschema": {}}],
        "tool_choice": {"type": "none", "nam": "x"},
        "thinking": {"type": "disabled", "budget": 5},
        "output_config": {"effort": "low"},
    }
    async with server.session.post(server.url + "/v1/messages", json=body) as reply:
        assert reply.status == 200, await reply.text()
        named = reply.headers["X-Oneloop-Ignored"].split(", ")
    assert sorted(named) == [
        "messages[0].content[0].txt", "messages[0].nam", "messages[1].content[3].inputs",
        "messages[2].content[0].result",
        "messages[3].content[0].source.url", "messages[3].content[0].title", "output_config.effort", "system[0].lang",
        "thinking.budget", "tool_choice.nam", "tools[0].inputschema",
    ]  # fmt: skip


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


DEEP: Any = {}
for _ in range(500):
    DEEP = {"a": DEEP}
BAD: list[dict[str, Any]] = [
    {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 2**63}, {"max_tokens": "1"},
    {"messages": None}, {"messages": []}, {"messages": "x"}, {"messages": [1]}, {"messages": [{}]},
    {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x"}] * 4097},
    message(None), message([]), message([1]), message(["x"]), message([{}]), message([{"type": "text"}]), message(7),
    message([{"type": "text", "text": 1}]), message([{"type": "image", "source": {}}]),
    message([{"type": "document", "source": {"type": "base64", "data": ""}}]),
    message([{"type": "tool_result"}]), message([{"type": "tool_result", "tool_use_id": "x" * 257}]),
    message([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]),
    message([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]),
    message([{"type": "tool_use", "id": "t", "name": "", "input": {}}], "assistant"),
    message([{"type": "tool_use", "id": "t", "name": "f", "input": []}], "assistant"),
    message([{"type": "thinking"}], "assistant"), message([{"type": "nonsense"}], "assistant"),
    message([{"type": "text", "text": "x"}] * 4097),
    {"system": 1}, {"system": [1]}, {"system": [{"type": "image"}]},
    {"stop_sequences": "x"}, {"stop_sequences": [""]}, {"stop_sequences": ["x"] * 17}, {"stop_sequences": ["x" * 2000]},
    {"temperature": -1}, {"temperature": "hot"}, {"temperature": 1000}, {"top_p": 0}, {"top_p": 2}, {"top_k": -2},
    {"top_k": 2**40}, {"seed": 2**70}, {"priority": 2**70}, {"cache_salt": "x" * 129}, {"min_tokens": 10**12}, {"n": 2},
    {"stream": 1}, {"tools": {}}, {"tools": [1]}, {"tools": [{}]}, {"tools": [WEATHER, WEATHER]},
    {"tools": [{**WEATHER, "name": "x" * 257}]}, {"tools": [{**WEATHER, "input_schema": []}]},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {"tools": [WEATHER] * 1025},
    {"tool_choice": "auto"}, {"tool_choice": {}}, {"tool_choice": {"type": "x"}}, {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool"}}, {"tool_choice": {"type": "tool", "name": "nope"}, "tools": [WEATHER]},
    {"thinking": 1}, {"thinking": {"type": "x"}}, {"thinking": {"type": "enabled", "budget_tokens": 0}},
    {"mcp_servers": [{}]}, {"output_config": {"format": {"type": "json_schema"}}},
    {"chat_template_kwargs": {"tools": []}}, {"model": 1}, {"tools": [{**WEATHER, "input_schema": DEEP}]},
    message([{"type": "tool_use", "id": "t", "name": "f", "input": DEEP}], "assistant"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(BAD)))
async def test_what_is_refused(server: Any, index: int) -> None:
    for stream in (False, True):
        status, reply = await server.post(
            "/v1/messages", {**ASK, **BAD[index], "stream": BAD[index].get("stream", stream)}
        )
        assert status == 400, reply
        assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")
        assert set(reply["error"]) == {"type", "message"}
        assert next(iter(BAD[index])) in reply["error"]["message"]
        assert len(reply["error"]["message"]) < 400
    assert server.engine.prompts == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("not_found_error", 404),
        ("overloaded_error", 503),
        ("invalid_request_error", 405),
        ("invalid_request_error", 415),
        ("request_too_large", 413),
    ],
)
async def test_errors_have_anthropics_form(serve: Any, fake_engine_type: Any, kind: str, status: int) -> None:
    async with serve(fake_engine_type(), max_body_bytes=4096) as server:
        server.engine.overloaded = status == 503
        body = {**ASK, "model": "other"} if status == 404 else ASK
        if status == 413:
            body = {**ASK, "system": "x" * 5000}
        method = "PUT" if status == 405 else "POST"
        options: dict[str, Any] = {"data": "x"} if status == 415 else {"json": body}
        async with server.session.request(method, server.url + "/v1/messages", **options) as reply:
            found = await reply.json()
            assert reply.status == status
            assert (found["type"], found["error"]["type"]) == ("error", kind)
            assert found["request_id"] == reply.headers["X-Request-Id"]
            assert ("Retry-After" in reply.headers) == (status == 503)


async def test_a_failure_under_way_is_an_error_event(scripted: Any, rules: Any) -> None:
    scripted.engine.fail_after, scripted.engine.in_step = 4, True
    async with scripted.session.post(scripted.url + "/v1/messages", json={**ASK, "stream": True}) as reply:
        events = rules.named_events(await reply.read())
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert all(event["type"] != "message_stop" for event in events)
    status, found = await scripted.post("/v1/messages", ASK)
    assert (status, found["error"]["type"]) == (500, "api_error")


async def test_who_leaves_ends_the_request(scripted: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.01, "x" * 200
    reply = await scripted.session.post(
        scripted.url + "/v1/messages", json={**ASK, "max_tokens": 200, "stream": True}
    )
    await reply.content.readany()
    reply.close()
    await scripted.settled()
    assert scripted.engine.generated < 200


async def test_junk_is_a_400_and_nothing_else(server: Any) -> None:
    """Values of all kinds in all places."""
    source = random.Random(3)
    values = [
        None,
        True,
        0,
        -1,
        2**70,
        1e308,
        "",
        "x",
        [],
        {},
        [[]],
        [{}],
        [None],
        {"type": "text"},
        {"type": ["x"]},
        {"a": {"b": []}},
    ]
    names = [
        *ASK,
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "stop_sequences",
        "stream",
        "metadata",
        "output_config",
        "cache_salt",
    ]
    for _ in range(400):
        body: dict[str, Any] = {**ASK, **{source.choice(names): source.choice(values) for _ in range(2)}}
        if source.random() < 0.5:
            block = {
                key: source.choice(values)
                for key in ("type", "text", "id", "name", "input", "content", "source", "tool_use_id")
            }
            block["type"] = source.choice(["text", "tool_use", "tool_result", "thinking", "document", 1])
            body["messages"] = [{"role": source.choice(["user", "assistant"]), "content": [block]}]
        status, reply = await server.post("/v1/messages", {**body, "stream": False})
        assert status in (200, 400, 404), (body, reply)
