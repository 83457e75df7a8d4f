"""Arguments that a form writes one by one, each in its own way: which there are, by the schema of their object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = "Mapping[str, Any] | bool"

_NAMES = """
$ref $dynamicRef $recursiveRef $id $anchor additionalItems additionalProperties allOf anyOf const contains
dependencies dependentRequired dependentSchemas disallow divisibleBy else enum exclusiveMaximum exclusiveMinimum
extends format if items maxContains maxItems maxLength maxProperties maximum minContains minItems minLength
minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems properties propertyNames required
then type unevaluatedItems unevaluatedProperties uniqueItems
"""
KEYWORDS = frozenset(_NAMES.split())
"""Those that say what is valid, by any draft."""
_BY_LOWER = {keyword.lower() for keyword in KEYWORDS}
_OF_THE_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Argument:
    """One of a function's arguments."""

    name: str
    schema: Schema
    """With the definitions that it refers to."""
    is_required: bool


def keywords(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that say something, as they are spelled."""
    return {name for name in schema if name in KEYWORDS or name.lower() in _BY_LOWER}


def arguments_of(schema: Mapping[str, Any]) -> list[Argument] | None:
    """The arguments of a schema of objects, in the order in which they are written.

    None where there is more to it than which there are, and which are required; and for an object that has no named
    ones but is open for others. Others beside named ones are not asked for.
    """
    if not keywords(schema) <= _OF_THE_OBJECT:
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", "properties" not in schema)
    if type(properties) is not dict or type(required) is not list or type(others) is not bool:
        return None
    if (others and not properties) or not all(type(name) is str for name in required):
        return None
    names = [*properties, *(name for name in required if name not in properties)]
    made: list[Argument] = []
    for name in dict.fromkeys(names):
        whole = with_definitions(properties.get(name, True), schema)
        if whole is None:
            return None
        made.append(Argument(name, whole, name in required))
    return made


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Schema | None:
    """A part of a schema that stands for itself. None where it refers to more than definitions at the root."""
    if type(schema) is bool:
        return schema
    if type(schema) is not dict:
        return None
    if not _references(schema):
        return schema
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    found = _references([schema, definitions])
    if any(name in schema for name in _DEFINITIONS) or not all(map(_leads_to_definitions, found)):
        return None
    return {**schema, **definitions}


def _references(value: Any) -> list[Any]:
    """What stands behind `$ref`, and whatever else changes what references mean."""
    found: list[Any] = []
    todo = [value]
    while todo:
        each = todo.pop()
        if type(each) is dict:
            found += [each[name] for name in ("$ref", "$id", "$dynamicRef", "$recursiveRef") if name in each]
            todo += each.values()
        elif type(each) is list:
            todo += each
    return found


def _leads_to_definitions(reference: Any) -> bool:
    return type(reference) is str and any(reference.startswith(f"#/{name}/") for name in _DEFINITIONS)
