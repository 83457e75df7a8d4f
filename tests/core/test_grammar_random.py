"""Random schemas, and answers drawn at random as far as their grammars let them: each that ends is valid."""

from __future__ import annotations

import json
import math
import os
import random
from typing import TYPE_CHECKING, Any

import jsonschema

from oneloop_core import GrammarCompiler, GrammarError, Vocabulary

if TYPE_CHECKING:
    from oneloop_core import Grammar

END = 256
NUM_SCHEMAS = 20_000 if os.environ.get("ONELOOP_FUZZ") == "long" else 400
NUM_ANSWERS = 3
MAX_BYTES = 300
PATTERNS = [
    "^a+$",
    "b",
    "^[a-c]{2,4}$",
    r"^\d{3}-\w$",
    r"x|^y$",
    "^(foo|ba?r)*$",
    r"\.",
    "^[^\\s,]+$",
    '^[^"]*$',
    r"^(?:[^\\]|x)+$",
    "^$",
    ".",
    "q.z$",
]
KEYS = ["a", "b", "foo", "x y", 'q"t', "n\nl", "bar"]
NUMBERS = [0, 1, -1, 2, 5, 10, 100, -7, 0.5, -0.5, 1.5, 99.99, -3.25, 12, 1000]
CONSTANTS = [1, 2.5, "a", "b c", None, True, {"a": 1}, [1, 2], 'é"', -3, 0, {"k": [1]}, [], 0.1, "n\nl"]
# Fractions that binary numbers hold: the validator divides as they do.
MULTIPLES = [1, 2, 3, 7, 0.5, 0.25, 10]


class Maker:
    """Makes schemas of keywords that are kept, and some that are refused in this combination or that."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def schema(self, depth: int = 0) -> Any:
        simple = [self.string, self.number, self.constant, self.other]
        nested = [self.array, self.object, self.object, self.either, self.both, self.beside]
        return self.random.choice(simple if depth > 3 or self.often(0.35) else simple + nested)(depth + 1)

    def other(self, _: int) -> Any:
        return self.random.choice(
            [True, {}, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}]
        )

    def string(self, _: int) -> Any:
        if self.often(0.15):
            formats = [
                "date",
                "time",
                "date-time",
                "ipv4",
                "ipv6",
                "uuid",
                "email",
                "hostname",
                "uri",
                "duration",
            ]
            return {"type": "string", "format": self.random.choice(formats)}
        schema: dict[str, Any] = {"type": "string"}
        if self.often(0.4):
            schema["pattern"] = self.random.choice(PATTERNS)
        if self.often(0.3):
            schema["minLength"] = self.random.randrange(4)
        if self.often(0.3):
            schema["maxLength"] = self.random.randrange(2, 8)
        return schema

    def number(self, _: int) -> Any:
        schema: dict[str, Any] = {"type": self.random.choice(["integer", "number"])}
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.often(0.35):
                schema[name] = self.random.choice(NUMBERS)
        if self.often(0.25):
            schema["multipleOf"] = self.random.choice(MULTIPLES)
        return schema

    def constant(self, _: int) -> Any:
        values = [self.random.choice(CONSTANTS) for _ in range(self.random.randrange(1, 4))]
        return {"enum": values} if self.often(0.6) else {"const": values[0]}

    def array(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "array"}
        if self.often(0.7):
            schema["items"] = self.schema(depth)
        if self.often(0.3):
            schema["prefixItems"] = [self.schema(depth) for _ in range(self.random.randrange(1, 3))]
        if self.often(0.3):
            schema["minItems"] = self.random.randrange(3)
        if self.often(0.3):
            schema["maxItems"] = self.random.randrange(1, 4)
        return schema

    def object(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "object"} if self.often(0.85) else {}
        if self.often(0.85):
            names = self.random.sample(KEYS, self.random.randrange(1, 4))
            schema["properties"] = {name: self.schema(depth) for name in names}
        if self.often(0.5):
            schema["required"] = self.random.sample(KEYS, self.random.randrange(1, 3))
        if self.often(0.6):
            schema["additionalProperties"] = self.random.choice([False, False, True, self.schema(depth)])
        if self.often(0.2):
            pattern = self.random.choice(["^a", "^f", "o$", "^z+$"])
            schema["patternProperties"] = {pattern: self.schema(depth)}
        if self.often(0.12):
            schema["minProperties"] = self.random.randrange(3)
        if self.often(0.12):
            schema["maxProperties"] = self.random.randrange(1, 4)
        return dict(self.random.sample(list(schema.items()), len(schema)))

    def either(self, depth: int) -> Any:
        name = "anyOf" if self.often(0.8) else "oneOf"
        return {name: [self.schema(depth) for _ in range(self.random.randrange(1, 4))]}

    def both(self, depth: int) -> Any:
        return {"allOf": [self.schema(depth) for _ in range(self.random.randrange(1, 3))]}

    def beside(self, depth: int) -> Any:
        schema = self.schema(depth)
        return (
            {**schema, "anyOf": [self.schema(depth) for _ in range(2)]}
            if isinstance(schema, dict)
            else schema
        )


def drawn(grammar: Grammar, rng: random.Random) -> bytes | None:
    """An answer at random, or None where it gets long. GrammarError where the grammar leads into a dead end."""
    matcher, text = grammar.matcher(), bytearray()
    while len(text) < MAX_BYTES:
        if matcher.is_over():
            return bytes(text)
        mask = matcher.mask()
        allowed = [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return bytes(text)
        allowed = [token for token in allowed if token != END]
        closing = [token for token in allowed if token in b'"}],:']
        printable = [token for token in allowed if 32 < token < 127]
        if closing and (rng.random() < 0.35 or len(text) > MAX_BYTES // 2):
            token = rng.choice(closing)
        else:
            token = rng.choice(printable if printable and rng.random() < 0.8 else allowed)
        matcher.advance(token)
        text.append(token)
    return None


def is_valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def is_finite(value: Any) -> bool:
    """Whether the validator can count with it: JSON's numbers have no bounds, Python's do."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def test_what_ends_is_valid() -> None:
    compiler = GrammarCompiler(Vocabulary([bytes([value]) for value in range(256)] + [b"</s>"], [END]), [END])
    num_kept = num_ended = 0
    for seed in range(NUM_SCHEMAS):
        maker = Maker(seed)
        schema = maker.schema()
        try:
            grammar = compiler.compile("json_schema", json.dumps(schema))
        except GrammarError:
            continue
        num_kept += 1
        for _ in range(NUM_ANSWERS):
            text = drawn(grammar, maker.random)
            if text is None:
                continue
            value = json.loads(text)
            num_ended += 1
            if is_finite(value):
                assert is_valid(value, schema), f"seed {seed}: {json.dumps(schema)}: {text!r}"
    assert num_kept > NUM_SCHEMAS // 2
    assert num_ended > NUM_SCHEMAS
