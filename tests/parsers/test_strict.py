"""Strict functions: whatever a model tries to write, calls of these fit their schemas, and other text is free."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from oneloop.parsers.engine import make_parser
from oneloop.parsers.formats import NAME
from oneloop.parsers.registry import TOOL_FORMATS, reasoning_format, tool_format
from oneloop.parsers.strict import strict_tags
from oneloop_core import GrammarCompiler, Vocabulary

if TYPE_CHECKING:
    from oneloop_core import Grammar

NUM_TEXTS = 400 if os.environ.get("ONELOOP_FUZZ") == "long" else 30
MAX_TOKENS = 500
SET = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a</think>", "<tool_call>", "<function="]}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = {"set": SET, "get": {"type": "object", "properties": {}, "additionalProperties": False}}
LOOSE = {"any": {"type": "object", "not": {}}}
TEMPLATES = {
    "hermes": [""],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"],
    "granite": [""],
    "deepseek_v3": ["", "```json"],
    "qwen3_coder": [""],
    "glm45": ["", "</arg_key><arg_value>"],
    "kimi_k2": [""],
    "llama3_json": [""],
    "pythonic": ["", "<|python_start|>"],
}
TAGGED = ("qwen3_coder", "glm45", "pythonic")
BARE = ("llama3_json", "pythonic")
WISHES = {
    "hermes": '<tool_call>\n{"name": "set", "arguments": {"city": 5, "x": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "set", "arguments": {"town": ""}}][TOOL_CALLS]set[ARGS]{"days": 1}',
    "granite": '<tool_call>[{"name": "get", "arguments": {"a": 1}}]<|tool_call|>[{"name": "got", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>set\n```json\n{}\n```"
    "<｜tool▁call▁begin｜>set<｜tool▁sep｜>{}",
    "qwen3_coder": "<function=set>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>set\n<arg_key>days</arg_key>\n<arg_value>100</arg_value>\n</tool_call>",
    "kimi_k2": '<|tool_call_begin|>functions.set:0<|tool_call_argument_begin|>{"city": null}<|tool_call_end|>',
    "llama3_json": '{"name": "s\\u0065t", "parameters": {"city": 5}}',
    "pythonic": "[ set(days=1)]",
}
MORE_WISHES = {
    "llama3_json": [
        ' {"name": "any", "parameters": 5}', '{"type": "f", "name": "get"', '{"name": "other"}', "<|python_tag|>",
    ],
    "pythonic": ["[get(a=1)]", "[other()]", "<|python_start|>[get(b="],
}  # fmt: skip
"""What the model would write, if it could: calls that do not fit."""
CASES = [
    (name, template, thinks)
    for name, templates in TEMPLATES.items()
    for template in templates
    for thinks in (True, False)
    if not (thinks and name in BARE)
]


def test_every_form_that_can_be_held_is_tried() -> None:
    forms = [(each.name, each.form("")) for each in TOOL_FORMATS if each.form is not None]
    assert {name for name, form in forms if form.marks or form.looks is not None} == TEMPLATES.keys()
    assert {name for name, form in forms if form.looks is not None} == set(BARE)
    assert all((form.before_all + form.begin).startswith(form.marks[0]) for _, form in forms if form.marks)


def _written(
    grammar: Grammar, pieces: list[bytes], wishes: list[str], source: random.Random
) -> tuple[str, bool]:
    """A text that follows wishes as far as the grammar lets it, and whether it has come to its end."""
    matcher, text, end = grammar.matcher(), bytearray(), len(pieces)
    wish = source.choice([b"<think>a", b"", *(wish.encode() for wish in wishes)])
    for num_tokens in range(MAX_TOKENS):
        mask = matcher.mask()
        allowed = [token for token in range(end + 1) if mask[token >> 3] >> (token & 7) & 1]
        if end in allowed and (len(allowed) == 1 or source.random() < 0.02 + (num_tokens > 200)):
            return text.decode(errors="replace"), True
        if not wish and source.random() < 0.2:
            wish = source.choice(wishes).encode()
        token = _token(allowed, pieces, wish, source)
        wish = wish[len(pieces[token]) :] if wish.startswith(pieces[token]) else b""
        matcher.advance(token)
        text += pieces[token]
    return text.decode(errors="replace"), False


def _token(allowed: list[int], pieces: list[bytes], wish: bytes, source: random.Random) -> int:
    wanted = [token for token in allowed if token < len(pieces) and wish and wish.startswith(pieces[token])]
    if wanted:
        return source.choice(wanted)  # a mark, or its first byte
    marks = [token for token in allowed if 256 <= token < len(pieces)]
    if marks and source.random() < 0.3:
        return source.choice(marks)
    closing = [token for token in allowed if token < 256 and token in b'",}])\n']
    if closing and source.random() < 0.5:
        return source.choice(closing)
    plain = [token for token in allowed if 32 <= token < 127]
    return source.choice(plain or [token for token in allowed if token < len(pieces)])


@pytest.mark.parametrize("are_marks_special", [True, False])
@pytest.mark.parametrize(("name", "template", "thinks"), CASES)
def test_calls_fit(name: str, template: str, thinks: bool, are_marks_special: bool, read_alike: Any) -> None:
    found = tool_format(name, "")
    assert found is not None
    assert found.form is not None
    form = found.form(template)
    thinking = reasoning_format("qwen3", "") if thinks else None
    tools = STRICT if name in TAGGED else STRICT | LOOSE
    tags = strict_tags(form, tools, frozenset(STRICT), thinking)
    marks = [*found.markers, "<think>", "</think>"]
    pieces = [*(bytes([value]) for value in range(256)), *(mark.encode() for mark in marks)]
    end = len(pieces)
    special = [*range(256, end)] if are_marks_special else []
    grammar = GrammarCompiler(Vocabulary([*pieces, b"</s>"], [*special, end]), [end]).compile(
        "structural_tag", json.dumps(tags)
    )
    found = found if form.read is None else dataclasses.replace(found, read=form.read)
    source = random.Random(name + template)
    wishes = [WISHES[name], *MORE_WISHES.get(name, []), "<think>a</think>", "free <b> text\n", *form.marks]
    wishes += [form.before_all + form.begin.replace(NAME, called) for called in tools]
    names: set[str] = set()
    num_thoughts = num_texts = 0
    for _ in range(NUM_TEXTS):
        text, is_whole = _written(grammar, pieces, wishes, source)
        first = read_alike(lambda: make_parser(thinking, found, tools), text, source)
        for called, arguments in first.arguments:
            names.add(called)
            assert type(arguments) is dict
            if called in STRICT:
                jsonschema.validate(arguments, STRICT[called])
        assert len(first.arguments) >= len(first.calls) - (not is_whole), text
        num_thoughts += bool(first.reasoning)
        num_texts += bool(first.content)
    assert names == set(tools)
    assert (num_thoughts > 0) is thinks
    assert num_texts


def test_what_cannot_be_held() -> None:
    """A mark that is a word, bare forms behind thinking, functions that a form cannot say, or too many of them; and
    beside tagged ones those that are not strict.
    """
    thinking = reasoning_format("qwen3", "")
    for name in ("phi4_mini", *BARE):
        found = tool_format(name, "")
        assert found is not None
        assert found.form is not None
        held = strict_tags(found.form(""), STRICT, frozenset(STRICT), None)
        assert (held is not None) is (name in BARE)
        assert strict_tags(found.form(""), STRICT, frozenset(STRICT), thinking) is None
        many = {f"{'f' * 100}{number}": STRICT["get"] for number in range(100)}
        assert strict_tags(found.form(""), many, many.keys(), None) is None
    for name in TAGGED:
        found = tool_format(name, "")
        assert found is not None
        assert found.form is not None
        assert strict_tags(found.form(""), STRICT, frozenset(STRICT), None) is not None
        assert strict_tags(found.form(""), STRICT, {"set"}, None) is None
        assert strict_tags(found.form(""), {"any": {"minProperties": 1}}, {"any"}, None) is None
