"""`response_format`, `structured_outputs` and the older `guided_*` fields: the form that an answer is to have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.api.protocol.fields import Fields
from oneloop.engine.structured import FIELDS, GrammarSpec, StructuredOutputsParams, json_text
from oneloop.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


def read_structured(
    fields: Fields, *, name: str = "response_format", read: Callable[[], GrammarSpec | None] | None = None
) -> tuple[GrammarSpec | None, list[str]]:
    """The grammar that a request asks for, if any, and the fields that had no effect. ApiError (400).

    name, read: of the API's own field, where that is another one than chat's `response_format`.
    """
    try:
        given = {
            name: _response_format(fields) if read is None else read(),
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


def read_flat_format(outer: Fields, key: str, kinds: Sequence[str]) -> GrammarSpec | None:
    """`text.format` of Responses, `output_config.format` of Messages: with the schema beside its type.

    outer: the object that it is in. kinds: the types that there are. Raises ApiError and RequestError.
    """
    members = outer.object(key)
    if members is None:
        return None
    nested = Fields(members, outer.name(key) + ".")
    kind = nested.choice("type", kinds)
    if kind is None:
        raise nested.refuse("type", f"must be one of {', '.join(kinds)}")
    if kind == "json_schema":
        return _schema(nested)
    _refuse_unread(nested)
    return (
        GrammarSpec(kind="json_object", source="", field=outer.name(key)) if kind == "json_object" else None
    )


def _json_schema(nested: Fields) -> GrammarSpec:
    members = nested.object("json_schema")
    if members is None:
        raise nested.refuse("json_schema", 'is needed with type "json_schema"')
    return _schema(Fields(members, "response_format.json_schema."))


def _schema(inner: Fields) -> GrammarSpec:
    """Of an object that has it as `schema`."""
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


def structured_wire(spec: GrammarSpec) -> dict[str, Any]:
    """`structured_outputs` that means this."""
    source: Any = list(spec.source) if isinstance(spec.source, tuple) else spec.source
    found = {
        _NAMES[spec.kind]: source if spec.kind != "json_object" else True,
        "disable_any_whitespace": spec.compact or None,
        "disable_additional_properties": spec.closed_objects or None,
        "whitespace_pattern": spec.whitespace_pattern,
    }
    return {name: value for name, value in found.items() if value is not None}


_NAMES: Mapping[str, str] = {
    "json_schema": "json", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "grammar",
    "structural_tag": "structural_tag",
}  # fmt: skip


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
