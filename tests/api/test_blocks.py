"""A reply's blocks are the same however its text was cut, and tell the same as the parser's events."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oneloop.api.blocks import BlockTracker, Closed, Grown, Opened
from oneloop.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

TEXTS = st.sampled_from(["a", " ", "\n\n", "bc d", "日"])


@st.composite
def replies(draw: Any) -> list[Event]:
    """Events as a parser gives them, cut as finely as it gets."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thinking", "call"]), max_size=6)):
        if kind == "call":
            pieces = draw(st.lists(st.sampled_from(['{"a":', "1}", " "]), max_size=3))
            arguments = [ToolCallArguments(calls, piece) for piece in pieces]
            events += [ToolCallStart(calls, f"f{calls}"), *arguments, ToolCallEnd(calls)]
            calls += 1
        else:
            made = Content if kind == "text" else Reasoning
            events += [made(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=4))]
    return events


def merged(events: list[Event], cuts: list[bool]) -> list[Event]:
    """Neighbours of a kind joined, but where `cuts` says so."""
    out: list[Event] = []
    for event, cut in zip(events, cuts, strict=True):
        last = out[-1] if out else None
        if not cut and isinstance(event, Content | Reasoning) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        else:
            out.append(event)
    return out


def blocks_of(events: list[Event]) -> tuple[list[tuple[str, str, str]], list[Any]]:
    """(blocks, what was told of them)."""
    tracker = BlockTracker(lambda start: f"call_{start.name}")
    changes = [change for event in events for change in tracker.add([event])]
    changes += tracker.finish("stop")
    return [(block.kind, block.name, block.text) for block in tracker.blocks], changes


@settings(max_examples=300, deadline=None)
@given(replies(), st.data())
def test_cuts_change_nothing(events: list[Event], data: Any) -> None:
    cuts = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    assert blocks_of(events)[0] == blocks_of(merged(events, cuts))[0]


@settings(max_examples=300, deadline=None)
@given(replies())
def test_what_is_told_adds_up(events: list[Event]) -> None:
    blocks, changes = blocks_of(events)
    opened: list[list[Any]] = []
    is_open = False
    for change in changes:
        match change:
            case Opened(block):
                assert not is_open
                assert block.index == len(opened)
                opened.append([block.kind, block.name, ""])
                is_open = True
            case Grown(_, text):
                assert is_open
                opened[-1][2] += text
            case Closed():
                assert is_open
                is_open = False
    assert not is_open
    assert [tuple(block) for block in opened] == blocks
    assert all(text.strip() for kind, _, text in blocks if kind != "call") or len(blocks) == 1
    said = "".join("".join(e.text for e in events if isinstance(e, Content)).split())
    assert "".join("".join(text for kind, _, text in blocks if kind == "text").split()) == said


def test_a_reply_of_white_space_keeps_it() -> None:
    assert blocks_of([Content("\n"), Content(" ")])[0] == [("text", "", "\n ")]
    assert blocks_of([])[0] == []


def test_what_is_cut_is_not_whole() -> None:
    def whole(events: list[Event], reason: Any) -> tuple[list[bool], bool]:
        tracker = BlockTracker(lambda start: "call")
        tracker.add(events)
        tracker.finish(reason)
        return [block.is_whole for block in tracker.blocks], tracker.has_calls

    start, piece, end = ToolCallStart(0, "f"), ToolCallArguments(0, "{"), ToolCallEnd(0)
    assert whole([Content("a")], "stop") == ([True], False)
    assert whole([Content("a")], "length") == ([False], False)
    assert whole([Content("a")], "abort") == ([False], False)
    assert whole([Reasoning("a"), Content("b")], "length") == ([True, False], False)
    assert whole([Content("a"), start, piece], "stop") == ([True, False], False)
    assert whole([start, piece, Content("a")], "stop") == ([False, True], False)
    assert whole([start, piece, end], "length") == ([True], True)
    assert whole([Content("\n")], "length") == ([False], False)
