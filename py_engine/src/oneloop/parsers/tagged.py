"""Arguments between tags: strings as they stand, other values as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.parsers.arguments import arguments_of, keywords
from oneloop.parsers.parameters import allowed_types, referred

if TYPE_CHECKING:
    from oneloop.parsers.arguments import Argument

_ABOUT_TEXT = frozenset({"minLength", "maxLength", "pattern", "format"})
_VALUES = frozenset({"enum", "const"})
_FORMAT_NAMES = """
color duration host-name idn-email idn-hostname ip-address ipv6 iri iri-reference json-pointer phone regex
relative-json-pointer style uri uri-reference uri-template utc-millisec
"""
_JSON_ONLY = frozenset(_FORMAT_NAMES.split())
"""Formats that mean something, and that the core has not for texts."""
_MAX_DEPTH = 8
"""Schemas within schemas of one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedForm:
    """How a format writes one argument."""

    begin: str
    """KEY stands for its name."""
    end: str
    end_tag: str
    """What no text may contain."""
    keys: re.Pattern[str]
    """Names that can be written."""

    def arguments(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The element of all arguments (`CallForm.arguments`)."""
        found = arguments_of(schema)
        if found is None:
            return None
        members = [self._member(each, schema) for each in found]
        if None in members:
            return None
        return {"type": "members_with_separator", "members": members, "separator": ""}

    def _member(self, argument: Argument, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
        name, schema = argument.name, argument.schema
        if self.keys.fullmatch(name) is None or name != name.strip():
            return None
        types = allowed_types(schema, root)
        content: Mapping[str, Any] = {"type": "json_schema", "json_schema": schema}
        if types <= {"string", "null"}:
            texts = self._texts(schema, root, allows_null="null" in types)
            if texts is None:
                return None
            content = {"type": "text", "json_schema": texts, "excludes": [self.end_tag]}
        return {
            "begin": self.begin.replace(KEY, name),
            "content": content,
            "end": self.end,
            "required": argument.is_required,
        }

    def _texts(self, schema: Any, root: Mapping[str, Any], *, allows_null: bool) -> Mapping[str, Any] | None:
        """The schema of a value's text. allows_null: whether the text "null" is read as null."""
        found = _strings(schema, root, 0)
        if found is None or found.has_null is not allows_null:
            return None
        alternatives = [*found.schemas, *([{"const": "null"}] if allows_null else [])]
        values = [value for each in alternatives for value in each.get("enum", [])]
        if not alternatives or any(self.end_tag in value for value in values):
            return None
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


KEY = "{key}"
"""In TaggedForm.begin: the argument's name."""


@dataclass(frozen=True, slots=True)
class _Strings:
    """What a schema allows of strings and null."""

    schemas: list[dict[str, Any]]
    """Of strings; one of them holds."""
    has_null: bool


def _strings(schema: Any, root: Mapping[str, Any], depth: int) -> _Strings | None:
    """None where that is not said in plain words, or other values are allowed by name."""
    if schema is True:
        return _Strings([{}], has_null=False)
    if type(schema) is not dict or depth > _MAX_DEPTH:
        return None
    said = keywords(schema)
    if said == {"$ref"}:
        return _strings(referred(schema["$ref"], root), root, depth + 1)
    if said in ({"anyOf"}, {"oneOf"}):
        return _any_of(schema[next(iter(said))], root, depth, is_one="oneOf" in said)
    if not said <= {"type"} | _VALUES | _ABOUT_TEXT or said >= _VALUES:
        return None
    if schema.get("format") in _JSON_ONLY:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    given = schema.get("type", ["string"] if values is None else ["string", "null"])
    types = set(given) if type(given) is list and all(type(name) is str for name in given) else {given}
    if not types <= {"string", "null"}:
        return None
    strings = {name: schema[name] for name in _ABOUT_TEXT & said}
    if values is None:
        return _Strings([strings] if "string" in types else [], "null" in types)
    if type(values) is not list or ("type" not in said and not all(_is_text(value) for value in values)):
        return None
    texts = [value for value in values if type(value) is str and "string" in types]
    return _Strings([{**strings, "enum": texts}] if texts else [], "null" in types and None in values)


def _any_of(schemas: Any, root: Mapping[str, Any], depth: int, *, is_one: bool) -> _Strings | None:
    """is_one: of `oneOf`, whose alternatives must not hold together."""
    if type(schemas) is not list:
        return None
    found = [_strings(each, root, depth + 1) for each in schemas]
    known = [each for each in found if each is not None]
    strings = [schema for each in known for schema in each.schemas]
    num_nulls = sum(each.has_null for each in known)
    if len(known) < len(found) or (is_one and (len(strings) > 1 or num_nulls > 1)):
        return None
    return _Strings(strings, num_nulls > 0)


def _is_text(value: Any) -> bool:
    return value is None or type(value) is str
