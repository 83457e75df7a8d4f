"""Strict functions: calls that a model may make fit their schemas, or the reply says that they need not.

The engine is the null executor's: it draws its text where the masks allow it.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import orjson
import pytest

from oneloop.api import parsing
from oneloop.engine import structured

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MAYBE = (
    '{#<tool_call>{"name": …, "arguments": …}</tool_call>#}{#</think>#}'
    "{% for message in messages %}{{ message.content }}{% endfor %}[assistant]"
)
"""The model may think or not."""
OPENED = MAYBE + "<think>\n"
CLOSED = OPENED + "\n</think>\n\n"
SCHEMAS = {
    "answer": {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    },
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def tokenizers(byte_tokenizer: Any) -> dict[str, Any]:
    """By template; made here, as it takes a while that no event loop of a test has."""
    return {template: byte_tokenizer(template, MARKS) for template in (MAYBE, OPENED, CLOSED)}


@pytest.fixture
def engine_of(null_engine_type: Any, tokenizers: dict[str, Any]) -> Any:
    """An engine of a template, which may call, think and end at any time."""

    def make(template: str = MAYBE) -> Any:
        tokenizer = tokenizers[template]
        tokens = [*tokenizer.eos_token_ids, *tokenizer.encode(CALLS, add_special_tokens=False)]
        return null_engine_type(tokens=tokens, tokenizer=tokenizer, max_model_len=8192, max_num_seqs=64)

    return make


STRICT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
CALLS = "c<think>a</think>b<tool_call>"
"""Text of a model that may call at any time."""


@pytest.mark.parametrize("template", [MAYBE, OPENED, CLOSED])
async def test_strict_functions(serve: Any, engine_of: Any, template: str) -> None:
    """A call that a model makes fits; it need not make one, and may think before."""
    names, texts, thoughts = set(), set(), set()
    async with serve(engine_of(template)) as server:
        for seed in range(20):
            body = {"messages": USER, "tools": STRICT_TOOLS, "max_tokens": 900, "seed": seed}
            status, reply = await server.post(CHAT, body)
            assert status == 200, reply
            answer = reply["choices"][0]
            for call in answer["message"].get("tool_calls", []):
                if answer["finish_reason"] == "tool_calls":
                    function = call["function"]
                    jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
                    names.add(function["name"])
            texts.add(answer["message"]["content"])
            thoughts.add(answer["message"].get("reasoning"))
    assert names == SCHEMAS.keys()
    assert len(texts) > 1
    assert (len(thoughts) > 1) is (template is not CLOSED)


def _by_every_protocol(max_tokens: int) -> tuple[tuple[str, dict[str, Any], list[dict[str, Any]]], ...]:
    """Path, body and strict functions of one request by each."""
    functions = [{"name": name, "strict": True} for name in SCHEMAS]
    responses = [{"type": "function", **one, "parameters": SCHEMAS[one["name"]]} for one in functions]
    messages = [{**one, "input_schema": SCHEMAS[one["name"]]} for one in functions]
    return (
        (CHAT, {"messages": USER, "max_tokens": max_tokens}, STRICT_TOOLS),
        ("/v1/responses", {"input": "hello", "max_output_tokens": max_tokens}, responses),
        ("/v1/messages", {"messages": USER, "max_tokens": max_tokens}, messages),
    )


async def test_strict_by_every_protocol(serve: Any, engine_of: Any) -> None:
    """What is not kept is refused where the function is strict, and else not looked at."""
    asked = _by_every_protocol(300)
    engine = engine_of()
    async with serve(engine) as server:
        compiled = engine.grammars.metrics.requests
        for num_asked, (path, body, tools) in enumerate(asked):
            async with server.session.post(server.url + path, json={**body, "tools": tools}) as reply:
                assert (reply.status, reply.headers.get("X-Oneloop-Ignored")) == (200, None)
            assert compiled["hit"] == num_asked  # one and the same form
            not_kept = {"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}
            for tool in tools:
                inner = tool.get("function", tool)
                inner = {**inner, ("input_schema" if "input_schema" in inner else "parameters"): not_kept}
                wrong = {**tool, "function": inner} if "function" in tool else inner
                status, _ = await server.post(path, {**body, "tools": [wrong]})
                assert status == 400
                loose = json.loads(json.dumps(wrong).replace('"strict": true', '"strict": false'))
                assert (await server.post(path, {**body, "tools": [loose]}))[0] == 200


@pytest.mark.parametrize(
    ("parser", "fields", "is_vain"),
    [
        ("llama3_json", {"reasoning": "none"}, False),
        ("pythonic", {"reasoning": "none"}, False),
        ("hermes", {}, False),
        ("qwen3_coder", {}, False),
        ("llama3_json", {}, True),
        ("pythonic", {}, True),
        ("phi4_mini", {}, True),
        ("llama3_json", {"tool_choice": "required"}, False),
        ("llama3_json", {"tool_choice": "none"}, False),
        ("hermes", {"response_format": {"type": "json_object"}}, False),
        (
            "hermes",
            {"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "x"}}}},
            True,
        ),
    ],
)
async def test_what_strict_cannot_do_is_said(
    serve: Any, engine_of: Any, parser: str, fields: dict[str, Any], is_vain: bool
) -> None:
    """In a header, and with a 400 by a server that takes nothing in vain."""
    settings = {"tool_call_parser": parser, "reasoning_parser": fields.get("reasoning", "auto")}
    asked = {name: value for name, value in fields.items() if name != "reasoning"}
    body = {"messages": USER, "max_tokens": 20, "tools": STRICT_TOOLS, **asked}
    async with (
        serve(engine_of(), **settings) as server,
        server.session.post(server.url + CHAT, json=body) as reply,
    ):
        assert reply.status == 200
        assert reply.headers.get("X-Oneloop-Ignored") == ("tools.strict" if is_vain else None)
    async with serve(engine_of(), **settings, strict_fields=True) as server:
        status, reply = await server.post(CHAT, body)
        assert status == (400 if is_vain else 200)
        assert not is_vain or reply["error"]["param"] == "tools.strict"


async def test_what_is_said_is_what_is_done(
    serve: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tags are built once a request, and what they can hold is what the reply says: with the thinking that they
    begin with they may be too long, where without it they would not.
    """
    built: list[int] = []

    def strict_tags(*arguments: Any) -> Any:
        tags = parsing_strict_tags(*arguments)
        built.append(len(orjson.dumps(tags)))
        return tags

    parsing_strict_tags = parsing.strict_tags
    monkeypatch.setattr(parsing, "strict_tags", strict_tags)
    for is_vain in (False, True):
        if is_vain:
            monkeypatch.setattr(structured, "MAX_SOURCE_BYTES", built[0] - 1)
        async with serve(engine_of(MAYBE)) as server:
            for path, body, tools in _by_every_protocol(20):
                built.clear()
                async with server.session.post(server.url + path, json={**body, "tools": tools}) as reply:
                    assert reply.status == 200
                    assert reply.headers.get("X-Oneloop-Ignored") == ("tools.strict" if is_vain else None)
                assert len(built) == 1
        async with serve(engine_of(MAYBE), strict_fields=True) as server:
            for path, body, tools in _by_every_protocol(20):
                status, _ = await server.post(path, {**body, "tools": tools})
                assert status == (400 if is_vain else 200)
