"""Mistral: [THINK] … [/THINK]."""

from __future__ import annotations

from oneloop.parsers.formats import ReasoningFormat
from oneloop.parsers.thinking import thinking_reader

_START, _END = "[THINK]", "[/THINK]"

FORMAT = ReasoningFormat(
    name="mistral",
    recognises=lambda template: _START in template,
    markers=(_START, _END),
    read=thinking_reader([_START], [_END]),
    start=_START,
    end=_END,
)
