"""Grammars alone: ms to compile one, µs per row and step for its mask. `python -m oneloop_bench.micro.grammars`.

Each form has a text that keeps to it; the text's tokens are walked as a model would that writes it, and every step's
mask is made anew. The first walk finds the grammar cold, the last one warm.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from oneloop.formats.gguf import read_gguf
from oneloop.loader.embedded import fetch_embedded
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop_bench.report import print_result
from oneloop_bench.schemas import PERSON_SCHEMA, TREE_SCHEMA, WIDE_NAMES, WIDE_SCHEMA
from oneloop_core import BUILD_PROFILE, GrammarCompiler

if TYPE_CHECKING:
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Grammar

NUM_WALKS = 20
PERSON = {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "tags": ["poet", "engineer"]}
TREE = {
    "value": 1,
    "children": [{"value": 2.5, "children": []}, {"value": -3, "children": [{"value": 4, "children": []}]}],
}
FREE = {
    "title": "On the analytical engine, and what it weaves",
    "notes": [{"id": 1, "text": "algebraical patterns\n"}] * 4,
}
WIDE = {name: f"value {index}" for index, name in enumerate(WIDE_NAMES)}
CALL = '<tool_call>{"city": "Paris", "days": 3}</tool_call>'
TAG = {
    "type": "structural_tag",
    "triggers": ["<tool_call>"],
    "structures": [
        {
            "begin": "<tool_call>",
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
            "end": "</tool_call>",
        }
    ],
}
FORMS: dict[str, tuple[Any, Any, str]] = {
    "person": ("json_schema", json.dumps(PERSON_SCHEMA), json.dumps(PERSON)),
    "tree": ("json_schema", json.dumps(TREE_SCHEMA), json.dumps(TREE)),
    "wide": ("json_schema", json.dumps(WIDE_SCHEMA), json.dumps(WIDE)),
    "json_object": ("json_object", "", json.dumps(FREE)),
    "regex": ("regex", r"\d{4}-\d{2}-\d{2} [A-Za-z ,.]{1,200}", "2024-02-29 A day that is seldom, as days go."),
    "choice": ("choice", [f"class {index} of many" for index in range(200)], "class 137 of many"),
    "gbnf": ("grammar", 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"', "(12+34)*56-(7/(8+9))"),
    "structural_tag": ("structural_tag", json.dumps(TAG), f"I shall look that up. {CALL} Done."),
}  # fmt: skip


def walk(grammar: Grammar, token_ids: list[int]) -> list[float]:
    """µs of each step's mask, on the way along the tokens."""
    matcher, took = grammar.matcher(), []
    for token_id in token_ids:
        began = time.perf_counter()
        matcher.mask()
        took.append((time.perf_counter() - began) * 1e6)
        matcher.advance(token_id)
    assert matcher.may_end(), "the text does not keep to the grammar"
    return took


def measure(tokenizer: Tokenizer, compiler: GrammarCompiler, form: str) -> dict[str, float]:
    """One form's figures."""
    kind, source, text = FORMS[form]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    began = time.perf_counter()
    grammar = compiler.compile(kind, source)
    compiled = (time.perf_counter() - began) * 1e3
    walks = [walk(grammar, token_ids) for _ in range(NUM_WALKS)]
    later = sorted(us for one in walks[1:] for us in one)
    began = time.perf_counter()
    for _ in range(100):
        grammar.matcher()
    start = (time.perf_counter() - began) * 1e4
    return {
        "compile_ms": round(compiled, 2),
        "mask_us": round(statistics.fmean(later), 1),
        "mask_us_median": round(statistics.median(later), 1),
        "mask_us_p99": round(later[int(len(later) * 0.99)], 1),
        "first_walk_mask_us": round(statistics.fmean(walks[0]), 1),
        "start_us": round(start, 1),
    }


def measure_all() -> dict[str, Any]:
    """All figures, each form's printed as a line."""
    assert BUILD_PROFILE == "release", "the core is a debug build; run `make core`"
    tokenizer = gguf_tokenizer(read_gguf(fetch_embedded()).metadata)
    began = time.perf_counter()
    compiler = GrammarCompiler(tokenizer.vocabulary, tokenizer.eos_token_ids)
    made = (time.perf_counter() - began) * 1e3
    results = {form: measure(tokenizer, compiler, form) for form in FORMS}
    print(f"vocabulary: {tokenizer.vocab_size} tokens; compiler made in {made:.0f} ms")
    for form, figures in results.items():
        print(f"{form:16s}" + "  ".join(f"{name} {value:8.1f}" for name, value in figures.items()))
    return {"compiler_ms": round(made, 1), "vocab_size": tokenizer.vocab_size, "forms": results}


if __name__ == "__main__":
    print_result(measure_all())
