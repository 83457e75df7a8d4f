"""Where the thinking begins and ends: marks in the text, in the prompt, or a client that switched it off (H14)."""

from __future__ import annotations

from typing import Any

import pytest

from oneloop.parsers.registry import reasoning_format

TAGGED = ["qwen3", "deepseek_r1", "deepseek_v3", "kimi_k2", "granite", "glm45"]


@pytest.mark.parametrize("name", TAGGED)
def test_marks(run: Any, name: str) -> None:
    parsed = run(["<think>\nso\n\nit is\n</think>\n\nAnswer.\n"], reasoning=name)
    assert (parsed.reasoning, parsed.content) == ("so\n\nit is", "Answer.\n")


@pytest.mark.parametrize("name", TAGGED)
def test_the_prompt_has_opened_it(run: Any, name: str) -> None:
    for again in ("", "<think>"):
        parsed = run([again + "so</think>Answer."], reasoning=name, prompt_end="…assistant\n<think>\n")
        assert (parsed.reasoning, parsed.content) == ("so", "Answer.")


@pytest.mark.parametrize("name", TAGGED)
def test_the_prompt_has_closed_it(run: Any, name: str) -> None:
    text = "No </think> mark <think> means anything."
    parsed = run([text], reasoning=name, prompt_end="…<think>\n\n</think>\n\n")
    assert (parsed.reasoning, parsed.content) == ("", text)


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("opened", [True, False])
def test_cut_off(run: Any, name: str, opened: bool) -> None:
    """Thinking that never ends is no answer."""
    start, prompt_end = ("", "<think>\n") if opened else ("<think>", "")
    for end in ("", "</th", "\n"):
        parsed = run([start + "and so" + end], reasoning=name, prompt_end=prompt_end)
        assert (parsed.reasoning, parsed.content) == ("and so" + end, "")
    parsed = run([start + "and so</think>"], reasoning=name, prompt_end=prompt_end)
    assert (parsed.reasoning, parsed.content) == ("and so", "")


def test_models_that_think_at_once(run: Any) -> None:
    parsed = run(["so</think>Answer."], reasoning="deepseek_r1")
    assert (parsed.reasoning, parsed.content) == ("so", "Answer.")
    parsed = run(["so</think>Answer."], reasoning="deepseek_r1", is_thinking_on=False)
    assert (parsed.reasoning, parsed.content) == ("", "so</think>Answer.")
    parsed = run(["so</think>Answer."], reasoning="qwen3")
    assert (parsed.reasoning, parsed.content) == ("", "so</think>Answer.")


def test_marks_later_in_the_text_are_text(run: Any) -> None:
    text = "Use <think> and </think>."
    assert run([text], reasoning="qwen3").content == text
    assert run(["[THINK]a[/THINK]b [THINK] c"], reasoning="mistral").content == "b [THINK] c"


def test_calls_in_the_thinking_are_thinking(run: Any) -> None:
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    parsed = run([f"<think>{call}</think>{call}"], reasoning="qwen3", calls="hermes")
    assert parsed.reasoning == call
    assert len(parsed.calls) == 1


def test_granite_says_it_in_words(run: Any) -> None:
    for here in ("Here is", "Here's"):
        parsed = run([f"{here} my thought process: a b\n{here} my response: c"], reasoning="granite")
        assert (parsed.reasoning, parsed.content) == ("a b", "c")
    parsed = run(["<think>a</think>\n<response>c</response>"], reasoning="granite")
    assert (parsed.reasoning, parsed.content) == ("a", "c")


@pytest.mark.parametrize(
    ("prompt_end", "is_on", "is_open"),
    [("<think>\n", False, True), ("x", None, False), ("</think>", True, False)],
)
def test_what_a_prompt_says(prompt_end: str, is_on: bool | None, is_open: bool) -> None:
    qwen3 = reasoning_format("qwen3", "")
    assert qwen3 is not None
    assert qwen3.is_open(prompt_end, is_on) is is_open
