"""Random schemas of keywords that the grammar engine does not know and that are said in others: what is valid is
allowed, and nothing else.

Schemas and instances are of a few names and values, so that half of what is tried is valid.
"""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from oneloop_core import GrammarCompiler, GrammarError, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

END = 256
NUM_SCHEMAS = 20_000 if os.environ.get("ONELOOP_FUZZ") == "long" else 500
NUM_INSTANCES = 25
NAMES = ["a", "b", "kind"]
TEXTS = ["x", "y", "xy", "", 'q"\n']
NUMBERS = [0, 1, 2, 5, 0.5, -1]
TYPES = ["null", "boolean", "number", "string", "array", "object"]


class Maker:
    """Makes schemas and instances."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, given: list[Any]) -> Any:
        return self.random.choice(given)

    def value(self, depth: int = 0) -> Any:
        kind = self.random.randrange(4 if depth > 2 else 9)
        if kind == 0:
            return self.pick([None, True, False])
        if kind == 1:
            return self.pick(NUMBERS)
        if kind < 4:
            return self.pick(TEXTS)
        if kind < 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        names = self.random.sample([*NAMES, "other"], self.random.randrange(4))
        return {name: self.value(depth + 1) for name in names}

    def plain(self, depth: int) -> Any:
        """Of keywords that the engine knows."""
        if self.often(0.1):
            return self.pick([True, False, {}])
        if depth > 2 or self.often(0.35):
            values = [self.value(2) for _ in range(self.random.randrange(1, 3))]
            return self.pick(
                [
                    {"const": values[0]},
                    {"enum": [self.pick(TEXTS), self.pick(TEXTS)]},
                    {"enum": values},
                    {"type": self.pick(TYPES)},
                    {"type": self.random.sample(TYPES, 3)},
                    {"minimum": self.pick(NUMBERS)},
                    {"type": "number", "exclusiveMaximum": self.pick([0, 1, 2])},
                    {"minLength": 1},
                    {"type": "string", "maxLength": 1},
                    {"type": "string", "pattern": self.pick(["^x", "y$"])},
                ]
            )
        if self.often(0.3):
            schema: dict[str, Any] = {"type": "array", "maxItems": self.random.randrange(1, 4)}
            if self.often(0.6):
                schema["items"] = self.schema(depth + 1)
            if self.often(0.3):
                schema["prefixItems"] = [self.schema(depth + 1)]
            if self.often(0.3):
                schema["minItems"] = 1
            return schema
        schema = {"type": "object"} if self.often(0.5) else {}
        names = self.random.sample(NAMES, self.random.randrange(1, 3))
        schema["properties"] = {name: self.schema(depth + 1) for name in names}
        if self.often(0.4):
            schema["required"] = self.random.sample(NAMES, 1)
        if self.often(0.2):
            schema["patternProperties"] = {self.pick(["^(a|other)$", "^[ab]?$"]): self.schema(depth + 1)}
        if self.often(0.2):
            schema["additionalProperties"] = False
        return schema

    def schema(self, depth: int = 0) -> Any:
        if depth > 3 or self.often(0.45):
            return self.plain(depth)
        schema = self.plain(depth) if self.often(0.6) else {}
        schema = dict(schema) if isinstance(schema, dict) else {}
        self.pick(
            [
                self.negation, self.condition, self.conditions, self.dependencies, self.names, self.contained,
                self.unique, self.exclusive, self.unevaluated, self.unevaluated_items,
            ]
        )(schema, depth + 1)  # fmt: skip
        return schema

    def negation(self, schema: dict[str, Any], depth: int) -> None:
        schema["not"] = self.schema(depth)

    def condition(self, schema: dict[str, Any], depth: int) -> None:
        schema["if"] = self.schema(depth)
        for name in self.random.sample(["then", "else"], self.random.randrange(1, 3)):
            schema[name] = self.schema(depth)

    def conditions(self, schema: dict[str, Any], depth: int) -> None:
        required = {"required": ["kind"]} if self.often(0.5) else {}
        kinds = [{"const": "x"}, {"enum": ["y", "x"]}, {"const": "xy"}, {"const": 1}]
        schema["allOf"] = [
            {"if": {"properties": {"kind": self.pick(kinds)}, **required}, "then": self.schema(depth)}
            for _ in range(self.random.randrange(2, 4))
        ]

    def dependencies(self, schema: dict[str, Any], depth: int) -> None:
        first, second = self.random.sample(NAMES, 2)
        if self.often(0.5):
            schema["dependentRequired"] = {first: [second]}
        else:
            schema["dependentSchemas"] = {first: self.schema(depth)}

    def names(self, schema: dict[str, Any], _: int) -> None:
        schema["propertyNames"] = self.pick(
            [
                {"enum": ["a", "kind"]},
                {"const": "b"},
                {"pattern": "^[ab]"},
                {"maxLength": 1},
                {"not": {"enum": ["a"]}},
                False,
            ]
        )

    def contained(self, schema: dict[str, Any], depth: int) -> None:
        schema["contains"] = self.schema(depth)
        if self.often(0.5):
            schema["maxItems"] = self.random.randrange(1, 4)
        if self.often(0.3):
            schema["minContains"] = self.random.randrange(3)
        if self.often(0.3):
            schema["maxContains"] = self.random.randrange(1, 3)

    def unique(self, schema: dict[str, Any], _: int) -> None:
        schema["uniqueItems"] = True
        schema["items"] = {"enum": self.random.sample([*TEXTS, 1, None], 3)}
        schema.pop("prefixItems", None)

    def exclusive(self, schema: dict[str, Any], depth: int) -> None:
        schema["oneOf"] = [self.schema(depth) for _ in range(self.random.randrange(2, 4))]

    def unevaluated(self, schema: dict[str, Any], depth: int) -> None:
        schema["unevaluatedProperties"] = self.pick([False, False, {"type": "string"}])
        branches = [self.plain(1) for _ in range(2)]
        schema[self.pick(["allOf", "anyOf", "oneOf"])] = branches
        if self.often(0.3):
            schema["if"], schema["then"] = self.plain(1), self.plain(1)
        if self.often(0.2):
            schema["dependentSchemas"] = {"a": self.plain(depth)}

    def unevaluated_items(self, schema: dict[str, Any], depth: int) -> None:
        schema["unevaluatedItems"] = self.pick([False, {"type": "string"}])
        branches = [{"prefixItems": [self.plain(depth)] * count} for count in (1, 2)]
        schema[self.pick(["allOf", "anyOf"])] = branches


ONE = {"contains": {"const": 1}}
CONTAINED = [
    (ONE, [*[0] * 31, 1], True),
    (ONE, [*[0] * 31, 1, *[0] * 50, 1], True),
    (ONE, [0] * 40, False),
    (ONE | {"minContains": 2}, [1, 0, 0, 0, 0, 1, *[0] * 40], True),
    (ONE | {"minContains": 2}, [1, *[0] * 40], False),
    (ONE | {"minContains": 6, "maxItems": 50}, [*[1] * 6, *[0] * 44], True),
    (ONE | {"maxContains": 1}, [0, 0, 0, 0, 0, 1, *[0] * 40], True),
    (ONE | {"maxContains": 1}, [1, *[0] * 40, 1], False),
    (ONE | {"minContains": 0, "maxContains": 0}, [0] * 40, True),
    (ONE | {"minContains": 0, "maxContains": 0}, [*[0] * 40, 1], False),
    (ONE | {"minContains": 0, "maxContains": 1}, [*[0] * 40], True),
]


@pytest.mark.parametrize(("schema", "instance", "is_valid"), CONTAINED, ids=range(len(CONTAINED)))
def test_long_lists_contain(
    in_some_order: Callable[..., str | None], schema: dict[str, Any], instance: list[int], is_valid: bool
) -> None:
    assert jsonschema.Draft202012Validator(schema).is_valid(instance) is is_valid
    grammar = new_compiler().compile("json_schema", json.dumps(schema))
    assert (in_some_order(grammar.matcher(), instance, (",", ":"), schema) is not None) is is_valid


@pytest.mark.parametrize(
    ("schema", "instance"),
    [(ONE, [*[0] * 32, 1]), (ONE | {"minContains": 2}, [1, *[0] * 5, 1])],
    ids=["one", "two"],
)
def test_what_must_be_contained_is_not_left_to_a_lists_end(
    in_some_order: Callable[..., str | None], schema: dict[str, Any], instance: list[int]
) -> None:
    """Though it would be valid there: see docs/structured-output.md."""
    assert jsonschema.Draft202012Validator(schema).is_valid(instance)
    grammar = new_compiler().compile("json_schema", json.dumps(schema))
    assert in_some_order(grammar.matcher(), instance, (",", ":"), schema) is None


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary([bytes([value]) for value in range(256)] + [b"</s>"], [END]), [END])


def test_what_is_said_otherwise_is_the_same(in_some_order: Callable[..., str | None]) -> None:
    compiler = new_compiler()
    counts = {(kept, valid): 0 for kept in (True, False) for valid in (True, False)}
    for seed in range(NUM_SCHEMAS):
        maker = Maker(seed)
        schema = maker.schema()
        validator = jsonschema.Draft202012Validator(schema)
        instances = [maker.value() for _ in range(NUM_INSTANCES)]
        try:
            grammar = compiler.compile("json_schema", json.dumps(schema))
        except GrammarError:
            counts[False, any(map(validator.is_valid, instances))] += 1
            continue
        for instance in instances:
            text = in_some_order(grammar.matcher(), instance, (",", ":"), schema)
            is_valid = validator.is_valid(instance)
            counts[True, is_valid] += 1
            assert (text is not None) == is_valid, (
                f"seed {seed}: {json.dumps(schema)}: {json.dumps(instance)} is {'' if is_valid else 'not '}valid"
            )
    # What nothing is valid by is refused as well.
    assert counts[False, True] < NUM_SCHEMAS / 3, counts
    assert min(counts[True, True], counts[True, False]) > NUM_SCHEMAS, counts
