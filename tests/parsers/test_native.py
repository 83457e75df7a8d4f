"""Calls that must come, in the form of the model: what the grammar lets through is read as calls that fit the schemas.

Texts are drawn at random, token by token, as far as the grammar goes. Tokens are bytes and the format's marks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from oneloop.parsers.engine import make_parser
from oneloop.parsers.forced import forced_tags
from oneloop.parsers.registry import TOOL_FORMATS, tool_format
from oneloop_core import GrammarCompiler, Vocabulary

if TYPE_CHECKING:
    from oneloop.parsers.formats import CallForm, ToolFormat
    from oneloop_core import Grammar

NUM_TEXTS = 400 if os.environ.get("ONELOOP_FUZZ") == "long" else 25
MAX_TOKENS = 700
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
    "set-up": {
        "type": "object",
        "title": "Everything that is written in its own way",
        "properties": {
            "text": {"type": "string", "maxLength": 20},
            "note": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}], "default": None},
            "kind": {"enum": ["null", "5", "True", '"', "\n", "a b"]},
            "code": {"type": "string", "pattern": "^[0-9<]+$", "maxLength": 6},
            "on": {"type": "boolean"},
            "off": {"type": ["boolean", "null"]},
            "size": {"type": ["integer", "null"], "minimum": -3, "maximum": 12},
            "any": {"type": ["string", "number", "boolean"], "maxLength": 6},
            "many": {"type": "array", "items": {"type": "string", "maxLength": 14}, "maxItems": 2},
            "more": {"type": "object", "additionalProperties": {"$ref": "#/$defs/tags"}, "maxProperties": 1},
            "free": {"maxLength": 8},
            "none": {"type": "null"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["any", "kind", "free"],
        "additionalProperties": False,
        "$defs": {
            "tags": {"enum": ["</parameter>\n</function>", "</arg_value></tool_call>", True, None, 1.5]}
        },
    },
    "a.b:c/d-e": {
        "type": "object",
        "properties": {
            "of": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "array", "items": {"$ref": "#/$defs/leaf"}}]}
        },
        "$defs": {"leaf": {"enum": ["</tool_call>", "[TOOL_CALLS]", "```", 'q"', None, {"name": "x"}]}},
        "additionalProperties": False,
        "required": ["of"],
    },
}
TEMPLATES = {
    "hermes": [""],
    "llama3_json": [""],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"],
    "phi4_mini": [""],
    "granite": [""],
    "deepseek_v3": ["", "```json"],
    "qwen3_coder": [""],
    "glm45": ["", "</arg_key><arg_value>"],
    "kimi_k2": [""],
    "pythonic": ["", "<|python_start|>"],
}
CASES = [(name, template) for name, templates in TEMPLATES.items() for template in templates]


def test_every_form_is_tried() -> None:
    assert {each.name for each in TOOL_FORMATS if each.form is not None} == TEMPLATES.keys()


def _tools(form: CallForm) -> dict[str, dict[str, Any]]:
    """Those that can be called in a form."""
    return {name: schema for name, schema in TOOLS.items() if form.names.fullmatch(name)}


def _format(name: str, template: str) -> tuple[ToolFormat, CallForm]:
    found = tool_format(name, "")
    assert found is not None
    assert found.form is not None
    return found, found.form(template)


def _vocabulary(found: ToolFormat) -> tuple[Vocabulary, int]:
    pieces = [*(bytes([value]) for value in range(256)), *(mark.encode() for mark in found.markers), b"</s>"]
    end = len(pieces) - 1
    return Vocabulary(pieces, list(range(256, end + 1))), end


def _drawn(grammar: Grammar, end: int, pieces: list[bytes], source: random.Random) -> tuple[str, bool]:
    """A text at random, and whether it has come to its end."""
    matcher, text = grammar.matcher(), bytearray()
    for num_tokens in range(MAX_TOKENS):
        if matcher.is_over():
            return text.decode(), True
        mask = matcher.mask()
        allowed = [token for token in range(end + 1) if mask[token >> 3] >> (token & 7) & 1]
        if end in allowed and (len(allowed) == 1 or source.random() < 0.5):
            return text.decode(), True
        allowed = [token for token in allowed if token != end]
        closing = [token for token in allowed if token >= 256 or token in b'",}])\n']
        plain = [token for token in allowed if 32 < token < 127]
        if closing and source.random() < (0.4 if num_tokens < MAX_TOKENS // 3 else 0.9):
            token = source.choice(closing)
        else:
            token = source.choice(plain or allowed)
        matcher.advance(token)
        text += pieces[token]
    return text.decode(errors="replace"), False


@pytest.mark.parametrize(("name", "template"), CASES)
@pytest.mark.parametrize(("only", "parallel"), [(None, True), (None, False), ("get_weather", True)])
def test_what_is_let_through_is_read(
    name: str, template: str, only: str | None, parallel: bool, read_alike: Any
) -> None:
    found, form = _format(name, template)
    vocabulary, end = _vocabulary(found)
    pieces = [*(bytes([value]) for value in range(256)), *(mark.encode() for mark in found.markers)]
    tools = _tools(form)
    tags = forced_tags(form, tools, only, parallel=parallel)
    assert tags is not None
    spec = json.dumps(tags)
    found = found if form.read is None else dataclasses.replace(found, read=form.read)
    grammar = GrammarCompiler(vocabulary, [end]).compile("structural_tag", spec)
    source = random.Random(name + template)
    counts, names = set(), set()
    for _ in range(NUM_TEXTS):
        text, is_whole = _drawn(grammar, end, pieces, source)
        first = read_alike(lambda: make_parser(None, found, tools), text, source)
        calls = first.arguments
        for called, arguments in calls:
            assert jsonschema.Draft202012Validator(TOOLS[called]).is_valid(arguments), text
            assert only in (None, called)
            names.add(called)
        if is_whole:
            assert calls, text
            assert len(calls) == len(first.calls)
            assert not first.content.strip(), text
            assert len(calls) == 1 or (parallel and only is None)
            counts.add(len(calls))
    assert names == ({only} if only else set(tools))
    assert (max(counts) > 1) is (parallel and only is None)
