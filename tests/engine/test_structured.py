"""Structured output from SamplingParams to the tokens, and the cache of compiled grammars."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import psutil
import pytest

from oneloop import AsyncEngine, SamplingParams, StructuredOutputsParams
from oneloop.config import EngineConfig
from oneloop.engine.grammars import MAX_WAITING, Grammars
from oneloop.engine.structured import GrammarSpec
from oneloop.errors import OverloadedError, RequestError
from oneloop.executor.null import NullExecutor
from oneloop_core import GrammarBusyError, Vocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from oneloop_core import Grammar

END = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", source=pattern)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary([bytes([value]) for value in range(256)] + [b"</s>"], [END])


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig.from_flat({"executor": "null", "max_num_seqs": 8, "max_num_batched_tokens": 64})
    async with AsyncEngine(config, executor=NullExecutor(config)) as engine:
        yield engine


async def answers(
    engine: AsyncEngine, asked: StructuredOutputsParams, **settings: object
) -> list[tuple[str, str]]:
    """(text, finish reason) of each sequence."""
    params = SamplingParams(**{"max_tokens": 200, "structured_outputs": asked, **settings})
    outputs = [output async for output in engine.generate("prompt", params)]
    return [(one.text, str(one.finish_reason)) for one in outputs[-1].outputs]


async def test_answers_have_the_form(engine: AsyncEngine) -> None:
    for text, reason in await answers(engine, StructuredOutputsParams(regex=r"[ab]{3}-\d{2}"), n=3):
        assert (reason, bool(re.fullmatch(r"[ab]{3}-\d{2}", text))) == ("stop", True), text
    for text, reason in await answers(engine, StructuredOutputsParams(choice=["yes", "no", "maybe so"])):
        assert (reason, text in ("yes", "no", "maybe so")) == ("stop", True), text
    compact = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    for text, reason in await answers(engine, compact, n=2):
        assert reason == "stop"
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert 0 <= value["age"] <= 99
        assert json.dumps(value, separators=(",", ":")) == text


async def test_refusals_name_the_field_and_hurt_nobody(engine: AsyncEngine) -> None:
    running = asyncio.create_task(answers(engine, StructuredOutputsParams(regex="a{60}")))
    for asked, field in [
        (StructuredOutputsParams(json={"not": {}}), "structured_outputs.json"),
        (StructuredOutputsParams(json='{"type": "string", "pattern": "^(go$"}'), "structured_outputs.json"),
        (StructuredOutputsParams(regex="(?=a)"), "structured_outputs.regex"),
        (StructuredOutputsParams(grammar="nothing"), "structured_outputs.grammar"),
        (StructuredOutputsParams(), "structured_outputs"),
        (StructuredOutputsParams(regex="a", choice=["a"]), "structured_outputs"),
        ({"regex": "a"}, "structured_outputs"),
    ]:
        with pytest.raises(RequestError) as refused:
            await answers(engine, asked)
        assert refused.value.field == field
    assert await running == [("a" * 60, "stop")]
    assert engine.metrics.rejected["invalid"] == 7


def told(grammars: Grammars) -> dict[str, int]:
    """What became of the grammars, without what became of none."""
    return {result: count for result, count in grammars.metrics.requests.items() if count}


async def test_each_grammar_is_compiled_once(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary, [END])
    first, second = await asyncio.gather(grammars.get(regex("a+")), grammars.get(regex("a+")))
    assert first is second
    assert await grammars.get(regex("a+")) is first
    assert told(grammars) == {"hit": 1, "miss": 1, "joined": 1}
    for _ in range(2):  # Refusals are not kept.
        with pytest.raises(RequestError, match="structured_outputs: a \\("):
            await grammars.get(regex("("))
    assert told(grammars) == {"hit": 1, "miss": 3, "joined": 1, "refused": 2}


async def test_the_least_recently_used_goes_first(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary, [END], max_entries=2)
    kept = await grammars.get(regex("a"))
    await grammars.get(regex("b"))
    assert await grammars.get(regex("a")) is kept
    await grammars.get(regex("c"))
    assert await grammars.get(regex("a")) is kept
    assert (grammars.metrics.requests["miss"], grammars.metrics.num_entries) == (3, 2)
    await grammars.get(regex("b"))
    assert grammars.metrics.requests["miss"] == 4
    by_size = Grammars(vocabulary, [END], max_bytes=10)
    await by_size.get(regex("a" * 6))
    await by_size.get(regex("b" * 6))
    assert (by_size.metrics.num_entries, by_size.metrics.num_bytes) == (1, 6)
    await by_size.get(regex("c" * 11))
    assert (by_size.metrics.num_entries, by_size.metrics.num_bytes) == (0, 0)


async def test_who_leaves_takes_nothing_from_others(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary, [END])
    leaving = asyncio.create_task(grammars.get(regex("a{3}")))
    staying = asyncio.create_task(grammars.get(regex("a{3}")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).matcher().accept(list(b"aaa")) == 3
    assert grammars.metrics.requests["miss"] == 1


async def test_what_waits_is_bounded(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary, [END])
    asked = [grammars.get(regex(f"a{{{count}}}")) for count in range(1, MAX_WAITING + 10)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(result, OverloadedError) for result in results) == 9
    assert sum(isinstance(result, BaseException) for result in results) == 9
    assert told(grammars) == {"miss": MAX_WAITING, "busy": 9}


@pytest.mark.parametrize(
    ("error", "result", "seen"),
    [
        (GrammarBusyError("later"), "busy", OverloadedError),
        (RuntimeError("broken"), "failed", RuntimeError),
    ],
)
async def test_what_is_no_refusal(
    vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    result: str,
    seen: type[Exception],
) -> None:
    """The compiler had no room, or broke: neither says anything of the grammar."""

    def compile_nothing(*_: object) -> None:
        raise error

    monkeypatch.setattr("oneloop.engine.grammars._compile", compile_nothing)
    grammars = Grammars(vocabulary, [END])
    with pytest.raises(seen):
        await grammars.get(regex("a"))
    assert told(grammars) == {"miss": 1, result: 1}


async def test_what_was_not_looked_at_may_be_asked_again(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While too many compilations run on, others are not to blame."""
    grammars = Grammars(vocabulary, [END])

    def compile_none(compiler: object, spec: GrammarSpec) -> Grammar:
        raise GrammarBusyError("too many grammars are being compiled")

    with monkeypatch.context() as patch:
        patch.setattr("oneloop.engine.grammars._compile", compile_none)
        with pytest.raises(OverloadedError, match="too many grammars"):
            await grammars.get(regex("a"))
    assert (await grammars.get(regex("a"))).matcher().accept(list(b"a")) == 1


async def test_a_flood_of_grammars_settles(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary, [END])

    async def flood(first: int) -> int:
        """Compile 1,000 different schemas, 50 at a time; the resident memory then, in bytes."""
        for start in range(first, first + 1000, 50):
            specs = [
                GrammarSpec(
                    kind="json_schema", source=json.dumps({"properties": {f"p{i}": {"type": "string"}}})
                )
                for i in range(start, start + 50)
            ]
            await asyncio.gather(*(grammars.get(spec) for spec in specs))
        return psutil.Process().memory_info().rss

    await flood(0)
    before = await flood(1000)
    after = await flood(2000)
    assert after - before < 16 << 20
    assert grammars.metrics.num_entries <= 256
    assert grammars.metrics.requests["miss"] == 3000
