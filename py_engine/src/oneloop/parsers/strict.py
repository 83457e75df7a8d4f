"""Calls that a model may make, where functions are strict: the arguments of these fit their schemas.

The text is free until something looks like a call; what follows is one. So nothing that the parser would take for a
call can come otherwise, and calls of bare forms, which nothing marks, cannot be held so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.parsers.forced import MAX_TAGS, call_tags

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from oneloop.parsers.formats import CallForm, ReasoningFormat, Tools


def strict_tags(
    form: CallForm, tools: Tools, strict: Collection[str], thinking: ReasoningFormat | None
) -> Mapping[str, Any] | None:
    """The structural tag of the whole text. strict: names of functions that are.

    thinking: what may stand in front of the answer. None where the form cannot say a function. NoObjectError as
    forced_tags.
    """
    if not form.marks or len(tools) > MAX_TAGS:
        return None
    # Whoever is not strict has any object for arguments, where the form writes JSON.
    schemas = {name: schema if name in strict else {"type": "object"} for name, schema in tools.items()}
    tags = call_tags(form, schemas)
    if tags is None:
        return None
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


def _thought(thinking: ReasoningFormat) -> Mapping[str, Any]:
    """What the text may begin with: a line's end, and thinking."""
    line = {"begin": "\n", "content": {"type": "const_string", "value": ""}, "end": ""}
    thought = {
        "begin": thinking.start,
        "content": {"type": "text", "excludes": [thinking.end]},
        "end": thinking.end,
    }
    return {"type": "members_with_separator", "members": [line, thought], "separator": ""}
