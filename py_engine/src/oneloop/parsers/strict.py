"""Calls that a model may make, where functions are strict: the arguments of these fit their schemas.

The text is free until something looks like a call; what follows is one. So nothing that the parser would take for a
call can come otherwise. Of bare forms, which nothing marks, the text is either calls, or begins like none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.parsers.forced import MAX_TAGS, call_tags

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from oneloop.parsers.formats import CallForm, ReasoningFormat, Tools


MAX_PATTERN_BYTES = 8 << 10
"""Of what calls look like (the core's bound)."""


def strict_tags(
    form: CallForm, tools: Tools, strict: Collection[str], thinking: ReasoningFormat | None
) -> Mapping[str, Any] | None:
    """The structural tag of the whole text. strict: names of functions that are.

    thinking: what may stand in front of the answer. None where the form cannot say a function. NoObjectError as
    forced_tags.
    """
    if len(tools) > MAX_TAGS:
        return None
    # Whoever is not strict has any object for arguments, where the form writes JSON.
    schemas = {name: schema if name in strict else {"type": "object"} for name, schema in tools.items()}
    tags = call_tags(form, schemas)
    if tags is None:
        return None
    if not form.marks:
        return _bare(form, tools, tags) if thinking is None else None
    if form.before_all:
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator,
            "at_least_one": True,
        }
        tags = [{"begin": form.before_all, "content": calls, "end": form.after_all}]
    excludes = list(form.marks)
    if thinking is not None and thinking.start and thinking.end:
        excludes.append(thinking.start)
        begin = [_thought(thinking)]
    else:
        begin = []
    answer = {
        "type": "triggered_tags",
        "triggers": [form.marks[0]],
        "excludes": excludes,
        "tags": tags,
    }
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [*begin, answer]}}


def _bare(form: CallForm, tools: Tools, tags: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Calls, or a text that begins like none."""
    if form.looks is None:
        return None
    looks = form.looks(tools)
    if len(looks) > MAX_PATTERN_BYTES:
        return None
    answer = {"type": "any_text", "not_beginning": looks, "excludes": list(form.bare_marks)}
    # What tells calls from an answer is one text up to the first one's arguments: there the two part.
    first = [{"type": "tag", **tag, "begin": form.before_all + tag["begin"]} for tag in tags]
    others = [{**tag, "begin": form.separator + tag["begin"]} for tag in tags]
    calls = [
        {"type": "or", "elements": first},
        {"type": "tags_with_separator", "tags": others, "separator": ""},
        {"type": "const_string", "value": form.after_all},
    ]
    both = [{"type": "sequence", "elements": calls}, answer]
    return {"type": "structural_tag", "format": {"type": "or", "elements": both}}


def _thought(thinking: ReasoningFormat) -> Mapping[str, Any]:
    """What the text may begin with: a line's end, and thinking."""
    line = {"begin": "\n", "content": {"type": "const_string", "value": ""}, "end": ""}
    thought = {
        "begin": thinking.start,
        "content": {"type": "text", "excludes": [thinking.end]},
        "end": thinking.end,
    }
    return {"type": "members_with_separator", "members": [line, thought], "separator": ""}
