"""Pieces of a conversation come together to the turns that templates read."""

from __future__ import annotations

from typing import Any

import pytest

from oneloop.api.turns import Turns

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
THOUGHT = {"reasoning": "hm", "reasoning_content": "hm"}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("pieces", "turns"),
    [
        (["think", "answer", "call"], [assistant("x", **THOUGHT, tool_calls=[CALL])]),
        (["answer", "answer"], [assistant("x\nx")]),
        (["think", "think"], [assistant("", reasoning="hmhm", reasoning_content="hmhm")]),
        (["answer", "think"], [assistant("x"), assistant("", **THOUGHT)]),
        (["call", "think"], [assistant("", tool_calls=[CALL]), assistant("", **THOUGHT)]),
        (["call", "answer"], [assistant("", tool_calls=[CALL]), assistant("x")]),
        (["call", "call"], [assistant("", tool_calls=[CALL, CALL])]),
        (["answer", "say", "answer"], [assistant("x"), {"role": "user", "content": "?"}, assistant("x")]),
        (
            ["call", "result", "answer"],
            [
                assistant("", tool_calls=[CALL]),
                {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f"},
                assistant("x"),
            ],
        ),
        (["result"], [{"role": "tool", "tool_call_id": "c", "content": "r"}]),
    ],
    ids=lambda value: "-".join(value) if type(value[0]) is str else "",
)
def test_pieces(pieces: list[str], turns: list[dict[str, Any]]) -> None:
    made = Turns()
    saying = {
        "think": lambda: made.think("hm"),
        "answer": lambda: made.answer("x"),
        "call": lambda: made.call("c", "f", {"a": 1}),
        "say": lambda: made.say("user", "?"),
        "result": lambda: made.result("c", "r"),
    }
    for piece in pieces:
        saying[piece]()
    assert made.messages == turns


def test_calls_of_before_have_told_their_names() -> None:
    made = Turns([assistant("", tool_calls=[CALL])])
    made.result("c", "r")
    made.answer("x")
    assert made.messages[1]["name"] == "f"
    assert made.messages[2] == assistant("x")
