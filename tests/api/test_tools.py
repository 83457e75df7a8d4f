"""Tools and thinking in chat: what is taken, what the model is told, and replies whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
HERMES = '<tool_call>{"name": …, "arguments": …}</tool_call>'
THINKING = HERMES + "<think></think>"
CODER = "<tool_call><function=x><parameter=y>"
LLAMA = '<|start_header_id|>…"parameters"'
STRING = {"type": "string"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [tool("get_time"), tool("get_weather", city=STRING)]


@pytest.fixture
def chat(serve: Any, fake_engine_type: Any) -> Any:
    """Asks once whole and once streamed a model that writes `script`; both answers, after their comparison."""

    async def ask(script: str, body: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        template = options.pop("template", HERMES)
        prompt = options.pop("generation_prompt", "[assistant]")
        tokenizer = fake_engine_type().tokenizer.__class__(options.pop("marks", ()), template)
        engine = fake_engine_type(tokenizer=tokenizer, script=script, max_model_len=1 << 14)
        engine.generation_prompt = prompt
        async with serve(engine, **options) as server:
            request = {"messages": USER, "tools": TOOLS, "stream_options": None, **(body or {})}
            status, whole = await server.post(CHAT, request)
            assert status == 200, whole
            usage = {"stream_options": {"include_usage": True}}
            engine.in_step = True
            events = [json.loads(event) for event in (await server.stream(CHAT, {**request, **usage}))[:-1]]
        answer = whole["choices"][0]
        streamed = joined(events)
        assert streamed["usage"] == whole["usage"]
        assert streamed["finish_reason"] == answer["finish_reason"]
        assert streamed["logprobs"] == ((answer["logprobs"] or {}).get("content") or [])
        message = answer["message"]
        assert [call["function"] for call in streamed["calls"]] == [
            c["function"] for c in message.get("tool_calls", [])
        ]
        assert (streamed["content"] or None, streamed["reasoning"] or None) == (
            message["content"],
            message["reasoning"],
        )
        return {**answer, "usage": whole["usage"], "events": events}

    return ask


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream added up, with the rules on its chunks checked."""
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *chunks, usage = events[1:]
    assert usage["choices"] == []
    answer["usage"] = usage["usage"]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert len(delta) <= 1
        for name in ("content", "reasoning"):
            if name in delta:
                assert delta[name]
                answer[name] += delta[name]
        for piece in delta.get("tool_calls", []):
            function = piece["function"]
            if piece["index"] == len(answer["calls"]):
                assert piece.keys() == {"index", "id", "type", "function"}
                assert piece["type"] == "function"
                answer["calls"].append(
                    {"id": piece["id"], "function": {"name": function["name"], "arguments": ""}}
                )
            else:
                assert piece.keys() == {"index", "function"}
                assert function.keys() == {"arguments"}
                assert piece["index"] == len(answer["calls"]) - 1
            answer["calls"][piece["index"]]["function"]["arguments"] += function["arguments"]
        answer["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
        assert (choice["finish_reason"] is None) == (chunk is not chunks[-1])
        answer["finish_reason"] = choice["finish_reason"]
    ids = [call["id"] for call in answer["calls"]]
    assert len(set(ids)) == len(ids)
    return answer


async def test_calls_without_parameters(chat: Any) -> None:
    """H11."""
    script = (
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z"}}\n</tool_call>'
    )
    answer = await chat(script)
    assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [
        "{}",
        '{"city": "Z"}',
    ]
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == 2
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None


async def test_nested_braces_and_separators_in_strings(chat: Any) -> None:
    """H12."""
    nested = {"rec": {"id": 7, "tags": ["a;b"], "in": {"x": {}}}}
    script = json.dumps({"name": "rec", "parameters": nested}) + '; {"name": "get_time", "parameters": {}}'
    answer = await chat(script, {"tools": [*TOOLS, tool("rec")]}, template=LLAMA)
    assert [json.loads(call["function"]["arguments"]) for call in answer["message"]["tool_calls"]] == [
        nested,
        {},
    ]
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == "tool_calls"


async def test_a_long_string_comes_as_it_is_written(chat: Any) -> None:
    """H13."""
    text = ('  a "quoted" \\ path\twith 🙂 <b>bold</b> and </param in it\n' * 60)[:3000].rstrip() + "."
    script = f"<tool_call>\n<function=write_file>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
    answer = await chat(script, {"tools": [tool("write_file", text=STRING)]}, template=CODER)
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"text": text}
    pieces = [event for event in answer["events"][:-1] if "tool_calls" in event["choices"][0]["delta"]]
    assert len(pieces) > 1000
    assert answer["message"]["content"] is None


@pytest.mark.parametrize("opened", [True, False])
async def test_thinking_that_is_cut_off(chat: Any, opened: bool) -> None:
    """H14: with the limit in the thinking, and exactly on its end mark."""
    start, prompt = ("", "<think>\n") if opened else ("<think>", "[assistant]")
    options = {"template": THINKING, "generation_prompt": prompt}
    body = {"tools": None, "max_tokens": len(start) + 5}
    answer = await chat(start + "hm, so it is</think>Yes", body, **options)
    assert answer["message"]["reasoning"] == "hm, s"
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(start) + 5}
    thought = start + "hm</think>"
    answer = await chat(thought + "Yes", {"tools": None, "max_tokens": len(thought)}, **options)
    assert (answer["message"]["reasoning"], answer["message"]["content"]) == ("hm", None)
    assert answer["finish_reason"] == "length"
    answer = await chat(thought + "\n\nYes", {"tools": None}, **options)
    assert (answer["message"]["reasoning"], answer["message"]["content"]) == ("hm", "Yes")
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


