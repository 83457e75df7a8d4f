"""Which functions can be called in a form that writes arguments one by one, and as what."""

from __future__ import annotations

from typing import Any

import pytest

from oneloop.parsers.arguments import Argument, arguments_of
from oneloop.parsers.registry import tool_format

LEAF = {"$ref": "#/$defs/leaf"}
DEFS = {"leaf": {"type": "integer"}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_arguments_in_their_order() -> None:
    schema = {**_object(b={"type": "string"}, a=True), "required": ["c", "a"], "description": "x"}
    assert arguments_of(schema) == [
        Argument("b", {"type": "string"}, False),
        Argument("a", True, True),
        Argument("c", True, True),
    ]
    assert arguments_of(_object()) == []
    assert arguments_of({"type": "object", "additionalProperties": False}) == []


def test_definitions_go_along() -> None:
    schema = {**_object(a=LEAF, b={"type": "null"}), "$defs": DEFS}
    assert arguments_of(schema) == [
        Argument("a", {**LEAF, "$defs": DEFS}, False),
        Argument("b", {"type": "null"}, False),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**_object(), "additionalProperties": True},
        {**_object(a={}), "additionalProperties": {"type": "string"}},
        {**_object(a={}), "minProperties": 1},
        {**_object(a={}), "minproperties": 1},
        {**_object(a={}), "anyOf": [{"required": ["a"]}]},
        {**_object(a={}), "patternProperties": {}},
        _object(a={"$ref": "#/properties/b"}, b={}),
        _object(a={"$ref": "#"}),
        {**_object(a={"$ref": "#/$defs/x"}), "$defs": {"x": {"$ref": "#"}}},
        _object(a={"$id": "other", "type": "string"}),
        {**_object(a={**LEAF, "$defs": {}}), "$defs": DEFS},
        {**_object(a={}), "required": "a"},
        _object(a=1),
    ],
)
def test_what_is_more_than_a_list_of_arguments(schema: dict[str, Any]) -> None:
    assert arguments_of(schema) is None


def _content(name: str, schema: Any, root: dict[str, Any] | None = None, key: str = "a") -> Any:
    found = tool_format(name, "")
    assert found is not None
    assert found.form is not None
    element = found.form("").arguments({**_object(**{key: schema}), **(root or {})})
    return None if element is None else element["members"][0]["content"]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "maxLength": 3, "title": "t"}, {"maxLength": 3}),
        (True, {}),
        ({"description": "d"}, {}),
        ({"minLength": 2}, {"minLength": 2}),
        ({"enum": ["a", "b"]}, {"enum": ["a", "b"]}),
        ({"type": "string", "enum": ["a", None, 1]}, {"enum": ["a"]}),
        ({"const": "a"}, {"enum": ["a"]}),
        ({"type": ["string", "null"]}, {"anyOf": [{}, {"const": "null"}]}),
        ({"enum": ["a", None]}, {"anyOf": [{"enum": ["a"]}, {"const": "null"}]}),
        ({"$ref": "#/$defs/text"}, {"pattern": "x"}),
        (
            {"anyOf": [{"$ref": "#/$defs/text"}, {"const": "b"}, {"type": "null"}]},
            {"anyOf": [{"pattern": "x"}, {"enum": ["b"]}, {"const": "null"}]},
        ),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{}, {"const": "null"}]}),
        ({"type": "null"}, {"const": "null"}),
    ],
)
def test_texts(name: str, schema: Any, text: dict[str, Any]) -> None:
    content = _content(name, schema, {"$defs": {"text": {"type": "string", "pattern": "x"}}})
    assert (content["type"], content["json_schema"]) == ("text", text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": ["string", "number"]},
        {"enum": ["a", 1]},
        {"type": "object"},
        {"const": True},
    ],
)
def test_other_values_are_json(schema: dict[str, Any]) -> None:
    assert _content("glm45", schema) == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "not": {"const": "a"}},
        {"allOf": [{"type": "string"}]},
        {"type": "string", "format": "uri"},
        {"enum": ["a</arg_value>b</parameter>"]},
        {"type": ["string", "null"], "enum": ["a"]},
        {"oneOf": [{"type": "string"}, {"const": "b"}]},
        {"enum": []},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/$defs/self"},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_texts_that_cannot_be_said(name: str, schema: Any) -> None:
    """Or that would be read as something else."""
    assert _content(name, schema, {"$defs": {"self": {"$ref": "#/$defs/self"}}}) is None


@pytest.mark.parametrize("key", ["", " a", "a>", "a\n", "k" * 129])
def test_names_that_cannot_be_written(key: str) -> None:
    for name in ("qwen3_coder", "glm45", "pythonic"):
        assert _content(name, {"type": "string"}, key=key) is None


def test_python_words() -> None:
    def words(schema: Any) -> Any:
        return _content("pythonic", schema)

    assert words({"type": "boolean"}) == {"type": "regex", "pattern": "True|False"}
    assert words({"type": ["null"], "title": "t"}) == {"type": "regex", "pattern": "None"}
    both = words({"type": ["integer", "null"]})
    assert both["elements"] == [
        {"type": "regex", "pattern": "None"},
        {"type": "json_schema", "json_schema": {"type": ["integer"]}},
    ]
    bound = {"type": "integer", "minimum": 1}
    assert words(bound) == {"type": "json_schema", "json_schema": bound}
