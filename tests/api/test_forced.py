"""Calls that must come, and answers of a form, from models that think and models that do not.

The engine is the null executor's: it draws its text where the masks allow it, and any allowed token elsewhere, so what
holds here holds for the worst of models.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
THINK, END_THINK = "<think>", "</think>"
HERMES = '{#<tool_call>{"name": …, "arguments": …}</tool_call>#}'
MAYBE = HERMES + "{#</think>#}{% for message in messages %}{{ message.content }}{% endfor %}[assistant]"
"""The model may think or not."""
OPENED = MAYBE + "<think>\n"
ANSWER = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "n": {"type": "integer", "maximum": 99},
    },
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "answer": ANSWER}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CLOSED = OPENED + "\n</think>\n\n"
MARKS = (THINK, END_THINK)


@pytest.fixture(scope="module")
def tokenizers(byte_tokenizer: Any) -> dict[Any, Any]:
    """By template and marks; made here, as it takes a while that no event loop of a test has."""
    return {
        (template, marks): byte_tokenizer(template, marks)
        for template in (MAYBE, OPENED, CLOSED)
        for marks in (MARKS, ())
    }


@pytest.fixture
def engine_of(null_engine_type: Any, tokenizers: dict[Any, Any]) -> Any:
    """An engine of a template; `text` is drawn where nothing forbids it. ends: and so is the end."""

    def make(
        template: str = MAYBE, text: str | bytes = "some text ", *, marks: Any = MARKS, ends: bool = False
    ) -> Any:
        tokenizer = tokenizers[template, marks]
        tokens = (
            [*text, tokenizer.token_id(END_THINK)]
            if isinstance(text, bytes)
            else tokenizer.encode(text, add_special_tokens=False)
        )
        if ends:
            tokens = [*tokenizer.eos_token_ids, *tokens]
        return null_engine_type(tokens=tokens, tokenizer=tokenizer, max_model_len=8192, max_num_seqs=64)

    return make


async def ask(server: Any, body: dict[str, Any], *, seed: int = 1) -> dict[str, Any]:
    """Whole and streamed, which say the same."""
    body = {"messages": USER, "max_tokens": 2000, "seed": seed, **body}
    status, whole = await server.post(CHAT, body)
    assert status == 200, whole
    choice = whole["choices"][0]
    events = await server.stream(CHAT, body)
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events[:-1]]
    calls: list[dict[str, str]] = []
    for part in parts:
        for piece in part["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    message = choice["message"]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    for name in ("content", "reasoning"):
        assert "".join(part["delta"].get(name, "") for part in parts) == (message.get(name) or "")
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    return {**choice, "calls": calls, "usage": whole["usage"]}


def check_calls(calls: list[dict[str, str]]) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


@pytest.mark.parametrize("template", [MAYBE, OPENED])
async def test_required(serve: Any, engine_of: Any, template: str) -> None:
    """Behind thinking that is open, and at once where the model might think."""
    counts, thinking = set(), set()
    async with serve(engine_of(template, "I think so. </think>")) as server:
        for seed in range(12):
            answer = await ask(server, {"tools": TOOLS, "tool_choice": "required"}, seed=seed)
            check_calls(answer["calls"])
            counts.add(len(answer["calls"]))
            assert answer["finish_reason"] == "tool_calls"
            assert answer["message"]["content"] is None
            thinking.add(answer["message"].get("reasoning"))
            num_thinking = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert (num_thinking > 0) is (template is OPENED)
    assert len(counts) > 1
    assert (len(thinking) > 1) is (template is OPENED)


async def test_calls_are_written_in_the_models_form(serve: Any, engine_of: Any) -> None:
    """And in one that any model can write, where its own is not known."""
    for settings, begin in (({}, '<tool_call>\n{"name": "'), ({"enable_auto_tool_choice": False}, "[")):
        async with serve(engine_of(), **settings) as server:
            for choice in ("required", NAMED):
                body = {"messages": USER, "max_tokens": 2000, "tools": TOOLS, "tool_choice": choice}
                status, reply = await server.post(CHAT, {**body, "return_token_ids": True})
                assert status == 200, reply
                text = bytes(token for token in reply["choices"][0]["token_ids"] if token < 256).decode()
                is_bare = choice is NAMED and bool(settings)
                assert text.startswith("{" if is_bare else begin), text
                check_calls([call["function"] for call in reply["choices"][0]["message"]["tool_calls"]])


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("qwen3_coder", "<tool_call>\n<function="),
        ("glm45", "<tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions."),
        ("pythonic", "["),
    ],
)
async def test_forms_whose_arguments_are_not_all_json(
    serve: Any, engine_of: Any, name: str, begin: str
) -> None:
    """And the form that any model can write, for a function that such a form cannot say."""
    open_one = {"type": "function", "function": {"name": "a_b", "parameters": {"maxProperties": 0}}}
    async with serve(engine_of(), tool_call_parser=name) as server:
        for more, is_own in (([], True), ([open_one], name == "kimi_k2")):
            for seed in range(4):
                body = {"messages": USER, "max_tokens": 2000, "tools": TOOLS + more, "seed": seed}
                body |= {"tool_choice": "required", "return_token_ids": True}
                status, reply = await server.post(CHAT, body)
                assert status == 200, reply
                choice = reply["choices"][0]
                text = bytes(token for token in choice["token_ids"] if token < 256).decode()
                is_any = text.lstrip("[ \n").startswith("{")
                assert text.startswith(begin) or is_any
                assert is_any is not is_own, text
                calls = [call["function"] for call in choice["message"]["tool_calls"]]
                assert calls
                for call in calls:
                    schema = {**SCHEMAS, "a_b": {"maxProperties": 0}}[call["name"]]
                    jsonschema.validate(json.loads(call["arguments"]), schema)
                ids = [call["id"] for call in choice["message"]["tool_calls"]]
                assert len(set(ids)) == len(ids)


async def test_many_functions_go_in_any_form(serve: Any, engine_of: Any) -> None:
    """More than there can be tags."""
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": {"maxProperties": 0}}}
        for number in range(300)
    ]
    async with serve(engine_of()) as server:
        answer = await ask(server, {"tools": tools, "tool_choice": "required"})
        assert answer["calls"]
        assert all(json.loads(call["arguments"]) == {} for call in answer["calls"])


async def test_one_call_only(serve: Any, engine_of: Any) -> None:
    async with serve(engine_of()) as server:
        for seed in range(12):
            body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
            answer = await ask(server, body, seed=seed)
            check_calls(answer["calls"])
            assert (len(answer["calls"]), answer["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize("settings", [{}, {"enable_auto_tool_choice": False}, {"reasoning_parser": "none"}])
async def test_named(serve: Any, engine_of: Any, settings: dict[str, Any]) -> None:
    async with serve(engine_of(), **settings) as server:
        for seed in range(8):
            answer = await ask(server, {"tools": TOOLS, "tool_choice": NAMED}, seed=seed)
            check_calls(answer["calls"])
            assert [call["name"] for call in answer["calls"]] == ["weather"]
            assert answer["finish_reason"] == "stop"


async def test_parameters_are_objects(serve: Any, engine_of: Any) -> None:
    """Also where the schema does not say so."""
    loose = [{"type": "function", "function": {"name": "f", "parameters": {"maxProperties": 0}}}]
    async with serve(engine_of()) as server:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            answer = await ask(server, {"tools": loose, "tool_choice": choice})
            assert all(json.loads(call["arguments"]) == {} for call in answer["calls"])
            assert answer["calls"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_what_cannot_be_forced(serve: Any, engine_of: Any, fields: dict[str, Any], param: str) -> None:
    async with serve(engine_of()) as server:
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", **fields}
        for stream in (False, True):
            status, reply = await server.post(CHAT, {**body, "stream": stream})
            assert (status, reply["error"]["param"]) == (400, param), reply


async def test_gpt_oss_cannot_be_forced(serve: Any, engine_of: Any) -> None:
    async with serve(engine_of(), reasoning_parser="gpt_oss", tool_call_parser="gpt_oss") as server:
        status, reply = await server.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "required"})
        assert (status, reply["error"]["param"]) == (400, "tool_choice")


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWER}}


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize(
    ("template", "text", "arguments", "thinks"),
    [
        (OPENED, "hm. </think>", {}, True),
        (MAYBE, "<think>hm</think>", {}, False),
        (MAYBE, "hm. </think>", {"enable_thinking": True}, True),
        (MAYBE, "<think>hm</think>", {"enable_thinking": False}, False),
        (CLOSED, "<think>hm</think>", {}, False),
    ],
)
async def test_a_form_behind_the_thinking(
    serve: Any,
    engine_of: Any,
    template: str,
    text: str,
    arguments: dict[str, Any],
    thinks: bool,
    with_tools: bool,
) -> None:
    async with serve(engine_of(template, text)) as server:
        for seed in range(6):
            body: dict[str, Any] = {"response_format": FORMAT, "chat_template_kwargs": arguments}
            if with_tools:
                body["tools"] = TOOLS
            answer = await ask(server, body, seed=seed)
            jsonschema.validate(json.loads(answer["message"]["content"]), ANSWER)
            assert answer["finish_reason"] == "stop"
            tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert (tokens > 0) is thinks


@pytest.mark.parametrize("form", [{"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_what_looks_like_the_end_of_thinking_is_none(
    serve: Any, engine_of: Any, form: dict[str, Any]
) -> None:
    """Other tokens of the same text: the grammar does not hold behind them, so the answer does not begin there."""
    found = set()
    async with serve(engine_of(OPENED, b"a</think></think></think>b")) as server:
        for seed in range(12):
            answer = await ask(server, form, seed=seed)
            if "response_format" in form:
                jsonschema.validate(json.loads(answer["message"]["content"]), ANSWER)
            else:
                check_calls(answer["calls"])
                assert answer["message"]["content"] is None
            found.add((answer["message"].get("reasoning") or "").count(END_THINK))
    assert found - {0}


@pytest.mark.parametrize(
    ("fields", "has_thought"),
    [
        ({}, True),
        ({"stop_token_ids": [ord("a")]}, True),
        ({"thinking_token_budget": 3}, True),
        ({"thinking_token_budget": 0}, False),
        ({"min_tokens": 3}, True),
    ],
)
@pytest.mark.parametrize("form", [{"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_nothing_ends_before_the_answer_begins(
    serve: Any, engine_of: Any, form: dict[str, Any], fields: dict[str, Any], has_thought: bool
) -> None:
    """A model that would end within its thinking, more often than not, gets to its answer all the same."""
    thoughts = set()
    async with serve(engine_of(OPENED, b"ab", ends=True)) as server:
        for seed in range(10):
            answer = await ask(server, {**form, **fields}, seed=seed)
            message = answer["message"]
            thoughts.add(message.get("reasoning") or "")
            if fields.get("stop_token_ids") and answer["finish_reason"] == "stop":
                continue  # That token may end the answer.
            if "tools" in form:
                check_calls(answer["calls"])
            else:
                jsonschema.validate(json.loads(message["content"]), ANSWER)
    assert any(thoughts) is has_thought
    if fields.get("stop_token_ids"):
        assert "a" not in "".join(thoughts)


async def test_thinking_that_max_tokens_cuts_is_no_answer(serve: Any, engine_of: Any) -> None:
    async with serve(engine_of(OPENED, "abcdefghij ", ends=True)) as server:
        answer = await ask(server, {"response_format": FORMAT, "max_tokens": 6})
        assert (answer["finish_reason"], answer["message"]["content"]) == ("length", None)
        assert len(answer["message"]["reasoning"]) == 6


async def test_a_form_that_looks_like_thinking(serve: Any, engine_of: Any) -> None:
    async with serve(engine_of(marks=())) as server:
        answer = await ask(server, {"structured_outputs": {"choice": ["<think>a</think>b"]}})
        assert answer["message"]["content"] == "<think>a</think>b"


@pytest.mark.parametrize("parser", ["qwen3", "kimi_k2"])
async def test_thinking_that_could_end_unseen_is_ended_at_once(
    serve: Any, engine_of: Any, parser: str
) -> None:
    """The end is no single token, or there is another way to end it."""
    marks = () if parser == "qwen3" else MARKS
    async with serve(engine_of(OPENED, marks=marks), reasoning_parser=parser) as server:
        answer = await ask(server, {"response_format": FORMAT})
        jsonschema.validate(json.loads(answer["message"]["content"]), ANSWER)
        assert not answer["message"].get("reasoning")


@pytest.mark.parametrize(("template", "budget"), [(OPENED, 7), (MAYBE, 7), (OPENED, 0), (MAYBE, 0)])
@pytest.mark.parametrize(
    "form", [{}, {"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}]
)
async def test_budgets(serve: Any, engine_of: Any, template: str, budget: int, form: dict[str, Any]) -> None:
    async with serve(engine_of(template, "abcdefghij ")) as server:
        answer = await ask(server, {"thinking_token_budget": budget, "max_tokens": 400, **form})
        message = answer["message"]
        assert len(message.get("reasoning") or "") in range(budget - 1, budget + 1) if budget else True
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1
        if "response_format" in form:
            jsonschema.validate(json.loads(message["content"]), ANSWER)
        if "tools" in form:
            check_calls(answer["calls"])


async def test_budgets_that_mean_nothing(serve: Any, engine_of: Any, server: Any) -> None:
    body = {"messages": USER, "max_tokens": 3, "thinking_token_budget": 5}
    async with server.session.post(server.url + CHAT, json=body) as reply:
        assert reply.headers["X-Oneloop-Ignored"] == "thinking_token_budget"
    assert (await server.post(CHAT, {**body, "thinking_token_budget": -1}))[0] == 400
    async with serve(engine_of(MAYBE, "abc")) as thinking:
        off = {**body, "max_tokens": 20, "chat_template_kwargs": {"enable_thinking": False}}
        status, answer = await thinking.post(CHAT, off)
        assert (status, answer["usage"]["completion_tokens_details"]["reasoning_tokens"]) == (200, 0)
        assert len(answer["choices"][0]["message"]["content"]) == 20


async def test_ending_the_thinking(serve: Any, engine_of: Any) -> None:
    """Only where it is open: elsewhere it is refused, and afterwards nothing happens."""
    for template, budget in ((OPENED, {}), (MAYBE, {"thinking_token_budget": 5000}), (MAYBE, None)):
        engine = engine_of(template, "abcdefghij ")
        async with serve(engine) as server:
            engine.step_s = 0.002
            body = {"messages": USER, "max_tokens": 4000, "stream": True, **(budget or {})}
            async with server.session.post(
                server.url + CHAT, json=body, headers={"X-Request-Id": "mine"}
            ) as reply:
                await reply.content.readuntil(b"\n\n")
                path = "/v1/requests/mine/control"
                status, _ = await server.post(path, {"action": "end_thinking"})
                assert status == (400 if budget is None else 200)
                text = b""
                while b'"content":"' not in text.replace(b'"content":""', b""):
                    text = text + await reply.content.readuntil(b"\n\n")
                if budget is not None:
                    assert (await server.post(path, {"action": "end_thinking"}))[0] == 200
                    assert b'"reasoning":' in text
                await server.post(path, {"action": "cancel"})
                rest = await reply.read()
            assert b"</think>" not in text + rest


async def test_messages(serve: Any, engine_of: Any) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    ask_all = {"messages": USER, "max_tokens": 2000, "tools": tools}
    async with serve(engine_of(MAYBE, "abcdefghij ")) as server:
        for seed in range(6):
            for choice in ({"type": "any"}, {"type": "tool", "name": "answer"}):
                body = {**ask_all, "tool_choice": choice, "seed": seed}
                status, reply = await server.post("/v1/messages", body)
                assert (status, reply["stop_reason"]) == (200, "tool_use"), reply
                for block in reply["content"]:
                    assert block["type"] == "tool_use"
                    jsonschema.validate(block["input"], SCHEMAS[block["name"]])
                async with server.session.post(
                    server.url + "/v1/messages", json={**body, "stream": True}
                ) as raw:
                    events = (await raw.read()).decode()
                assert events.count('"type":"tool_use"') == len(reply["content"])
        one = {"type": "any", "disable_parallel_tool_use": True}
        _, reply = await server.post("/v1/messages", {**ask_all, "tool_choice": one})
        assert len(reply["content"]) == 1
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 6}}
        form = {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}}
        for fields in (form, {"output_format": form["output_config"]["format"]}, {**form, **thinking}):
            status, reply = await server.post("/v1/messages", {"messages": USER, "max_tokens": 900, **fields})
            assert status == 200, reply
            jsonschema.validate(json.loads(reply["content"][-1]["text"]), ANSWER)
            kinds = [block["type"] for block in reply["content"]]
            assert kinds == (["thinking", "text"] if "thinking" in fields else ["text"])
        bad = {"type": "json_schema", "schema": {"not": {}}}
        _, reply = await server.post(
            "/v1/messages", {"messages": USER, "max_tokens": 9, "output_config": {"format": bad}}
        )
        assert "output_config.format.schema" in reply["error"]["message"]


async def test_responses(serve: Any, engine_of: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    async with serve(engine_of(OPENED, "abcdefg </think>")) as server:
        for seed in range(6):
            for choice in ("required", {"type": "function", "name": "answer"}):
                body = {"input": "hello", "tools": tools, "tool_choice": choice, "seed": seed}
                status, reply = await server.post("/v1/responses", body)
                assert (status, reply["status"]) == (200, "completed"), reply
                calls = [item for item in reply["output"] if item["type"] == "function_call"]
                check_calls([{"name": call["name"], "arguments": call["arguments"]} for call in calls])
                assert {item["type"] for item in reply["output"]} <= {"reasoning", "function_call"}
        form = {"type": "json_schema", "name": "n", "schema": ANSWER, "strict": True}
        status, reply = await server.post("/v1/responses", {"input": "hello", "text": {"format": form}})
        assert status == 200
        jsonschema.validate(json.loads(reply["output"][-1]["content"][0]["text"]), ANSWER)
        assert reply["text"] == {"format": form}
        for wrong in (
            {**form, "schema": {"not": {}}},
            {**form, "more": 1},
            {"type": "xml"},
            {"type": "json_schema"},
        ):
            status, reply = await server.post("/v1/responses", {"input": "hello", "text": {"format": wrong}})
            assert status == 400
            assert reply["error"]["param"].startswith("text.format")


async def test_tokens_in_tokens_out(serve: Any, engine_of: Any) -> None:
    """What /render writes is held to the same; and so is what a client writes itself."""
    async with serve(engine_of(OPENED, "abcdefg </think>")) as server:
        for fields in ({"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}):
            chat = {"messages": USER, "max_tokens": 900, "seed": 3, **fields}
            _, whole = await server.post(CHAT, chat)
            _, rendered = await server.post(CHAT + "/render", chat)
            body = {**rendered, "output_mode": "derender", "chat_request": chat}
            status, reply = await server.post("/inference/v1/generate", body)
            assert status == 200, reply
            for name in ("content", "reasoning"):
                assert reply["choices"][0]["message"][name] == whole["choices"][0]["message"][name]
            calls = [
                [call["function"] for call in each["choices"][0]["message"].get("tool_calls", [])]
                for each in (reply, whole)
            ]
            assert calls[0] == calls[1]
        prompt = {"token_ids": list(b"hello"), "output_mode": "text"}
        params = {"structured_outputs": {"json": ANSWER}, "max_tokens": 900}
        _, reply = await server.post("/inference/v1/generate", {**prompt, "sampling_params": params})
        jsonschema.validate(json.loads(reply["choices"][0]["text"]), ANSWER)
        for wrong in ({"structured_outputs": {"json": {"not": {}}}}, {"structured_outputs": {"x": 1}}):
            status, reply = await server.post("/inference/v1/generate", {**prompt, "sampling_params": wrong})
            assert status == 400
            assert reply["error"]["param"].startswith("sampling_params.structured_outputs")


async def test_effort_is_the_same_in_both(server: Any) -> None:
    for effort in ("none", "low", "high"):
        for path, body in (
            (CHAT, {"messages": USER, "reasoning_effort": effort}),
            ("/v1/responses", {"input": "hello", "reasoning": {"effort": effort}}),
        ):
            assert (await server.post(path, body))[0] == 200
        assert server.engine.prompts[-1] == server.engine.prompts[-2]
