"""`response_format`, `structured_outputs` and `guided_*`: every spelling comes down to one GrammarSpec."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oneloop.api.errors import ApiError
from oneloop.api.protocol.fields import Fields
from oneloop.api.protocol.structured import read_structured
from oneloop.engine.structured import GrammarSpec

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAG = {
    "type": "structural_tag",
    "triggers": ["<a"],
    "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
}


def read(**members: object) -> GrammarSpec | None:
    return read_structured(Fields(members))[0]


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None},
    ],
)
def test_nothing_is_asked(members: dict[str, object]) -> None:
    assert read(**members) is None


@pytest.mark.parametrize(
    "members",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "description": "d"}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA, separators=(",", ":"))}},
        {"guided_json": SCHEMA},
    ],
)
def test_schemas(members: dict[str, object]) -> None:
    source = '{"type":"object","properties":{"b":{},"a":{}}}'
    assert read(**members) == GrammarSpec(kind="json_schema", source=source)


@pytest.mark.parametrize(
    ("members", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec(kind="json_object", source="")),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec(kind="json_object", source="")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec(kind="regex", source="a+")),
        ({"guided_regex": "a+"}, GrammarSpec(kind="regex", source="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec(kind="choice", source=("a", "b"))),
        ({"guided_choice": ["a", "b"]}, GrammarSpec(kind="choice", source=("a", "b"))),
        ({"guided_grammar": "start: /a/"}, GrammarSpec(kind="grammar", source="start: /a/")),
        ({"response_format": TAG}, GrammarSpec(kind="structural_tag", source=json.dumps(TAG, separators=(",", ":")))),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True,
                                    "disable_additional_properties": True, "whitespace_pattern": " ?"}},
            GrammarSpec(kind="json_object", source="", compact=True, whitespace_pattern=" ?", closed_objects=True),
        ),
        (
            {"guided_json_object": True, "guided_whitespace_pattern": " ?"},
            GrammarSpec(kind="json_object", source="", whitespace_pattern=" ?"),
        ),
    ],
)  # fmt: skip
def test_other_forms(members: dict[str, object], spec: GrammarSpec) -> None:
    assert read(**members) == spec
    assert hash(read(**members)) == hash(spec)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_json": {}}, "guided"),
        ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
         "response_format.json_schema.strict"),
    ],
)  # fmt: skip
def test_errors_name_the_field(members: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**members)
    assert (refused.value.param, refused.value.kind.status) == (param, 400)


def test_a_backend_has_no_effect() -> None:
    members = {"guided_regex": "a", "guided_decoding_backend": "outlines"}
    assert read_structured(Fields(members)) == (
        GrammarSpec(kind="regex", source="a"),
        ["guided_decoding_backend"],
    )


REFUSED = [
    ("response_format", {}), ("response_format", "json"), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": "{}"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "sctrict": True}}),
    ("response_format", {"type": "json_object", "schema": {}}), ("structured_outputs", {}), ("structured_outputs", []),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}), ("structured_outputs", {"json": ""}),
    ("structured_outputs", {"json": 5}), ("structured_outputs", {"json_object": False}),
    ("structured_outputs", {"grammar": ""}), ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": ["a", 1]}), ("structured_outputs", {"choice": "ab"}),
    ("structured_outputs", {"choice": [""]}), ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"regex": "a", "backend": "x"}), ("structured_outputs", {"whitespace_pattern": " "}),
    ("structured_outputs", {"json_object": True, "disable_any_whitespace": 1}),
    ("structured_outputs", {"regex": "a" * (1 << 19)}), ("guided_json", ""), ("guided_regex", 5),
    ("guided_choice", []), ("guided_grammar", ""), ("guided_json_object", False), ("guided_whitespace_pattern", " "),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_forms_that_are_none(field: str, value: object) -> None:
    """T18, as far as it is about shapes: what is in a schema, a pattern or a grammar is the core's to judge."""
    with pytest.raises(ApiError) as refused:
        read(**{field: value})
    assert refused.value.kind.status == 400
    assert str(refused.value.param).startswith(field if field[0] in "rs" else "guided")


async def test_a_form_that_nothing_will_have(server: Any) -> None:
    """max_tokens 0: it must be one all the same."""
    for form, status in (({"not": {}}, 400), (SCHEMA, 200)):
        body = {"prompt": "hello", "max_tokens": 0, "echo": True, "structured_outputs": {"json": form}}
        for stream in (False, True):
            async with server.session.post(
                server.url + "/v1/completions", json={**body, "stream": stream}
            ) as reply:
                assert reply.status == status
                if status == 400:
                    assert (await reply.json())["error"]["param"] == "structured_outputs.json"
