"""Texts that are made to cost much: 200 KiB of beginnings without an end, and what is only read, never run (T20)."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest

from oneloop.parsers.engine import make_parser
from oneloop.parsers.registry import reasoning_format, tool_format

SIZE = 200 << 10
LIMIT_S = 0.050
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "x": {"type": "string"}}}}
BEGINNINGS = [
    "[", '{"', "<tool_call>", "f(a=", "<parameter=x>", "<think>", "<", "[TOOL_CALLS]", "<|channel|>", '<tool_call>{"',
    "<|tool_call|>", "<｜tool▁call▁begin｜>", "<function=f>", "</parameter>\n", " ", "\n", "\\",
]  # fmt: skip
OPENED = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": ',
    "llama3_json": '{"name": "f", "parameters": {"a": ',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": ',
    "qwen3_coder": "<tool_call><function=f><parameter=a>",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "deepseek_v3": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    "kimi_k2": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": ',
    "phi4_mini": '<|tool_call|>{"name": "f", "arguments": {"a": ',
    "pythonic": "[f(a=",
    "openai": "<|channel|>commentary to=functions.f<|message|>",
}
REASONING = {"openai": "openai_gptoss", "mistral": "mistral", "kimi_k2": "kimi_k2"}


def _cost(pieces: list[str], calls: str) -> float:
    """CPU seconds of the lesser of two."""
    best = float("inf")
    for _ in range(2):
        reasoning = reasoning_format(REASONING.get(calls, "qwen3"), "")
        parser = make_parser(reasoning, tool_format(calls, ""), TOOLS)
        began = process_time()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        best = min(best, process_time() - began)
    return best


@pytest.mark.parametrize("calls", OPENED)
def test_beginnings_cost_little(calls: str) -> None:
    for beginning in BEGINNINGS:
        for opened in ("", OPENED[calls]):
            text = opened + beginning * (SIZE // len(beginning))
            cost = _cost([text], calls)
            assert cost <= LIMIT_S, (beginning, opened, cost)


@pytest.mark.parametrize("calls", OPENED)
def test_a_piece_costs_the_same_however_much_came_before(calls: str) -> None:
    for beginning in ("<tool_call>", " ", "</para"):
        few = list(OPENED[calls] + beginning * (10_000 // len(beginning)))
        many = list(OPENED[calls] + beginning * (100_000 // len(beginning)))
        few_cost, many_cost = _cost(few, calls) / len(few), _cost(many, calls) / len(many)
        assert many_cost < 1.7 * few_cost + 0.5e-6, (beginning, few_cost, many_cost)


@pytest.mark.parametrize(
    "code", ["__import__('os').system('touch /tmp/x')", "open('/etc/passwd')", "1+1", "f(a=1)", "lambda: 0"]
)
def test_nothing_is_evaluated(run: Any, code: str) -> None:
    """What is no literal ends a call; what is text stays text."""
    parsed = run([f"[f(a={code})]"], calls="pythonic", tools=TOOLS)
    assert not parsed.arguments
    assert code.replace(" ", "") in (parsed.content + "".join(call["text"] for call in parsed.calls)).replace(
        " ", ""
    )
    quoted = run([f"[f(a={code!r})]"], calls="pythonic", tools=TOOLS)
    assert quoted.arguments == [("f", {"a": code})]
    for text in (code, "None", "2024-01-01", "True"):
        call = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
        assert run([call], calls="qwen3_coder", tools=TOOLS).arguments == [("f", {"a": text})]
        call = "<tool_call>" + json.dumps({"name": "f", "arguments": {"a": text}}) + "</tool_call>"
        assert run([call], calls="hermes", tools=TOOLS).arguments == [("f", {"a": text})]


def test_depth_is_bounded(run: Any) -> None:
    for calls, opened, closed in (
        ("hermes", OPENED["hermes"], "}}</tool_call>"),
        ("pythonic", "[f(a=", ")]"),
    ):
        deep = "[" * 60 + "]" * 60
        assert len(run([opened + deep + closed], calls=calls, tools=TOOLS).arguments) == 1
        deep = "[" * 5_000 + "]" * 5_000
        assert not run([opened + deep + closed], calls=calls, tools=TOOLS).arguments