async def test_thinking_that_is_switched_off(chat: Any) -> None:
    script = "The answer, cut"
    off = {"tools": None, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 10}
    for reasoning in ("qwen3", "deepseek_r1"):
        for prompt in ("[assistant]<think>\n\n</think>\n\n", "[assistant]"):
            options = {"template": "x", "reasoning_parser": reasoning, "generation_prompt": prompt}
            answer = await chat(script, off, **options)
            assert (answer["message"]["content"], answer["message"]["reasoning"]) == (script[:10], None)


async def test_marks_that_are_special_tokens(chat: Any) -> None:
    """They are shown to the parser, and never to the client; other special tokens are hidden as ever."""
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|other|>")
    script = '<think>a<|other|>b</think><|other|>Hm.<tool_call>{"name": "get_time"}</tool_call><|other|>'
    answer = await chat(script, template=THINKING, marks=marks)
    assert (answer["message"]["reasoning"], answer["message"]["content"]) == ("ab", "Hm.")
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_thinking_can_be_left_out(chat: Any) -> None:
    answer = await chat(
        "<think>hm</think>Yes", {"tools": None, "include_reasoning": False}, template=THINKING
    )
    assert (answer["message"]["reasoning"], answer["message"]["content"]) == (None, "Yes")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 17}


async def test_one_call_only(chat: Any) -> None:
    script = '<tool_call>{"name": "get_time"}</tool_call><tool_call>{"name": "get_weather"}</tool_call>!'
    answer = await chat(script, {"parallel_tool_calls": False})
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["get_time"]
    assert answer["message"]["content"] == "!"


async def test_logprobs_stand_beside_calls(chat: Any) -> None:
    script = 'Hm.<tool_call>{"name": "get_time"}</tool_call>'
    answer = await chat(script, {"logprobs": True, "top_logprobs": 1})
    assert "".join(entry["token"] for entry in answer["logprobs"]["content"]).startswith(script)


async def test_a_call_that_is_cut_off(chat: Any) -> None:
    script = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
    answer = await chat(script, {"max_tokens": 60})
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "')
    answer = await chat(script, {"max_tokens": 20})
    assert "tool_calls" not in answer["message"]
    assert answer["message"]["content"] == script[:20]


async def test_several_answers(serve: Any, fake_engine_type: Any) -> None:
    tokenizer = type(fake_engine_type().tokenizer)((), HERMES)
    engine = fake_engine_type(tokenizer=tokenizer, script='<tool_call>{"name": "get_time"}</tool_call>')
    async with serve(engine) as server:
        _, whole = await server.post(CHAT, {"messages": USER, "tools": TOOLS, "n": 3})
        events = await server.stream(CHAT, {"messages": USER, "tools": TOOLS, "n": 3})
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls"] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]}) == 3
    ends = [
        choice for event in events[:-1] for choice in json.loads(event)["choices"] if choice["finish_reason"]
    ]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]


async def test_what_the_model_is_told(serve: Any, fake_engine_type: Any) -> None:
    tokenizer = type(fake_engine_type().tokenizer)((), HERMES)
    async with serve(fake_engine_type(tokenizer=tokenizer, script="no")) as server:
        for choice, told in ((None, True), ("auto", True), ("none", False)):
            await server.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": choice})
            prompt = bytes(server.engine.prompts[-1]).decode()
            assert ("get_weather" in prompt) is told


BAD = [
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"thinking_token_budget": "long"}, "thinking_token_budget"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
        "tools[0].function.description",
    ),
    ({"tools": [tool(f"f{i}") for i in range(1025)]}, "tools"),
    ({"tools": [tool("f", a={"description": "x" * (1 << 20)})]}, "tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"include_reasoning": "yes"}, "include_reasoning"),
]


@pytest.mark.parametrize(("fault", "param"), BAD)
async def test_refused(serve: Any, fake_engine_type: Any, fault: dict[str, Any], param: str) -> None:
    tokenizer = type(fake_engine_type().tokenizer)((), HERMES)
    async with serve(fake_engine_type(tokenizer=tokenizer)) as server:
        body = json.dumps({"messages": USER, "tools": TOOLS, **fault}).encode()
        status, answer = await server.post_raw(CHAT, body)
    assert status == 400
    assert answer["error"]["param"] == param


async def test_a_model_without_a_known_format(server: Any) -> None:
    status, answer = await server.post(CHAT, {"messages": USER, "tools": TOOLS})
    assert status == 400
    assert "--tool-call-parser" in answer["error"]["message"]
    status, _ = await server.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none"})
    assert status == 200


async def test_a_turn_that_goes_on(chat: Any) -> None:
    """Whether the thinking is open is what the turn so far says."""
    for turn, expected in (("<think>hm", ("so", "Yes")), ("The", (None, "so</think>Yes"))):
        body = {
            "tools": None, "messages": [*USER, {"role": "assistant", "content": turn}], "continue_final_message": True,
        }  # fmt: skip
        answer = await chat("so</think>Yes", body, template=THINKING)
        assert (answer["message"]["reasoning"], answer["message"]["content"]) == expected
