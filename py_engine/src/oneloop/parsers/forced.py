"""Calls that must come (tool_choice "required", or a name).

The text is held to the form in which the model writes calls, where that is known and can say the functions' schemas.
Else it is held to a JSON schema, whoever the model is. Required: [{"name": …, "parameters": {…}}, …] with at least one
call. A named function: its parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oneloop.parsers.calls import read_arguments, read_calls
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import MalformedError

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

MAX_TAGS = 256
"""Functions of forced_tags (the core's bound)."""
_AS_THEY_STAND = frozenset({"const", "enum", "default", "examples"})
"""Members of a schema that are no schemas."""
_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Members that are objects of schemas, with names that mean nothing."""


class NoObjectError(Exception):
    """The schema of a function's parameters allows no object."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        """Of the function."""


def forced_schema(tools: Tools, name: str | None, *, parallel: bool) -> Mapping[str, Any]:
    """The schema of the whole text. name: of the function that is to be called; None: any of them.

    References within a function's schema are led to its new place. Parameters are objects, also where the schema does
    not say so; NoObjectError where it says otherwise.
    """
    if name is not None:
        return _of_objects(name, tools[name])
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [each]},
                "parameters": _moved(
                    _of_objects(each, schema), f"#/items/anyOf/{index}/properties/parameters"
                ),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (each, schema) in enumerate(tools.items())
    ]
    bound = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **bound, "items": {"anyOf": calls}}


def forced_tags(
    form: CallForm, tools: Tools, name: str | None, *, parallel: bool
) -> Mapping[str, Any] | None:
    """The structural tag of the whole text: calls of the functions, at least one, or a call of the named one.

    None where the form cannot say one of their names or schemas. NoObjectError as forced_schema.
    """
    tags = call_tags(form, tools if name is None else {name: tools[name]})
    if tags is None:
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel or name is not None,
    }
    texts = ({"type": "const_string", "value": text} for text in (form.before_all, form.after_all))
    before, after = texts
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [before, calls, after]}}


def call_tags(form: CallForm, tools: Tools) -> list[Mapping[str, Any]] | None:
    """A tag for a call of each function. As forced_tags."""
    tags: list[Mapping[str, Any]] = []
    for name, schema in tools.items():
        arguments = form.arguments(_of_objects(name, schema))
        if arguments is None or form.names.fullmatch(name) is None:
            return None
        tags.append({"begin": form.begin.replace(NAME, name), "content": arguments, "end": form.end})
    return tags


def _of_objects(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = schema.get("type")
    if kind == "object":
        return schema
    if kind is not None and not (type(kind) is list and "object" in kind):
        raise NoObjectError(name)
    return {**schema, "type": "object"}


def forced_format(name: str | None) -> ToolFormat:
    """Reads what `forced_schema` allows."""

    def read(scanner: Scanner, tools: Tools) -> Steps[None]:
        scanner.hold()
        try:
            if name is None:
                yield from read_calls(scanner, tools)
            else:
                yield from read_arguments(scanner, name)
        except MalformedError:
            scanner.give_back()

    return ToolFormat(name="forced", recognises=lambda _: False, read=read)


def _moved(schema: Any, place: str) -> Any:
    """The schema with its own references (#…) going on from its place in another one."""
    if type(schema) is list:
        return [_moved(each, place) for each in schema]
    if type(schema) is not dict:
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_SCHEMAS and type(value) is dict:
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _AS_THEY_STAND else _moved(value, place)
    target = schema.get("$ref")
    if type(target) is str and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved
