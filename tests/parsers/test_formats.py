"""Every format: what models write comes out whole, and again when the text is cut off anywhere."""

from __future__ import annotations

from typing import Any


def test_example(run: Any, example: Any) -> None:
    options, text, expected, calls = example
    parsed = run([text], **options)
    assert parsed.arguments == calls
    assert parsed.content == expected.content
    assert parsed.reasoning == expected.reasoning
    assert all(call["complete"] for call in parsed.calls)


def test_space_around_calls(run: Any) -> None:
    """It is the calls' own, but for what stands between a call and text behind it."""
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    for text, content in (
        (f"\n\n{call}\n", ""),
        (f"A.\n\n{call}\n{call} \n", "A."),
        (f"A. {call}\nB.\n", "A.\nB.\n"),
        (f"A.{call}B.", "A.B."),
        ("A. \n", "A. \n"),
    ):
        assert run([text], calls="hermes").content == content


def test_ids_that_the_model_writes(run: Any, examples: Any) -> None:
    options, text, *_ = examples["kimi_k2"]
    assert [call["id"] for call in run([text], **options).calls] == [
        "functions.rec:0",
        "functions.get_time:1",
    ]
    options, text, *_ = examples["mistral v11"]
    assert [call["id"] for call in run([text], **options).calls] == [None, "a1b2c3d4e", None]


def test_cut_off_anywhere(run: Any, example: Any) -> None:
    """A prefix of a text shows a prefix of its arguments, up to the value that is cut, and no other call."""
    options, text, _, calls = example
    whole = run([text], **options)
    for end in range(len(text)):
        parsed = run([text[:end]], **options)
        assert parsed.arguments == calls[: len(parsed.arguments)], text[:end]
        for found, full in zip(parsed.calls, whole.calls, strict=False):
            assert found["name"] == full["name"]
            shown = found["text"] if found["complete"] else found["text"].rpartition(": ")[0]
            assert full["text"].startswith(shown), text[:end]
