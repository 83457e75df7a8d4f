"""The law: however a text is cut into pieces, the same calls, reasoning and content come out."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

ROUNDS = 40
LONG_ROUNDS = 2_000


def _fragments(text: str) -> list[str]:
    """Marks, quotes, brackets and words of a text: what a fuzzed one is put together of."""
    return re.findall(r"<[^<>]*>|\[[A-Z_/]+\]|[A-Za-z_]+|\\.|\s+|[^\sA-Za-z]", text)


def _mutated(text: str, source: random.Random) -> str:
    """The text with some fragments lost, doubled, exchanged, or put somewhere else, and maybe cut off."""
    parts = _fragments(text)
    for _ in range(source.randint(1, 6)):
        at, other = source.randrange(len(parts)), source.randrange(len(parts))
        match source.randrange(5):
            case 0:
                parts[at] = ""
            case 1:
                parts[at] += parts[at]
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts.insert(at, parts[other])
            case _:
                parts.insert(
                    at,
                    source.choice(["{", "}", '"', "\\", "<", "[", "]", "\n", "null", "日", "1", ",", "  "]),
                )
    mutated = "".join(parts)
    return mutated[: source.randrange(len(mutated) + 1)] if source.random() < 0.3 else mutated


def _check(run: Any, cut_up: Any, example: Any, seed: int, rounds: int) -> None:
    options, text, *_ = example
    source = random.Random(seed)
    for _ in range(rounds):
        mutated = _mutated(text, source)
        opened = source.choice(["", "", "<think>\n", "</think>\n\n"])
        whole = run([mutated], **options, prompt_end=opened)
        pieces = cut_up(mutated, source)
        assert run(pieces, **options, prompt_end=opened) == whole, pieces
        assert run(list(mutated), **options, prompt_end=opened) == whole, mutated


def test_every_cut_is_the_same(run: Any, cut_up: Any, example: Any) -> None:
    options, text, *_ = example
    whole, source = run([text], **options), random.Random(1)
    assert run(list(text), **options) == whole
    for at in range(len(text)):
        assert run([text[:at], text[at:]], **options) == whole, text[:at]
    for _ in range(50):
        pieces = cut_up(text, source)
        assert run(pieces, **options) == whole, pieces


def test_malformed_texts(run: Any, cut_up: Any, example: Any) -> None:
    _check(run, cut_up, example, seed=2, rounds=ROUNDS)


@pytest.mark.slow
def test_many_malformed_texts(run: Any, cut_up: Any, example: Any) -> None:
    _check(run, cut_up, example, seed=3, rounds=LONG_ROUNDS)


def test_texts_of_other_formats(run: Any, cut_up: Any, example: Any, examples: Any) -> None:
    """A parser is given what another model writes."""
    options, *_ = example
    source = random.Random(4)
    for _, text, *_ in examples.values():
        whole = run([text], **options)
        pieces = cut_up(text, source)
        assert run(pieces, **options) == whole, pieces


@pytest.mark.parametrize("unit", ["[", '{"a":', '[1, {"b": '])
def test_every_cut_is_the_same_at_the_bound_of_depth(run: Any, cut_up: Any, unit: str) -> None:
    source, found = random.Random(6), set()
    closers = "".join({"[": "]", "{": "}"}.get(sign, "") for sign in reversed(unit))
    for depth in range(120, 131):
        num_units = depth // len(closers)
        value = unit * num_units + "[[1], [2]]" + closers * num_units
        text = f'<tool_call>{{"name": "rec", "arguments": {{"rec": [{value}, [1]]}}}}</tool_call>'
        whole = run([text], calls="hermes")
        assert run(list(text), calls="hermes") == whole
        pieces = cut_up(text, source)
        assert run(pieces, calls="hermes") == whole, pieces
        found.add(bool(whole.arguments))
    assert found == {True, False}


def _bare(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_what_is_no_call_is_content(run: Any, example: Any) -> None:
    """Nothing is lost and nothing is doubled: text with marks that begin nothing comes back as it was."""
    options, *_ = example
    source = random.Random(5)
    marks = [
        "<tool_call>",
        "[TOOL_CALLS]",
        "<function=f>",
        "<|tool_call|>",
        "<think",
        '{"name": 1}',
        "[f(",
        "a;b",
        "日本 ",
    ]
    for _ in range(60):
        text = "So: " + " x ".join(source.choice(marks) for _ in range(source.randint(1, 8)))
        if options.get("reasoning") == "deepseek_r1":
            text = "</think>" + text
        parsed = run([text], **options)
        assert not parsed.calls
        assert not parsed.reasoning
        assert _bare(parsed.content) == _bare(text.removeprefix("</think>"))
