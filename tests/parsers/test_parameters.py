"""Values between tags: what the schema says they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oneloop.parsers.parameters import allowed_types, value_json

ROOT = {
    "$defs": {"point": {"type": "object"}, "color": {"enum": ["red", 1]}, "loop": {"$ref": "#/$defs/loop"}}
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"allOf": [{"$ref": "#/$defs/point"}]}, {"object"}),
        ({"$ref": "#/$defs/color"}, {"string", "integer"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "http://example.org/x"}, set()),
        ({"const": True}, {"boolean"}),
        ({"type": "string", "enum": [1]}, {"string"}),
        ({}, set()),
        (None, set()),
        (True, set()),
        ({"type": 3, "anyOf": 4, "$ref": 5, "enum": 6}, set()),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    assert allowed_types(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("42", {"integer"}, 42),
        (" 42\n", {"integer"}, 42),
        ("42", {"string"}, "42"),
        ("4.5", {"integer"}, "4.5"),
        ("True", {"boolean"}, True),
        ("None", {"null", "integer"}, None),
        ("NaN", {"number", "integer"}, "NaN"),
        ("[1, 2", {"array"}, "[1, 2"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ('"quoted"', {"string", "integer"}, "quoted"),
        ("yes", {"boolean"}, "yes"),
        ("{'a': [True, None]}", {"object"}, {"a": [True, None]}),
        ("['x', 'y']", {"array"}, ["x", "y"]),
        ("['x'] and more", {"array"}, "['x'] and more"),
        ("{'a': open('x')}", {"object"}, "{'a': open('x')}"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
    ],
)
def test_values(text: str, types: set[str], value: Any) -> None:
    assert json.loads(value_json(text, frozenset(types))) == value


def test_numbers_of_any_length_stay_as_they_are() -> None:
    assert value_json("7" * 10_000, frozenset({"integer"})) == "7" * 10_000
