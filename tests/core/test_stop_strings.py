"""Stop strings over token boundaries: what is handed out, when, and where the text ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneloop_core import StreamDecoder, Vocabulary

BYTES = Vocabulary([bytes([byte]) for byte in range(256)])


def deltas(text: str, stop: list[str], **options) -> tuple[list[str], str | None]:
    """One token a byte; the last delta is the flush."""
    decoder = StreamDecoder(BYTES, stop=stop, **options)
    out = [decoder.push(byte) for byte in text.encode()]
    return [*out, decoder.flush()], decoder.matched


def test_nothing_of_a_stop_string_leaks_and_a_false_start_is_handed_out_whole() -> None:
    assert deltas("one four five", ["four six"]) == (
        [*"one ", "", "", "", "", "", "four ", "fi", "v", "e", ""],
        None,
    )
    assert deltas("a four six b", ["four six"]) == ([*"a ", *[""] * 11], "four six")


def test_included_stop_string_is_never_held_back() -> None:
    options = {"include_stop_str_in_output": True}
    assert deltas("abcd", ["bc"], **options) == (["a", "b", "c", "", ""], "bc")


@pytest.mark.parametrize(
    ("text", "stop", "expected", "matched"),
    [
        ("xaaa", ["aa"], "x", "aa"),
        ("xaab", ["aaa", "ab"], "xa", "ab"),
        ("abcd", ["abc", "bc"], "", "abc"),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("ab", ["abc"], "ab", None),
        ("e\u0301!", ["\u0301"], "e", "\u0301"),
        ("hi 👨‍👩‍👧 there", ["👨‍👩‍👧"], "hi ", "👨‍👩‍👧"),
        ("hi 👨‍👩‍👧 there", ["\u200d"], "hi 👨", "\u200d"),
        ("日本語", ["本"], "日", "本"),
        ("never", [], "never", None),
    ],
)
def test_the_first_stop_string_that_ends_wins_and_the_longest_of_those(text, stop, expected, matched) -> None:
    parts, found = deltas(text, stop)
    assert ("".join(parts), found) == (expected, matched)


def test_replacement_characters_can_be_a_stop_string() -> None:
    decoder = StreamDecoder(BYTES, stop=["\ufffd"])
    assert decoder.push(0xE4) == ""
    assert decoder.flush() == ""
    assert decoder.matched == "\ufffd"


def test_min_tokens_ignores_stop_strings_that_end_too_early() -> None:
    for min_tokens, expected in [
        (0, "n"),
        (1, "n"),
        (2, "n\na"),
        (3, "n\na"),
        (4, "n\na\nb"),
        (9, "n\na\nb"),
    ]:
        parts, _ = deltas("n\na\nb", ["\n"], min_tokens=min_tokens)
        assert "".join(parts) == expected, min_tokens


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    assert deltas("aaab", ["aa"], min_tokens=2) == (["", "a", *[""] * 3], "aa")


def test_nothing_follows_a_match() -> None:
    decoder = StreamDecoder(Vocabulary([b"a stop b", b"more"]), stop=["stop"])
    assert [decoder.push(0), decoder.push(1), decoder.flush()] == ["a ", "", ""]


def test_bad_stop_strings() -> None:
    with pytest.raises(ValueError, match="stop string 1 is empty"):
        StreamDecoder(BYTES, stop=["a", ""])
    with pytest.raises(TypeError):
        StreamDecoder(BYTES, stop="ab")


def test_many_long_stop_strings_stay_cheap() -> None:
    """Memory is linear in their length: 64 strings of 1,024 bytes of random-looking text, 100,000 tokens."""
    stops = [f"{i}" + "ab" * 511 for i in range(64)]
    decoder = StreamDecoder(BYTES, stop=stops)
    text = b"7ab" * 33_000
    assert len("".join(map(decoder.push, text)) + decoder.flush()) == len(text)


def cut(text: str, stops: list[str], include: bool) -> str:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))]
    return text


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab\u0301é👍", max_size=40),
    st.lists(st.text("ab\u0301é👍", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_any_text_is_cut_and_held_back_exactly(text: str, stops: list[str], include: bool) -> None:
    decoder = StreamDecoder(BYTES, stop=stops, include_stop_str_in_output=include)
    seen = out = ""
    for char in text:
        out += "".join(map(decoder.push, char.encode()))
        seen += char
        whole = cut(seen, stops, include)
        held = 0
        if decoder.matched is None and not include:
            held = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
        assert out == whole[: len(whole) - held]
    assert out + decoder.flush() == cut(text, stops, include)
