"""A fake device: paged KV, block tables and sampling in numpy, driven by nothing but the slab."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from oneloop_core import Core, CoreConfig, Delta, GrammarMatcher, SlabLayout, Vocabulary

DTYPES = {"i32": np.int32, "i64": np.int64, "f32": np.float32}
MAX_TRIES = 600
"""Pieces that are tried in the search for an order of the properties."""
WEIGHTS = (np.arange(1, 1 << 16, dtype=np.int64) * 40_503) % 65_521


class Slab:
    """One aligned allocation with a named view per field."""

    def __init__(self, layout: SlabLayout) -> None:
        raw = np.zeros(layout.num_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.buffer = raw[start : start + layout.num_bytes]
        self.fields = {
            f.name: self.buffer[f.offset : f.offset + f.length * np.dtype(DTYPES[f.dtype]).itemsize].view(
                DTYPES[f.dtype]
            )
            for f in layout.fields
        }
        self._header = layout.header

    def __getitem__(self, name: str) -> np.ndarray:
        return self.fields[name]

    def header(self, name: str) -> int:
        return int(self["header"][self._header[name]])


def next_token(context: np.ndarray, seed: int, vocab_size: int) -> int:
    """The "model": depends on every token of the context and its position, so that one wrong KV entry shows."""
    return int((np.dot(context.astype(np.int64) + 1, WEIGHTS[: len(context)]) + seed) % vocab_size)


class FakeDevice:
    """What a model runner keeps: block tables, the last-token table, KV (here the token itself), seeds."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        rows, blocks = config.max_num_seqs, -(-config.max_model_len // config.block_size)
        self.block_table = np.full((rows, blocks), -1, np.int32)
        self.last_token = np.full(rows, -1, np.int32)
        self.seed = np.zeros(rows, np.int64)
        self.kv = np.full((config.num_blocks, config.block_size), -1, np.int32)

    def run(self, slab: Slab) -> None:
        """One step in the order that docs/architecture.md fixes."""
        self._admit(slab)
        count = slab.header("num_block_deltas")
        slots, indices = slab["delta_slot"][:count], slab["delta_index"][:count]
        self.block_table[slots, indices] = slab["delta_block"][:count]
        for i in range(slab.header("num_forks")):
            src, dst, count = (int(slab[name][i]) for name in ("fork_src", "fork_dst", "fork_num_blocks"))
            self.block_table[dst, :count] = self.block_table[src, :count]
        count = slab.header("num_cow")
        self.kv[slab["cow_dst"][:count]] = self.kv[slab["cow_src"][:count]]
        self._forward(slab)
        self._sample(slab)

    def _admit(self, slab: Slab) -> None:
        for i in range(slab.header("num_admitted")):
            slot = int(slab["admitted_slot"][i])
            self.block_table[slot] = -1
            self.last_token[slot] = -1
            greedy = slab["admitted_temperature"][i] == 0
            self.seed[slot] = 0 if greedy else slab["admitted_seed"][i] % self.config.vocab_size

    def _forward(self, slab: Slab) -> None:
        starts = slab["query_start"]
        for row in range(slab.header("num_rows")):
            slot = int(slab["row_slot"][row])
            tokens = slab["token_ids"][starts[row] : starts[row + 1]]
            assert len(tokens) == slab["row_num_scheduled"][row]
            tokens = np.where(tokens < 0, self.last_token[slot], tokens)
            assert (tokens >= 0).all(), "a token that nobody has sampled"
            positions = slab["row_num_computed"][row] + np.arange(len(tokens))
            blocks = self.block_table[slot, positions // self.config.block_size]
            assert (blocks >= 0).all(), "a position without a block"
            self.kv[blocks, positions % self.config.block_size] = tokens

    def _sample(self, slab: Slab) -> None:
        num_rows = slab.header("num_rows")
        starts = slab["query_start"][: num_rows + 1]
        for i in range(slab.header("num_samples")):
            slot, index = int(slab["sample_slot"][i]), int(slab["sample_token_index"][i])
            row = int(np.searchsorted(starts, index, side="right")) - 1
            length = int(slab["row_num_computed"][row]) + index - int(starts[row]) + 1
            num_blocks = -(-length // self.config.block_size)
            context = self.kv[self.block_table[int(slab["row_slot"][row]), :num_blocks]].ravel()[:length]
            token = next_token(context, int(self.seed[slot]), self.config.vocab_size)
            slab["output_token"][i] = self.last_token[slot] = token
            slab["output_rank"][i] = 1 + token % 7
            columns = slice(21 * i, 21 * i + 21)
            slab["output_logprob_token"][columns] = [token, *range(20)]
            slab["output_logprob"][columns] = [-float(token), *(-0.5 * np.arange(20))]


@dataclass
class Output:
    """Everything one sequence has produced."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    last: Delta | None = None
    deltas: list[Delta] = field(default_factory=list)


class Harness:
    """A core, a fake device and a ring of slabs; `depth` steps in flight."""

    def __init__(self, *, depth: int = 2, vocabulary: Vocabulary | None = None, **config: object) -> None:
        options = {"num_blocks": 256, "max_num_seqs": 16, "vocab_size": 256, "max_model_len": 512} | config
        self.config = CoreConfig(max_steps_in_flight=depth, **options)
        self.core = Core(self.config, vocabulary)
        self.device = FakeDevice(self.config)
        self.ring = [Slab(self.core.layout) for _ in range(depth + 1)]
        self.in_flight: list[tuple[int, Slab]] = []
        self.outputs: dict[tuple[int, int], Output] = defaultdict(Output)
        self.num_scheduled = 0

    def launch(self) -> bool:
        slab = self.ring[self.num_scheduled % len(self.ring)]
        step = self.core.schedule(slab.buffer)
        self.core.audit()
        if step is None:
            return False
        self.num_scheduled += 1
        self.device.run(slab)
        self.in_flight.append((step, slab))
        return True

    def commit(self) -> list[Delta]:
        step, slab = self.in_flight.pop(0)
        deltas = list(self.core.commit(step, slab.buffer))
        self.core.audit()
        for delta in deltas:
            self.record(delta)
        return deltas

    def record(self, delta: Delta) -> None:
        output = self.outputs[delta.request, delta.index]
        assert output.finish_reason is None, "a delta after the last one"
        output.token_ids += delta.token_ids
        output.text += delta.text
        output.finish_reason = delta.finish_reason
        output.last = delta
        output.deltas.append(delta)

    def turn(self) -> None:
        """Launch as far ahead as the core allows, then commit the oldest step."""
        while self.launch():
            pass
        if self.in_flight:
            self.commit()

    def run(self, *, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if not self.core.has_work():
                return
            self.turn()
        raise AssertionError(f"not done after {max_turns} turns: {self.core.stats()!r}")

    def assert_empty(self) -> None:
        """All requests have ended and gave everything back."""
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks
        ended = stats.num_finished_stop + stats.num_finished_length + stats.num_aborted + stats.num_errored
        assert ended == stats.num_submitted


@pytest.fixture
def slab_type() -> type[Slab]:
    return Slab


@pytest.fixture
def make_harness() -> Callable[..., Harness]:
    return Harness


@pytest.fixture
def reference() -> Callable[..., list[int]]:
    """Greedy continuation of a prompt by the fake model, without any scheduler."""

    def generate(prompt: list[int], num_tokens: int, *, seed: int = 0, vocab_size: int = 256) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(next_token(np.array(tokens), seed, vocab_size))
        return tokens[len(prompt) :]

    return generate


def named_orders(schema: Any) -> list[dict[str, int]]:
    """For each `properties` in a schema the places of its names."""
    if isinstance(schema, list):
        return [found for each in schema for found in named_orders(each)]
    if not isinstance(schema, dict):
        return []
    names = schema.get("properties")
    own = [{name: place for place, name in enumerate(names)}] if isinstance(names, dict) else []
    return own + [found for each in schema.values() for found in named_orders(each)]


def ordered_text(matcher: GrammarMatcher, value: Any, style: tuple[str, str], schema: Any) -> str | None:
    """The value's text with its properties in an order that the grammar allows, if there is one.

    The first that is tried is that of the `properties` in the schema that name most of them, and others behind them.
    """
    comma, colon = style
    orders = [{}, *named_orders(schema)]
    # What is within a member seldom decides about those behind it: at first each has one spelling.
    tries, num_spellings = itertools.count(), 1

    def pushed(matcher: GrammarMatcher, text: str) -> GrammarMatcher | None:
        fork, ids = matcher.fork(), list(text.encode())
        return fork if next(tries) < MAX_TRIES and fork.accept(ids) == len(ids) else None

    def spelled(matcher: GrammarMatcher, value: Any) -> Iterator[tuple[GrammarMatcher, str]]:
        if isinstance(value, dict):
            order = max(orders, key=lambda order: len(order.keys() & value.keys()))
            names = sorted(value, key=lambda name: order.get(name, len(order)))
            yield from parts(
                matcher, "{", "}", tuple(names), lambda name: f"{json.dumps(name)}{colon}", value
            )
        elif isinstance(value, list):
            yield from parts(matcher, "[", "]", tuple(range(len(value))), None, value)
        else:
            text = json.dumps(value, ensure_ascii=False)
            if (after := pushed(matcher, text)) is not None:
                yield after, text

    def parts(
        matcher: GrammarMatcher,
        opening: str,
        closing: str,
        left: tuple[Any, ...],
        key: Callable[[str], str] | None,
        values: Any,
    ) -> Iterator[tuple[GrammarMatcher, str]]:
        if not left:
            if (after := pushed(matcher, opening + closing if opening in "{[" else closing)) is not None:
                yield after, opening + closing if opening in "{[" else closing
            return
        for name in left if key else left[:1]:
            before = opening + (key(name) if key else "")
            after = pushed(matcher, before)
            if after is None:
                continue
            for then, text in itertools.islice(spelled(after, values[name]), num_spellings):
                rest = tuple(other for other in left if other != name)
                if rest:
                    for end, tail in parts(then, comma, closing, rest, key, values):
                        yield end, before + text + tail
                elif (end_of_all := pushed(then, closing)) is not None:
                    yield end_of_all, before + text + closing

    found = next((text for end, text in spelled(matcher, value) if end.may_end()), None)
    if found is None:
        tries, num_spellings = itertools.count(), MAX_TRIES
        found = next((text for end, text in spelled(matcher, value) if end.may_end()), None)
    return found


@pytest.fixture
def in_some_order() -> Callable[..., str | None]:
    """`ordered_text`."""
    return ordered_text
