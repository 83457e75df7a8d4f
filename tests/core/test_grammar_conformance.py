"""Schemas and instances that others wrote, held against our grammars: what is valid is allowed, and nothing else.

A schema may be refused up front. What is kept must allow every valid instance, token by token and byte by byte, in
compact and in ordinary spelling, and must stop every invalid one. Properties come in the schema's order, to which an
instance is brought first; 1.0 is spelled 1. Of a format's values those in rare spellings may be stopped, too.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.formats.gguf import read_gguf
from oneloop.loader.embedded import fetch_embedded
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop_core import GrammarCompiler, GrammarError, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oneloop_core import Grammar, GrammarMatcher

HERE = Path(__file__).parent
COMMITTED = HERE / "data"
"""A part of the test suite, with its licence, for where there is nothing else."""
SUITE = "json-schema-test-suite/tests/draft2020-12"
REAL = "real-schemas.jsonl"
STYLES = {"compact": (",", ":"), "ordinary": (", ", ": ")}

Case = tuple[str, Any, list[dict[str, Any]]]


def data_folder() -> Path:
    """ONELOOP_TEST_DATA, or ../shared/data beside the checkout, or the part that is committed."""
    given = os.environ.get("ONELOOP_TEST_DATA")
    beside = HERE.parents[1].parent / "shared/data"
    found = Path(given) if given else beside if (beside / SUITE).is_dir() else COMMITTED
    assert (found / SUITE).is_dir(), f"{found} holds no {SUITE}"
    return found


def suite(pattern: str) -> Iterator[Case]:
    for file in sorted((DATA / SUITE).glob(pattern)):
        if file.parent.name == SUITE.rpartition("/")[2] and file.stem == "format":
            continue  # It has formats say nothing. Here they do, as optional/format has it.
        for case in json.loads(file.read_text()):
            yield f"{file.stem}: {case['description']}", case["schema"], case["tests"]


def real_schemas() -> Iterator[Case]:
    for line in (DATA / REAL).read_text().splitlines():
        case = json.loads(line)
        yield case["name"], case["schema"], case["tests"]


DATA = data_folder()
GROUPS: dict[str, tuple[Callable[[], Iterator[Case]], float]] = {
    "JSON Schema Test Suite": (lambda: suite("*.json"), 0.6)
}
"""What there is of it → its cases, and the share of schemas that has to be kept: refusing is no way out."""
if (DATA / SUITE / "optional").is_dir():
    GROUPS["its optional parts"] = (lambda: suite("optional/**/*.json"), 0.45)
if (DATA / REAL).is_file():
    GROUPS["schemas as people write them"] = (real_schemas, 0.9)


class Judge:
    """Grammars over the bytes and over a model's tokens."""

    def __init__(self, in_some_order: Callable[..., str | None]) -> None:
        self.in_some_order = in_some_order
        pieces = [bytes([value]) for value in range(256)] + [b"</s>"]
        self.bytes = GrammarCompiler(Vocabulary(pieces, [256]), [256])
        self.tokenizer = gguf_tokenizer(read_gguf(fetch_embedded()).metadata)
        self.tokens = GrammarCompiler(self.tokenizer.vocabulary, self.tokenizer.eos_token_ids)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.reasons: list[str] = []

    def run(self, cases: Iterator[Case]) -> None:
        for name, schema, tests in cases:
            text = json.dumps(schema)
            try:
                grammars = self.bytes.compile("json_schema", text), self.tokens.compile("json_schema", text)
            except GrammarError as error:
                self.reasons.append(error.problem)
                self.counts["schemas refused"] += 1
                self.counts["instances of refused schemas"] += len(tests)
                continue
            self.counts["schemas kept"] += 1
            for test, style in itertools.product(tests, STYLES):
                is_allowed = self.allows(*grammars, plain(test["data"]), STYLES[style], schema)
                if is_allowed == test["valid"]:
                    self.counts["accepted" if is_allowed else "stopped"] += 1
                elif test["valid"] and is_of_format(schema):
                    self.counts["spellings of formats left out"] += 1
                else:
                    self.wrong.append(f"{name} ({style}): {text:.300} {json.dumps(test)[:300]}")

    def allows(
        self, over_bytes: Grammar, over_tokens: Grammar, value: Any, style: tuple[str, str], schema: Any
    ) -> bool:
        text = json.dumps(value, ensure_ascii=False, separators=style)
        found = self.is_allowed(over_bytes, over_tokens, text)
        if found:
            return True
        ordered = self.in_some_order(over_bytes.matcher(), value, style, schema)
        return ordered is not None and self.is_allowed(over_bytes, over_tokens, ordered)

    def is_allowed(self, over_bytes: Grammar, over_tokens: Grammar, text: str) -> bool:
        by_bytes = allows_all(over_bytes.matcher(), list(text.encode()))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        assert allows_all(over_tokens.matcher(), ids) == by_bytes, f"tokens and bytes differ: {text}"
        return by_bytes

    def report(self, capsys: pytest.CaptureFixture[str], what: str) -> None:
        counts = dict(sorted(self.counts.items())) | {"wrong": len(self.wrong)}
        with capsys.disabled():
            print(f"\n{what}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
        assert not self.wrong, "\n".join(self.wrong)
        assert all(self.reasons)


def is_of_format(schema: Any) -> bool:
    """Whether it says nothing but a format, of which rare spellings may be left out."""
    return isinstance(schema, dict) and schema.keys() == {"$schema", "format"}


def allows_all(matcher: GrammarMatcher, ids: list[int]) -> bool:
    return matcher.accept(ids) == len(ids) and matcher.may_end()


def plain(value: Any) -> Any:
    """1.0 is 1: JSON has one kind of number, and grammars spell it in one way."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


@pytest.fixture
def judge(in_some_order: Callable[..., str | None]) -> Judge:
    return Judge(in_some_order)


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_valid_and_nothing_else(group: str, judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    cases, share = GROUPS[group]
    judge.run(cases())
    judge.report(capsys, group)
    num_kept, num_refused = judge.counts["schemas kept"], judge.counts["schemas refused"]
    assert num_kept >= share * (num_kept + num_refused) > 0
