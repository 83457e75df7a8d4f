"""What docs/structured-output.md says of sizes is true: at a limit grammars compile and answers come, beyond it they
are refused. The vocabulary has a token per byte."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from oneloop_core import Grammar, GrammarCompiler, GrammarError, Vocabulary

PAGE = (Path(__file__).parents[2] / "docs/structured-output.md").read_text()
TABLE = PAGE.split("## Limits", 1)[1].split("\n## ", 1)[0].replace(",", "")
END = 256


def documented(row: str) -> list[int]:
    """The numbers of a row, in order. row: how it begins."""
    line = next(line for line in TABLE.splitlines() if line.startswith(f"| {row}"))
    return [int(number) for number in re.findall(r"\b\d+\b", line.split("|")[2])]


SUBSCHEMAS, ENUM_VALUES, PROPERTIES = documented("subschemas")
[DEPTH] = documented("schemas within schemas")
COUNT = documented("counts")[0]
PATTERN_KIB, GROUPS = documented("one pattern")
RULES, BRACKETS, GBNF_BRACKETS = documented("a grammar in text")
[TAGS] = documented("tags")
[SOURCE_KIB] = documented("a schema pattern with what is around it")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary([bytes([value]) for value in range(256)] + [b"</s>"], [END]), [END])


def objects(**more: Any) -> Any:
    def make(count: int) -> str:
        names = [f"p{number}" for number in range(count)]
        properties = {name: {"type": "string"} for name in names}
        required = names if more.get("required") else []
        return json.dumps({"type": "object", **more, "properties": properties, "required": required})

    return make


def nested(count: int) -> str:
    """So many schemas, one within the other."""
    schema: Any = {"type": "string"}
    for _ in range(count - 1):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return json.dumps(schema)


def tags(count: int) -> str:
    structures = [
        {"begin": f"<{number}>", "schema": {"type": "object"}, "end": "</>"} for number in range(count)
    ]
    return json.dumps({"type": "structural_tag", "triggers": ["<"], "structures": structures})


def rule_list(rule: str, first: str) -> Any:
    """Rules that the first one lists."""

    def make(count: int) -> str:
        others = [rule.format(number) for number in range(count - 1)]
        return first + " | ".join(f"r{number}" for number in range(count - 1)) + "\n" + "\n".join(others)

    return make


LIMITS: dict[str, tuple[str, Any, int]] = {
    "properties": ("json_schema", objects(), PROPERTIES),
    "required properties": ("json_schema", objects(required=True), PROPERTIES),
    "properties and no others": ("json_schema", objects(additionalProperties=False), PROPERTIES),
    "subschemas": (
        "json_schema",
        lambda count: json.dumps({"type": "array", "prefixItems": [{"type": "string"}] * (count - 1)}),
        SUBSCHEMAS,
    ),
    "enum": ("json_schema", lambda count: json.dumps({"enum": list(range(count))}), ENUM_VALUES),
    "choices": ("choice", lambda count: [f"c{number}" for number in range(count)], ENUM_VALUES),
    "depth": ("json_schema", nested, DEPTH),
    "minItems": ("json_schema", lambda count: json.dumps({"type": "array", "minItems": count}), COUNT),
    "maxLength": ("json_schema", lambda count: json.dumps({"type": "string", "maxLength": count}), COUNT),
    "{n}": ("regex", lambda count: f"a{{{count}}}", COUNT),
    "pattern": ("regex", lambda count: "a" * count, PATTERN_KIB << 10),
    "groups": ("regex", lambda count: "(" * count + "a" + ")*" * count, GROUPS),
    "rules": ("grammar", rule_list('r{0}: "x{0}"', "start: "), RULES),
    "GBNF's rules": ("grammar", rule_list('r{0} ::= "x{0}" root?', "root ::= "), RULES),
    "brackets": ("grammar", lambda count: "start: " + "(" * count + '"a"' + ")" * count, BRACKETS),
    "optional brackets": ("grammar", lambda count: "start: " + "[" * count + '"a"' + "]" * count, BRACKETS),
    "GBNF's brackets": (
        "grammar",
        lambda count: "root ::= " + "(" * count + '"a"' + ")*" * count,
        GBNF_BRACKETS,
    ),
    "tags": ("structural_tag", tags, TAGS),
    "source": (
        "json_schema",
        lambda size: '{"type": "string", "description": "' + "x" * (size - 37) + '"}',
        SOURCE_KIB << 10,
    ),
}


def write(grammar: Grammar, rng: random.Random, num_tokens: int = 40) -> None:
    """The beginning of an answer, any."""
    matcher = grammar.matcher()
    for _ in range(num_tokens):
        mask = matcher.mask()
        matcher.advance(
            rng.choice([token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1])
        )
        if matcher.is_over():
            return


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_where_it_is_said_to_be(compiler: GrammarCompiler, name: str) -> None:
    kind, make, limit = LIMITS[name]
    grammar = compiler.compile(kind, make(limit))
    rng = random.Random(name)
    for _ in range(5):
        write(grammar, rng)
    with pytest.raises(GrammarError) as refused:
        compiler.compile(kind, make(limit + 1))
    assert len(str(refused.value)) < 1000
