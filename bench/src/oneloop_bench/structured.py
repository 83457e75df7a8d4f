"""What structured output costs: 64 requests with a JSON schema at once beside the same 64 in free text.

`python -m oneloop_bench.structured [--pairs N --step-ms F --only null|cpu …]` first times grammars alone
(oneloop_bench.micro.grammars), then drives the engine in this process over the null executor, whose steps take a
device's time, and over the embedded model on the CPU. Rounds come in pairs, one of each kind, the order changing from
pair to pair, so that what else the machine does falls on both. In a pair every free text has the prompt, the seed and
the length of the answer that its schema gave, so that both kinds' steps have the same rows. A pair gives a ratio of
tokens per second; the result is the pairs' median and an interval that it lies in (95 %, bootstrap over the pairs).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop import AsyncEngine, SamplingParams, StructuredOutputsParams
from oneloop.config import EngineConfig
from oneloop.engine.event_loop import turn_loop
from oneloop.engine.interpreter import settle_interpreter
from oneloop.engine.loop_times import LoopTimes
from oneloop_bench.micro.grammars import measure_all
from oneloop_bench.report import print_result
from oneloop_bench.schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_RATIO = 0.95
"""Of the tokens per second with schemas to those without."""
NUM_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of one round, all at once."""

    num_requests: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """lengths: tokens of each answer. seconds: from the first request to the last answer's end. cpu_s: its CPU time."""

    lengths: list[int]
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.lengths) / self.seconds


async def _answer(engine: AsyncEngine, number: int, params: SamplingParams) -> int:
    """Tokens of one streamed answer."""
    async with await engine.submit(f"Record {number}, as JSON:", params) as stream:
        return sum([len(delta.token_ids) async for deltas in stream for delta in deltas])


async def run_round(engine: AsyncEngine, mix: Mix, lengths: Sequence[int] | None) -> Round:
    """All requests of the mix; lengths: of the free texts, None: with schemas, which end the answers."""
    schemas = [StructuredOutputsParams(json=schema) for schema in SCHEMAS.values()]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=lengths[number] if lengths else mix.max_tokens,
            ignore_eos=lengths is not None,
            structured_outputs=None if lengths else schemas[number % len(schemas)],
        )
        for number in range(mix.num_requests)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(_answer(engine, number, one) for number, one in enumerate(params)))
    return Round(counts, time.perf_counter() - began, time.process_time() - cpu)


async def run_pairs(engine: AsyncEngine, mix: Mix, num_pairs: int) -> list[tuple[Round, Round]]:
    """(with schemas, free), after a pair that is thrown away: grammars are compiled, lengths are known."""
    lengths = (await run_round(engine, mix, None)).lengths
    await run_round(engine, mix, lengths)
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            free = await run_round(engine, mix, lengths)
            formed = await run_round(engine, mix, None)
        else:
            formed = await run_round(engine, mix, None)
            free = await run_round(engine, mix, formed.lengths)
        lengths = formed.lengths
        pairs.append((formed, free))
    return pairs


def compare(pairs: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    """Tokens per second of both kinds, the pairs' ratio with its interval, and CPU µs per token of both."""
    ratios = np.array([formed.rate / free.rate for formed, free in pairs])
    draws = np.random.default_rng(0).choice(ratios, (NUM_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    kinds = dict(zip(("schemas", "free"), zip(*pairs, strict=True), strict=True))
    rates = {kind: float(np.median([one.rate for one in rounds])) for kind, rounds in kinds.items()}
    cpu = {
        kind: sum(one.cpu_s for one in rounds) / sum(sum(one.lengths) for one in rounds)
        for kind, rounds in kinds.items()
    }
    return {
        "num_pairs": len(pairs),
        "tokens_per_round": sum(pairs[-1][0].lengths),
        **{f"{kind}_tokens_per_s": round(rate, 1) for kind, rate in rates.items()},
        **{f"{kind}_cpu_us_per_token": round(value * 1e6, 1) for kind, value in cpu.items()},
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
    }


async def measure(settings: dict[str, Any], mix: Mix, num_pairs: int) -> dict[str, Any]:
    """Figures of one engine; settings: as EngineConfig.from_flat takes them."""
    config = EngineConfig.from_flat({"max_num_seqs": mix.num_requests, **settings})
    async with AsyncEngine(config) as engine:
        settle_interpreter()
        return compare(await run_pairs(engine, mix, num_pairs))


def engines(options: argparse.Namespace) -> dict[str, tuple[dict[str, Any], Mix, int]]:
    """Name → settings, mix and pairs of each engine that was asked for."""
    null = {
        "model": "smollm2",
        "executor": "null",
        "null_step_ms": options.step_ms,
        "max_num_batched_tokens": 2048,
    }
    cpu = {"model": "smollm2", "device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 30}
    known = {
        "null": (null, Mix(options.requests, options.null_tokens), options.pairs),
        "cpu": (cpu, Mix(options.requests, options.cpu_tokens), options.cpu_pairs),
    }
    return {name: known[name] for name in options.only or known}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64, help="at once")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step of the null executor takes")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--cpu-pairs", type=int, default=9)
    parser.add_argument("--null-tokens", type=int, default=256, help="max_tokens over the null executor")
    parser.add_argument("--cpu-tokens", type=int, default=32, help="max_tokens of the embedded model")
    parser.add_argument("--only", action="append", choices=["null", "cpu"], help="this engine alone")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the figures; exit code 1 where a whole interval is beyond the limit."""
    options = read_options()
    result: dict[str, Any] = {"grammars": measure_all(), "step_ms": options.step_ms}
    for name, (settings, mix, num_pairs) in engines(options).items():
        with asyncio.Runner(loop_factory=turn_loop(LoopTimes())) as runner:
            result[name] = runner.run(measure(settings, mix, num_pairs))
        print(f"{name}: {json.dumps(result[name])}", flush=True)
    print_result(result)
    sys.exit(any(result[name]["interval"][1] < MIN_RATIO for name in engines(options)))


if __name__ == "__main__":
    main()
