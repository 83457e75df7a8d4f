"""The same forms in every API: what is asked for is what comes, whole and streamed; what cannot be kept is a 400.

Over the null executor, to which every token that a mask allows is alike: an answer without its mask is no such text.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60},
    "/v1/completions": {"prompt": "x", "max_tokens": 60},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60},
    "/v1/responses": {"input": "x", "max_output_tokens": 60},
}
SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "required": ["ok", "n"],
    "additionalProperties": False,
}  # fmt: skip
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<a>"],
        "at_least_one": True,
        "stop_after_first": True,
        "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "b{2}"}, "end": "</a>"}],
    },
}


def is_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"structured_outputs": {"json": SCHEMA}}, is_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, is_schema),
    ({"structured_outputs": {"regex": "(ab){3}c"}}, matches("(ab){3}c")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, matches("yes|no")),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "z"'}}, matches("a[0-9]z")),
    ({"structured_outputs": {"grammar": 'start: "q" /[xy]{2}/'}}, matches("q[xy]{2}")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, matches("<a>bb</a>")),
    ({"guided_json": SCHEMA}, is_schema),
    ({"guided_regex": "k{4}"}, matches("k{4}")),
    ({"guided_choice": ["left", "right"]}, matches("left|right")),
    ({"guided_grammar": 'root ::= "g" "h"'}, matches("gh")),
]
BAD: list[dict[str, Any]] = [
    *[{"json": schema} for schema in (
        {"type": "unknown"}, {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(?=a)b"}, {"$ref": "#"},
        {"$ref": "http://127.0.0.1:1/x"}, {"not": {}}, False, [1], "", "{",
    )],
    {"json_object": False}, {"grammar": ""}, {"grammar": "root ::= " + "(" * 10**5}, {"regex": "(?<=a)b"},
    {"regex": ""}, {"choice": []}, {"choice": [""]}, {"json": SCHEMA, "regex": "a"}, {"regex": "a", "backend": "x"}, {},
    {"structural_tag": {"type": "structural_tag", "triggers": [], "structures": []}}, {"lark": "start: /a/"},
]  # fmt: skip


@asynccontextmanager
async def null_server(serve: Any) -> AsyncIterator[Any]:
    config = EngineConfig.from_flat({"executor": "null", "max_num_seqs": 32, "max_num_batched_tokens": 256})
    async with AsyncEngine(config) as engine, serve(engine) as server:
        yield server


def said(path: str, answer: dict[str, Any]) -> str:
    """The text of a whole reply."""
    match path:
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"]
        case "/v1/completions":
            return answer["choices"][0]["text"]
        case "/v1/messages":
            return "".join(block["text"] for block in answer["content"])
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


async def streamed(server: Any, path: str, body: dict[str, Any]) -> str:
    """The text that the events of a stream come to."""
    async with server.session.post(server.url + path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        lines = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: {")]
    text = ""
    for event in map(json.loads, lines):
        match path:
            case "/v1/chat/completions":
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            case "/v1/completions":
                text += "".join(choice["text"] for choice in event["choices"])
            case "/v1/messages":
                text += event.get("delta", {}).get("text", "")
            case _:
                text += event["delta"] if event["type"] == "response.output_text.delta" else ""
    return text


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_asked_for_comes(serve: Any, path: str) -> None:
    async with null_server(serve) as server:
        for form, holds in FORMS:
            for seed in range(3):
                body = {**ROUTES[path], **form, "seed": seed}
                status, answer = await server.post(path, body)
                assert status == 200, (form, answer)
                text = said(path, answer)
                assert holds(text), (form, text)
                assert await streamed(server, path, body) == text


@pytest.mark.parametrize("path", ROUTES)
async def test_what_cannot_be_kept_is_refused(serve: Any, path: str) -> None:
    """T18 and H15 in each API; a form that can be kept goes before and after each."""
    good = {**ROUTES[path], "structured_outputs": {"regex": "a{3}"}}
    async with null_server(serve) as server:
        for form in BAD:
            for stream in (False, True):
                body = {**ROUTES[path], "structured_outputs": form, "stream": stream}
                status, answer = await server.post(path, body)
                assert status == 400, (str(form)[:80], answer)
                assert "structured_outputs" in answer["error"]["message"], (str(form)[:80], answer)
            status, answer = await server.post(path, good)
            assert (status, said(path, answer)) == (200, "aaa")


OWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "json_object"}},
    "/v1/completions": {"response_format": {"type": "json_object"}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": {"type": "json_object"}}},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_two_forms_are_one_too_many(serve: Any, path: str) -> None:
    """Neither gives way in silence: not to another spelling, not to a call that must come."""
    form = {"structured_outputs": {"regex": "a"}}
    others: list[dict[str, Any]] = [OWN[path], {"guided_choice": ["a"]}]
    if path == "/v1/chat/completions":
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        others.append({"tools": [tool], "tool_choice": "required"})
    elif path == "/v1/messages":
        others.append(
            {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
        )
    elif path == "/v1/responses":
        others.append(
            {"tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "required"}
        )
    async with null_server(serve) as server:
        for other in others:
            status, answer = await server.post(path, {**ROUTES[path], **form, **other})
            assert status == 400, (other, answer)


async def test_a_response_in_the_background_keeps_its_form(serve: Any) -> None:
    async with null_server(serve) as server:
        body = {**ROUTES["/v1/responses"], "structured_outputs": {"regex": "(ab){4}"}, "background": True}
        status, answer = await server.post("/v1/responses", body)
        assert status == 200, answer
        while answer["status"] in ("queued", "in_progress"):
            _, page = await server.get(f"/v1/responses/{answer['id']}")
            answer = json.loads(page)
        assert said("/v1/responses", answer) == "abababab"
        # What goes on from it is held to its own form alone.
        follow = {**ROUTES["/v1/responses"], "previous_response_id": answer["id"], "guided_regex": "c{2}"}
        status, answer = await server.post("/v1/responses", follow)
        assert (status, said("/v1/responses", answer)) == (200, "cc")
