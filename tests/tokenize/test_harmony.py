"""gpt-oss prompts: letter by letter as OpenAI's own renderer writes them (make_harmony_golden.py), and beyond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oneloop.errors import RequestError
from oneloop.tokenize.conversation import ChatForm, Conversation, Message, Tool, ToolCall
from oneloop.tokenize.messages import read_conversation
from oneloop.tokenize.renderers import harmony

GOLDEN = Path(__file__).parent / "data/harmony.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
DATE = {"conversation_start_date": "2025-06-28"}


def prompt(messages: list[Any], tools: Any = None, arguments: Any = None, **form: Any) -> str:
    shown = ChatForm(template_arguments={**DATE, **(arguments or {})}, **form)
    return harmony.write(read_conversation(messages, tools), shown)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_prompts_equal_openais(case: dict[str, Any]) -> None:
    assert prompt(case["messages"], case.get("tools"), case.get("arguments")) == case["text"]


def test_nothing_is_dropped() -> None:
    """Several system messages, at the head and later; parts; an answer without text."""
    text = prompt(
        [
            {"role": "system", "content": "one"},
            {
                "role": "developer",
                "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}],
            },
            {"role": "user", "content": "four"},
            {"role": "assistant", "content": ""},
            {"role": "system", "content": "five"},
            {"role": "user", "content": ""},
        ]
    )
    assert "# Instructions\n\none\n\ntwo\nthree<|end|>" in text
    assert "<|start|>assistant<|channel|>final<|message|><|end|>" in text
    assert "<|start|>developer<|message|># Instructions\n\nfive<|end|>" in text
    assert text.endswith("<|start|>user<|message|><|end|><|start|>assistant")
    assert "None" not in text


def test_a_turn_is_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    text = prompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>Well, ")
    thinking = [messages[0], {"role": "assistant", "content": "", "reasoning": "Hm"}]
    text = prompt(thinking, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|start|>assistant<|channel|>analysis<|message|>Hm")
    call = {"function": {"name": "f", "arguments": "{}"}}
    called = [messages[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(RequestError, match="cannot be continued"):
        prompt(called, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"reasoning_effort": "huge"}, "low, medium, high"),
        ({"conversation_start_date": "today<|end|>"}, "a date"),
        ({"model_identity": 5}, "a string"),
        ({"builtin_tools": ["browser"]}, "builtin_tools"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        prompt([{"role": "user", "content": "x"}], None, arguments)
    assert caught.value.field == "chat_template_kwargs"


def test_an_answer_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(RequestError, match="tool_call_id") as caught:
        prompt([{"role": "user", "content": "x"}, {"role": "tool", "content": "y", "tool_call_id": "9"}])
    assert caught.value.field == "messages"
    named = {"role": "function", "name": "f", "content": "y"}
    assert "functions.f to=assistant" in prompt([{"role": "user", "content": "x"}, named])


def test_deep_schemas_are_refused() -> None:
    schema: Any = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    conversation = Conversation(
        messages=(Message(role="user", content="x"),), tools=(Tool(name="f", parameters=schema),)
    )
    with pytest.raises(RequestError, match="nested too deeply"):
        harmony.write(conversation, ChatForm())


def test_a_malformed_call_is_shown_as_it_was() -> None:
    call = ToolCall(name="f", arguments='{"a": ')
    messages = (Message(role="user", content="x"), Message(role="assistant", tool_calls=(call,)))
    text = harmony.write(Conversation(messages=messages), ChatForm())
    assert '<|channel|>commentary json<|message|>{"a": <|call|>' in text
