"""`response_format`, `structured_outputs` and the older `guided_*` fields: the form that an answer is to have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.api.protocol.fields import Fields
from oneloop.engine.structured import FIELDS, GrammarSpec, StructuredOutputsParams, json_text
from oneloop.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
GUIDED_WHITESPACE = "guided_whitespace_pattern"
GUIDED_BACKEND = "guided_decoding_backend"
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def read_structured(fields: Fields) -> tuple[GrammarSpec | None, list[str]]:
    """The grammar that a request asks for, if any, and the fields that had no effect. ApiError (400)."""
    try:
        given = {
            "response_format": _response_format(fields),
            "structured_outputs": _structured_outputs(fields),
            "guided_*": _guided(fields),
        }
    except RequestError as error:
        raise bad_request(error.field, error.message) from None
    specs = {name: spec for name, spec in given.items() if spec is not None}
    if len(specs) > 1:
        raise bad_request(
            next(iter(specs)), f"{' and '.join(specs)} exclude each other; send one form for the answer"
        )
    # It names a library; here there is one.
    ignored = [GUIDED_BACKEND] if fields.given(GUIDED_BACKEND) is not None else []
    return next(iter(specs.values()), None), ignored


def _response_format(fields: Fields) -> GrammarSpec | None:
    members = fields.object("response_format")
    if members is None:
        return None
    nested = Fields(members, "response_format.")
    kind = nested.choice("type", FORMATS)
    if kind is None:
        raise nested.refuse("type", f"must be one of {', '.join(FORMATS)}")
    if kind == "structural_tag":
        source = json_text("response_format", members)
        return GrammarSpec(kind="structural_tag", source=source, field="response_format")
    spec = _json_schema(nested) if kind == "json_schema" else None
    if kind == "json_object":
        spec = GrammarSpec(kind="json_object", source="", field="response_format")
    _refuse_unread(nested)
    return spec


def _json_schema(nested: Fields) -> GrammarSpec:
    members = nested.object("json_schema")
    if members is None:
        raise nested.refuse("json_schema", 'is needed with type "json_schema"')
    inner = Fields(members, "response_format.json_schema.")
    inner.text("name")
    inner.text("description")
    # Without it other servers may keep to the schema by and large; here answers always do.
    inner.flag("strict", False)
    schema = inner.object("schema")
    if schema is None:
        raise inner.refuse("schema", "must be a JSON schema")
    _refuse_unread(inner)
    name = inner.name("schema")
    return GrammarSpec(kind="json_schema", source=json_text(name, schema), field=name)


def _structured_outputs(fields: Fields) -> GrammarSpec | None:
    members = fields.object("structured_outputs")
    if members is None:
        return None
    nested = Fields(members, "structured_outputs.")
    values = {name: value for name in FIELDS if (value := nested.given(name)) is not None}
    _refuse_unread(nested)
    return StructuredOutputsParams(**values).spec()


def _guided(fields: Fields) -> GrammarSpec | None:
    values: dict[str, Any] = {
        name: value for field, name in _GUIDED.items() if (value := fields.given(field)) is not None
    }
    pattern = fields.text(GUIDED_WHITESPACE)
    if pattern is not None:
        values["whitespace_pattern"] = pattern
    return StructuredOutputsParams(**values).spec("guided_") if values else None


def _refuse_unread(nested: Fields) -> None:
    unread = nested.unread()
    if unread:
        raise nested.refuse(unread[0], "is not supported here; leave it out")
