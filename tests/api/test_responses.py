"""/v1/responses over the double of the engine."""
# ruff: noqa: E501  (tables)

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from oneloop.api.protocol.fields import Fields
from oneloop.api.responses.history import read_input
from oneloop.tokenize.conversation import Message, Tool, ToolCall

ASK = {"model": "fake", "input": "hello", "max_output_tokens": 12}
GET = {"type": "function", "name": "get", "description": "weather", "parameters": {"type": "object"}}
PATH = "/v1/responses"


def prompt_of(server: Any, at: int = -1) -> str:
    """The text that the double was asked to go on with."""
    return bytes(server.engine.prompts[at]).decode()


async def ask(server: Any, **members: Any) -> dict[str, Any]:
    status, reply = await server.post(PATH, {**ASK, **members})
    assert status == 200, reply
    return dict(reply)


async def streamed(server: Any, rules: Any, **members: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    async with server.session.post(server.url + PATH, json={**ASK, **members, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        events = rules.named_events(await reply.read())
    return events, rules.ResponsesRules.check(events)


async def get(server: Any, response_id: str, **options: Any) -> tuple[int, Any]:
    async with server.session.get(f"{server.url}{PATH}/{response_id}", **options) as reply:
        return reply.status, await reply.json()


def same(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is new each time."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_a_whole_response(scripted: Any) -> None:
    reply = await ask(scripted, instructions="be brief", metadata={"a": "b"}, temperature=0.5)
    assert prompt_of(scripted) == "[system]be brief[user]hello[assistant]"
    assert reply["id"].startswith("resp_")
    assert (reply["object"], reply["status"], reply["error"]) == ("response", "incomplete", None)
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (reply["instructions"], reply["metadata"], reply["temperature"]) == ("be brief", {"a": "b"}, 0.5)
    item = reply["output"][0]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert reply["usage"] == {
        "input_tokens": 38,
        "input_tokens_details": {"cached_tokens": 19},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 50,
    }


@pytest.mark.parametrize("limit", [12, 200])
@pytest.mark.parametrize("step_by_step", [True, False])
async def test_a_stream_ends_with_the_whole(
    scripted: Any, rules: Any, step_by_step: bool, limit: int
) -> None:
    scripted.engine.in_step = step_by_step
    whole = await ask(scripted, max_output_tokens=limit)
    assert whole["status"] == ("incomplete" if limit == 12 else "completed")
    _, final = await streamed(scripted, rules, max_output_tokens=limit)
    assert same(final) == same(whole)
    assert (await get(scripted, final["id"]))[1] == final


@pytest.mark.usefixtures("marked")
async def test_reasoning_and_calls(scripted: Any, rules: Any) -> None:
    scripted.engine.script, scripted.engine.in_step = rules.SCRIPT, True
    whole = await ask(scripted, max_output_tokens=100, tools=[GET])
    events, final = await streamed(scripted, rules, max_output_tokens=100, tools=[GET])
    assert same(whole) == same(final)
    reasoning, message, first, second = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see 日本"}]
    assert message["content"][0]["text"] == "\n\nI call: "
    assert (first["name"], first["arguments"]) == ("get", '{"city": "Köln"}')
    assert (second["name"], second["arguments"]) == ("now", "{}")
    assert first["call_id"] != second["call_id"]
    kinds = {event["type"].removeprefix("response.") for event in events}
    assert kinds == {
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "reasoning_text.delta", "reasoning_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    }  # fmt: skip


@pytest.mark.usefixtures("marked")
async def test_items_say_whether_they_are_whole(scripted: Any, rules: Any) -> None:
    """A call that the model leaves off is not; neither is what a limit cuts, and events say what the end says."""
    for script, limit, statuses in (
        ('[now|{}][get|{"city": "K', 60, ["completed", "incomplete"]),
        ("<t>hm</t>yes", 60, ["completed", "completed"]),
        ("<t>hm</t>yes", 11, ["completed", "incomplete"]),
        ("[now|{}]", 8, ["completed"]),
    ):
        scripted.engine.script, scripted.engine.in_step = script, True
        whole = await ask(scripted, max_output_tokens=limit)
        events, final = await streamed(scripted, rules, max_output_tokens=limit)
        done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
        for told in ([item["status"] for item in whole["output"]], done):
            assert told == statuses, script
        assert [item["status"] for item in final["output"]] == statuses


@pytest.mark.usefixtures("marked")
async def test_a_call_too_deep_to_be_stored(roomy: Any) -> None:
    arguments = '{"a":' * 300 + "1" + "}" * 300
    roomy.engine.script = f"[get|{arguments}]"
    reply = await ask(roomy, max_output_tokens=3000)
    assert reply["output"][0]["arguments"] == arguments
    roomy.engine.script = "yes"
    assert (await ask(roomy, previous_response_id=reply["id"]))["status"] == "completed"


@pytest.mark.usefixtures("marked")
async def test_logprobs_are_those_of_the_text(scripted: Any, rules: Any) -> None:
    scripted.engine.script, scripted.engine.in_step = "<t>hm</t>yes [now|{}]", True
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 100}
    for reply in ((await streamed(scripted, rules, **wanted))[1], await ask(scripted, **wanted)):
        part = next(item for item in reply["output"] if item["type"] == "message")["content"][0]
        assert "yes " in "".join(entry["token"] for entry in part["logprobs"])
        assert "hm" not in "".join(entry["token"] for entry in part["logprobs"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        assert reply["top_logprobs"] == 2


@pytest.mark.usefixtures("marked")
async def test_items_of_the_input(server: Any) -> None:
    seen: list[Any] = []
    render = server.engine.render_chat

    async def watched(conversation: Any, form: Any) -> str:
        found = conversation()
        seen.append((found, form))
        return str(await render(found, form))

    server.engine.render_chat = watched
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "what"}, {"type": "input_text", "text": "now?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"a": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
    ]  # fmt: skip
    await ask(server, input=items, tools=[GET], reasoning={"effort": "low"})
    given, form = seen[0]
    calls = (ToolCall(id="c1", name="get", arguments={"a": 1}), ToolCall(id="c2", name="now"))
    assert given.messages == (
        Message(role="developer", content="be brief"),
        Message(role="user", content="what\nnow?"),
        Message(role="assistant", reasoning="hm", tool_calls=calls),
        Message(role="tool", tool_call_id="c1", content="sun", name="get"),
        Message(role="tool", tool_call_id="c2", content="noon", name="now"),
        Message(role="assistant", content="ok"),
    )
    assert form.template_arguments["reasoning_effort"] == "low"
    assert given.tools == (Tool(name="get", description="weather", parameters={"type": "object"}),)


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"content": [{"type": "reasoning_text", "text": "all of it"}]}, "all of it"),
        ({"summary": [{"type": "summary_text", "text": "in short"}]}, "in short"),
        (
            {
                "content": [{"type": "reasoning_text", "text": "all of it"}],
                "summary": [{"type": "summary_text", "text": "in short"}],
            },
            "all of it",
        ),
        ({"content": [], "summary": [{"type": "summary_text", "text": "in short"}]}, "in short"),
    ],
)
def test_what_was_thought(item: dict[str, Any], thought: str) -> None:
    """Its text; the summary only of an item without one."""
    [turn] = read_input(Fields({"input": [{"type": "reasoning", **item}]}), [])
    assert turn["reasoning"] == thought


@pytest.mark.usefixtures("marked")
async def test_going_on(scripted: Any, rules: Any) -> None:
    scripted.engine.script = '<t>hm</t>[get|{"city": "Köln"}]'
    first = await ask(scripted, max_output_tokens=100, instructions="only now", input="weather?")
    call = first["output"][1]
    scripted.engine.script = "sunny"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    second = await ask(scripted, input=[result], previous_response_id=first["id"], max_output_tokens=100)
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(scripted) == "[user]weather?[assistant][tool]sun[assistant]"
    await ask(scripted, input="sure?", previous_response_id=second["id"])
    assert prompt_of(scripted) == "[user]weather?[assistant][tool]sun[assistant]sunny[user]sure?[assistant]"
    await ask(scripted, input="other", previous_response_id=first["id"])  # a fork
    assert prompt_of(scripted) == "[user]weather?[assistant][user]other[assistant]"


async def test_what_is_not_stored(server: Any, serve: Any) -> None:
    reply = await ask(server, store=False)
    assert reply["store"] is False
    assert (await get(server, reply["id"]))[0] == 404
    status, found = await server.post(PATH, {**ASK, "previous_response_id": reply["id"]})
    assert (status, found["error"]["param"]) == (404, "previous_response_id")
    async with serve(response_store_entries=0) as other:
        reply = await ask(other)
        assert reply["store"] is False
        assert (await get(other, reply["id"]))[0] == 404
        assert (await other.post(PATH, {**ASK, "background": True}))[0] == 400


async def test_deleting(server: Any) -> None:
    reply = await ask(server)
    async with server.session.delete(f"{server.url}{PATH}/{reply['id']}") as gone:
        assert await gone.json() == {"id": reply["id"], "object": "response", "deleted": True}
    assert (await get(server, reply["id"]))[0] == 404
    async with server.session.delete(f"{server.url}{PATH}/{reply['id']}") as gone:
        assert gone.status == 404


async def until_ended(server: Any, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while (reply := (await get(server, response_id))[1])["status"] == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return dict(reply)


async def test_in_the_background(server: Any) -> None:
    server.engine.paused.clear()
    begun = await ask(server, background=True, max_output_tokens=200, seed=3)
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    assert (await get(server, begun["id"]))[1]["status"] == "in_progress"
    status, refused = await server.post(PATH, {**ASK, "previous_response_id": begun["id"]})
    assert (status, refused["error"]["param"]) == (400, "previous_response_id")
    server.engine.paused.set()
    done = await until_ended(server, begun["id"])
    assert done["status"] == "completed"
    assert same(done)["output"] == same(await ask(server, max_output_tokens=200, seed=3))["output"]
    status, refused = await server.post(f"{PATH}/{begun['id']}/cancel")
    assert (status, refused["error"]["param"]) == (400, "response_id")


async def test_cancelling(scripted: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.005, "x" * 300
    begun = await ask(scripted, background=True, max_output_tokens=200)
    await asyncio.sleep(0.05)
    status, reply = await scripted.post(f"{PATH}/{begun['id']}/cancel")
    assert (status, reply["status"]) == (200, "cancelled")
    await scripted.settled()
    done = await until_ended(scripted, begun["id"])
    assert done["status"] == "cancelled"
    assert 0 < done["usage"]["output_tokens"] < 200
    assert (await scripted.post(f"{PATH}/{begun['id']}/cancel"))[1]["status"] == "cancelled"


async def test_deleting_what_runs(server: Any) -> None:
    server.engine.paused.clear()
    begun = await ask(server, background=True)
    async with server.session.delete(f"{server.url}{PATH}/{begun['id']}") as gone:
        assert gone.status == 200
    await server.settled()
    assert (await get(server, begun["id"]))[0] == 404


async def test_cancelling_a_stream(scripted: Any, rules: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.005, "x" * 300
    body = {**ASK, "stream": True, "max_output_tokens": 200}
    async with scripted.session.post(scripted.url + PATH, json=body) as reply:
        first = await reply.content.readuntil(b"\n\n")
        response_id = rules.named_events(first)[0]["response"]["id"]
        assert (await scripted.post(f"{PATH}/{response_id}/cancel"))[0] == 200
        events = rules.named_events(first + await reply.read())
    assert rules.ResponsesRules.check(events)["status"] == "cancelled"


async def test_who_leaves_cancels(scripted: Any, rules: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.01, "x" * 300
    body = {**ASK, "stream": True, "max_output_tokens": 200}
    reply = await scripted.session.post(scripted.url + PATH, json=body)
    response_id = rules.named_events(await reply.content.readuntil(b"\n\n"))[0]["response"]["id"]
    reply.close()
    await scripted.settled()
    assert (await until_ended(scripted, response_id))["status"] == "cancelled"
    assert scripted.engine.generated < 200


async def test_failures(scripted: Any, rules: Any) -> None:
    scripted.engine.fail_after, scripted.engine.in_step = 4, True
    _, final = await streamed(scripted, rules)
    assert (final["status"], final["error"]["code"]) == ("failed", "server_error")
    assert (await get(scripted, final["id"]))[1]["status"] == "failed"
    assert (await scripted.post(PATH, ASK))[0] == 500
    begun = await ask(scripted, background=True)
    assert (await until_ended(scripted, begun["id"]))["status"] == "failed"


async def test_each_owner_has_its_own(serve: Any) -> None:
    """There is one key today; the store compares all the same."""
    async with serve(api_key="k") as server:
        mine = {"Authorization": "Bearer k"}
        status, reply = await server.post(PATH, ASK, headers=mine)
        assert status == 200
        assert (await get(server, reply["id"], headers=mine))[0] == 200
        assert (await get(server, reply["id"], headers={"X-Api-Key": "k"}))[0] == 200
        assert (await get(server, reply["id"]))[0] == 401


async def test_truncation(server: Any) -> None:
    items = [{"role": "system", "content": "S"}]
    for turn in range(20):
        items += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": "yes"}]
    items.append({"role": "user", "content": "last"})
    status, reply = await server.post(PATH, {**ASK, "input": items})
    assert (status, reply["error"]["param"]) == (400, "input")
    assert "context_length_exceeded" in reply["error"]["message"]
    await ask(server, input=items, truncation="auto")
    prompt = prompt_of(server)
    assert prompt.startswith("[system]S[user]question ")
    assert prompt.endswith("[user]last[assistant]")
    assert 256 - 12 - 40 < len(prompt) <= 256 - 12
    status, reply = await server.post(PATH, {**ASK, "input": "x" * 300, "truncation": "auto"})
    assert (status, reply["error"]["param"]) == (400, "input")


async def test_rendering(server: Any) -> None:
    first = await ask(server, instructions="be brief")
    body = {
        **ASK,
        "input": "and?",
        "previous_response_id": first["id"],
        "temperature": 0.5,
        "request_id": "mine",
    }
    status, rendered = await server.post(PATH + "/render", body)
    assert status == 200
    assert len(server.engine.prompts) == 1
    assert rendered["request_id"] == "resp-mine"
    await ask(server, input="and?", previous_response_id=first["id"])
    assert rendered["token_ids"] == server.engine.prompts[1]
    assert rendered["sampling_params"]["temperature"] == 0.5
    assert rendered["sampling_params"]["max_tokens"] == 12
    assert (await server.post(PATH + "/render", {**ASK, "temperature": -1}))[0] == 400


async def test_fields_without_effect(server: Any) -> None:
    body = {
        **ASK,
        "user": "u",
        "service_tier": "auto",
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "nonsense": 1,
    }
    async with server.session.post(server.url + PATH, json=body) as reply:
        assert reply.headers["X-Oneloop-Ignored"] == "include, user, service_tier, nonsense, text.verbosity"


async def test_names_within_objects_and_items(server: Any) -> None:
    """What comes back from a reply is known, what nobody knows is named by its path."""
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c", "name": "f"}
    known = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    body = {
        **ASK,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x", "txt": 1}], "nam": "n"},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [known]},
            {**call, "argument": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x", "outputs": "y"},
            {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "x", "a": 1}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameter": {}}],
        "tool_choice": {"type": "function", "name": "f", "mode": "x"},
        "reasoning": {"efort": "low"},
        "stream_options": {"include_usage": True, "include_usag": True},
    }
    async with server.session.post(server.url + PATH + "/render", json=body) as reply:
        assert reply.status == 200, await reply.text()
        named = reply.headers["X-Oneloop-Ignored"].split(", ")
    assert sorted(named) == [
        "input[0].content[0].txt", "input[0].nam", "input[2].argument", "input[3].outputs", "input[4].content[0].a",
        "reasoning.efort", "stream_options.include_usag", "tool_choice.mode", "tools[0].parameter",
    ]  # fmt: skip


def item(**members: Any) -> dict[str, Any]:
    return {"input": [members]}


DEEP: Any = {}
for _ in range(500):
    DEEP = {"a": DEEP}
BAD: list[dict[str, Any]] = [
    {"input": None}, {"input": []}, {"input": {}}, {"input": 1}, {"input": [1]}, {"input": [[]]}, item(), item(role="user"),
    item(role="nobody", content="x"), item(role="user", content=1), item(role="user", content=[1]),
    item(role="user", content=[{"type": "input_image", "image_url": "x"}]), item(role="user", content=[{"type": "input_text"}]),
    item(role="user", content=[{"type": "input_text", "text": "x"}] * 4097), {"input": [{"role": "user", "content": "x"}] * 4097},
    item(type="function_call"), item(type="function_call", call_id="c", name="f", arguments="[]"),
    item(type="function_call", call_id="c", name="f", arguments="{"), item(type="function_call", call_id="c" * 257, name="f", arguments="{}"),
    item(type="function_call_output"), item(type="function_call_output", call_id="c", output=None), item(type="item_reference", id="x"),
    item(type="reasoning", content="x"), item(type="reasoning", content=[{"type": "x"}]), item(type=["x"]),
    {"max_output_tokens": 0}, {"max_output_tokens": -1}, {"max_output_tokens": 2**63}, {"max_output_tokens": 10**6},
    {"temperature": -1}, {"top_p": 0}, {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
    {"top_logprobs": -1, "include": ["message.output_text.logprobs"]}, {"include": "x"}, {"include": [1]}, {"include": ["x"] * 65},
    {"metadata": 1}, {"metadata": {"a": 1}}, {"metadata": {"a": "x" * 513}}, {"metadata": {"x" * 65: "a"}},
    {"metadata": {str(i): "" for i in range(17)}}, {"tools": {}}, {"tools": [1]}, {"tools": [{}]}, {"tools": [{"type": "web_search"}]},
    {"tools": [{**GET, "name": ""}]}, {"tools": [{**GET, "parameters": 1}]}, {"tools": [GET, GET]}, {"tools": [GET] * 1025},
    {"tool_choice": "x"}, {"tool_choice": "required"}, {"tool_choice": {"type": "function"}}, {"tool_choice": {"type": "mcp"}},
    {"reasoning": 1}, {"reasoning": {"effort": "x"}}, {"text": 1}, {"text": {"format": 1}}, {"text": {"format": {"type": "x"}}},
    {"truncation": "x"}, {"background": True, "store": False}, {"background": True, "stream": True}, {"store": 1},
    {"previous_response_id": 1}, {"instructions": 1}, {"conversation": "x"}, {"prompt": {"id": "x"}}, {"seed": 2**70}, {"n": 2},
    {"stop": ["x"] * 17}, {"logit_bias": {"x": 1}}, {"cache_salt": "x" * 129}, {"priority": 1}, {"max_tool_calls": "x"},
    {"chat_template_kwargs": {"messages": 1}}, {"parallel_tool_calls": 1}, {"tools": [{**GET, "parameters": DEEP}]},
    item(type="function_call", call_id="c", name="f", arguments='{"a":' * 500 + "1" + "}" * 500), {"tool_choice": DEEP},
    {"text": {"format": DEEP}},
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(BAD)))
async def test_what_is_refused(server: Any, index: int) -> None:
    for stream in (False, True):
        if "background" in BAD[index] and stream:
            continue
        status, reply = await server.post(PATH, {"stream": stream, **ASK, **BAD[index]})
        assert status == 400, reply
        assert reply["error"]["param"].startswith(next(iter(BAD[index])))
        assert len(reply["error"]["message"]) < 400
    assert server.engine.prompts == []


@pytest.mark.parametrize(
    "response_id", ["x", "resp_" + "0" * 32, "%2e%2e", "%F0%9F%99%82", "%ff", "%00", "x" * 3000]
)
async def test_unknown_ids(server: Any, response_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        async with server.session.request(method, f"{server.url}{PATH}/{response_id}{path}") as reply:
            assert reply.status == 404
            assert len(await reply.read()) < 400


async def test_junk_is_a_400_and_nothing_else(server: Any) -> None:
    source = random.Random(5)
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
        "instructions",
        "tools",
        "tool_choice",
        "reasoning",
        "text",
        "stream_options",
        "metadata",
        "include",
        "truncation",
        "store",
        "previous_response_id",
    ]
    for _ in range(400):
        body: dict[str, Any] = {**ASK, **{source.choice(names): source.choice(values) for _ in range(2)}}
        if source.random() < 0.5:
            made = {
                key: source.choice(values)
                for key in ("role", "content", "call_id", "name", "arguments", "output", "summary")
            }
            made["type"] = source.choice(["message", "function_call", "function_call_output", "reasoning", 1])
            body["input"] = [made]
        status, reply = await server.post(PATH, body)
        assert status in (200, 400, 404), (body, reply)
