"""Forms that clients ask for, over HTTP: hostile ones are refused in time and alone (T18), floods settle (T19)."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT_S = 2.0
GOOD = {"structured_outputs": {"regex": "a{3}"}}


def nested(count: int, around: str, inner: Any) -> Any:
    """`inner` in so many schemas, each the only one in `around` of the next."""
    wrap = (
        (lambda one, _: {around: [one]}) if around == "anyOf" else (lambda one, _: {"properties": {"a": one}})
    )
    return functools.reduce(wrap, range(count), inner)


def text(**fields: Any) -> dict[str, Any]:
    return {"type": "string", **fields}


REFUSED_SCHEMAS: dict[str, Any] = {
    "open group": text(pattern="("),
    "look-around": text(pattern="(?=a)b"),
    "back-reference": text(pattern=r"(a)\1"),
    "many values": {"enum": [f"v{i}" for i in range(10**4)]},
    "large value": {"enum": ["x" * (5 << 20)]},
    "many items": {"type": "array", "minItems": 10**9},
    "large type": text(minLength=10**12),
    "unknown type": {"type": "unknown"},
    "type in a list": {"type": ["x"]},
    "itself": {"$ref": "#"},
    "ring": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "no such place": {"$ref": "#/$defs/none"},
    "deep anyOf": nested(200, "anyOf", {}),
    "deep objects": nested(200, "properties", {}),
    "nothing": False,
    "no schema": [1],
    "not": {"not": {}},
    "unique": {"type": "array", "uniqueItems": True},
}
"""Not all of these are wrong JSON schemas; what cannot be kept is refused."""
KEPT_OR_REFUSED: dict[str, Any] = {
    "large count": text(pattern="(a{1000}){1000}"),
    "nested counts": text(pattern="(a+)+b"),
    "many dots": text(pattern="(.*a){25}"),
    "alternatives": text(pattern="^(|.*)$"),
    "properties": text(pattern=r"^\p{L}+$"),
    "count": text(pattern="^a{0,100000}$"),
    "maximum length": text(maxLength=10**12),
    "large maximum": {"type": "integer", "maximum": 2 * 10**10},
    "anything": {},
    "needless escape": text(pattern=r"^go\!$"),
}
OTHER_FORMS: list[dict[str, Any]] = [
    {"grammar": 'root ::= root "a"\nroot ::= "b"'},
    {"grammar": "root ::= " + "(" * 10**5},
    {"grammar": "start: start"},
    {"grammar": "start: /(/"},
    {"grammar": "start: nothing"},
    {"regex": "(" * 10**5},
    {"regex": "(?<=a)b"},
    {"choice": [f"c{i}" for i in range(10**4)]},
    {"json": "{"},
    {"structural_tag": {"type": "structural_tag", "triggers": [], "structures": []}},
]


@asynccontextmanager
async def null_server(serve: Any, **settings: Any) -> AsyncIterator[Any]:
    """Over the null executor, tokens are bytes."""
    config = EngineConfig.from_flat({"executor": "null", "max_num_seqs": 32, "max_num_batched_tokens": 256})
    async with AsyncEngine(config) as engine, serve(engine, **settings) as server:
        yield server


async def timed(server: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """(status, answer) within the limit."""
    began = time.monotonic()
    status, answer = await server.post_raw(path, json.dumps(body).encode())
    assert time.monotonic() - began < 2 * LIMIT_S, body.get("structured_outputs")  # the machine may be busy
    return status, answer


async def check_good(server: Any) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9, **GOOD})
    assert (status, answer["choices"][0]["text"]) == (200, "aaa")


def completion(**forms: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 20, "structured_outputs": forms}


def chat(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "response_format": form}


def call(parameters: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": 60, "tools": [tool], "tool_choice": "required"}


async def test_forms_that_cannot_be_kept_are_refused(serve: Any) -> None:
    """T18, H15: a good form before and after each."""
    async with null_server(serve) as server:
        for name, schema in REFUSED_SCHEMAS.items():
            for path, body in ((COMPLETIONS, completion(json=schema)), (CHAT, chat(schema))):
                status, answer = await timed(server, path, body)
                assert status == 400, (name, str(answer)[:300])
                assert answer["error"]["param"].startswith(("structured_outputs", "response_format")), name
                assert len(answer["error"]["message"]) < 1000, name
            await check_good(server)
        for form in OTHER_FORMS:
            status, answer = await timed(server, COMPLETIONS, completion(**form))
            assert status == 400, (str(form)[:80], answer)
            assert answer["error"]["param"].startswith("structured_outputs")
            await check_good(server)


async def test_a_form_is_checked_though_nothing_will_have_it(serve: Any) -> None:
    """max_tokens 0 generates nothing."""
    async with null_server(serve) as server:
        for regex, expected in (("a", 200), ("(", 400)):
            body = {**completion(regex=regex), "max_tokens": 0, "echo": True}
            status, answer = await server.post(COMPLETIONS, body)
            assert status == expected, answer
        assert answer["error"]["param"] == "structured_outputs.regex"


async def test_costly_forms_are_kept_or_refused(serve: Any) -> None:
    """T18: never free text."""
    async with null_server(serve) as server:
        for name, schema in KEPT_OR_REFUSED.items():
            status, answer = await timed(server, COMPLETIONS, completion(json=schema))
            assert status in (200, 400), (name, answer)
            if status == 200 and name != "anything":
                start = '"' if schema["type"] == "string" else ("-", *"0123456789")
                assert answer["choices"][0]["text"].startswith(start), name
            await check_good(server)


async def test_tools_with_such_schemas(serve: Any) -> None:
    """T18 in a tool's parameters."""
    settings = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    async with null_server(serve, **settings) as server:
        for name in ("open group", "unknown type", "ring", "elsewhere", "deep objects", "many items"):
            status, answer = await timed(
                server, CHAT, call({"type": "object", "properties": {"a": REFUSED_SCHEMAS[name]}})
            )
            assert status == 400, (name, answer)
            assert answer["error"]["param"] == "tools", (name, answer)
            await check_good(server)


