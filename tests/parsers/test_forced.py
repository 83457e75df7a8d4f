"""Calls that must come: the schema that the text is held to, and what reads such a text."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from oneloop.parsers.engine import make_parser
from oneloop.parsers.forced import forced_format, forced_schema

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/pair"}, "$ref": {"type": "string"}},
    "$defs": {"pair": {"type": "array", "items": {"type": "number"}, "minItems": 2}},
    "required": ["at"],
}
TOOLS = {"move": POINT, "stop": {"type": "object", "properties": {}}}


def test_schema_of_any_call() -> None:
    schema = forced_schema(TOOLS, None, parallel=True)
    validator = jsonschema.Draft202012Validator(schema)
    move = {"name": "move", "parameters": {"at": [1, 2], "$ref": "#x"}}
    stop = {"name": "stop", "parameters": {}}
    assert validator.is_valid([move])
    assert validator.is_valid([stop, move])
    for wrong in (
        [],
        [{"name": "move", "parameters": {"at": [1]}}],
        [{"name": "go", "parameters": {}}],
        [{"name": "stop"}],
    ):
        assert not validator.is_valid(wrong)
    single = jsonschema.Draft202012Validator(forced_schema(TOOLS, None, parallel=False))
    assert single.is_valid([move])
    assert not single.is_valid([stop, move])


def test_schema_of_a_named_call() -> None:
    assert forced_schema(TOOLS, "move", parallel=True) is POINT


def _run(pieces: list[str], name: str | None) -> list[Any]:
    parser = make_parser(None, forced_format(name), TOOLS)
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


@pytest.mark.parametrize("name", [None, "move"])
@pytest.mark.parametrize("indent", [None, 2])
def test_what_the_schema_allows_is_read(name: str | None, indent: int | None, run: Any, cut_up: Any) -> None:
    parameters = {"at": [1.5, -2e10], "$ref": 'a;]}"\\ 日本'}
    calls = [{"name": "move", "parameters": parameters}, {"name": "stop", "parameters": {}}]
    text = json.dumps(parameters if name else calls, indent=indent)
    expected = [("move", parameters)] if name else [("move", parameters), ("stop", {})]
    source = random.Random(1)
    parsed_type = type(run(["x"]))
    for pieces in ([text], list(text), *(cut_up(text, source) for _ in range(20))):
        parsed = parsed_type.of(_run(pieces, name))
        assert parsed.arguments == expected
        assert not parsed.content