async def test_others_go_on_while_grammars_compile(serve: Any) -> None:
    """T18: compiling holds up nobody."""
    async with null_server(serve) as server:
        hostile = [
            asyncio.create_task(
                timed(server, COMPLETIONS, completion(regex="(.*a){" + str(20 + number) + "}"))
            )
            for number in range(8)
        ]
        longest = 0.0
        while not all(task.done() for task in hostile):
            began = time.monotonic()
            assert (await server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}))[0] == 200
            longest = max(longest, time.monotonic() - began)
        assert longest < 1.0
        assert all(task.result()[0] in (200, 400) for task in hostile)


async def grammar_counts(server: Any) -> dict[str, float]:
    """From /metrics: grammars asked for by what became of them, and how many are "kept"."""
    _, page = await server.get("/metrics")
    counts = {
        found[1]: float(found[2])
        for found in re.finditer(r'oneloop:grammar_requests_total\{.*result="(\w+)".*\} (.+)', page)
    }
    kept = re.search(r"oneloop:grammars_kept\{.*\} (.+)", page)
    assert kept is not None
    return counts | {"kept": float(kept[1])}


@pytest.mark.parametrize(
    "rounds", [3, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_a_flood_of_schemas_settles(serve: Any, rounds: int) -> None:
    """T19: each round are 400 schemas that nobody asked for before, 50 at once; then one is asked for again.

    The long run asks for 10^5.
    """
    async with null_server(serve) as server:

        async def ask(number: int) -> None:
            schema = {
                "type": "object",
                "properties": {f"p{number}": {"type": "integer"}},
                "required": [f"p{number}"],
            }
            status, answer = await server.post(COMPLETIONS, {**completion(json=schema), "max_tokens": 2})
            assert status == 200, answer

        async def flood(turn: int) -> int:
            for start in range(turn * 400, (turn + 1) * 400, 50):
                await asyncio.gather(*(ask(number) for number in range(start, start + 50)))
            return psutil.Process().memory_info().rss

        await flood(0)
        before = await flood(1)
        after = [await flood(turn) for turn in range(2, rounds)][-1]
        assert after - before < 32 << 20
        counts = await grammar_counts(server)
        none = dict.fromkeys(("hit", "joined", "refused", "busy", "failed"), 0)
        assert counts == {"miss": 400 * rounds, "kept": 256, **none}
        await ask(400 * rounds - 1)
        assert await grammar_counts(server) == counts | {"hit": 1}
