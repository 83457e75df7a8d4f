"""The host's cost per token with steps that take no time: what a fast device would wait for.

`python -m oneloop_bench.host [offline|stream|http|http_fast|load|burst …]`. "offline" is LLM.generate, handed 2,000
prompts; "stream" is AsyncEngine with 512 requests at once, each read delta by delta; "http" the same through the
server, at a pace at which every token with text is a chunk; "http_fast" with steps that take no time, where chunks hold
several; "load" text prompts in a closed loop at the pace of a fast device; "burst" what a request costs the event loop
until its first token is sent. Those over HTTP are host_load.py's and host_burst.py's. All detokenise.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop import LLM, SamplingParams
from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.executor.base import ModelInfo
from oneloop.executor.null import NullExecutor, Pace, tokens_of_text
from oneloop_bench.load.prompts import named_tokenizer
from oneloop_bench.micro.core import TEXT
from oneloop_bench.report import print_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.engine.loop_times import LoopTimes
    from oneloop.tokenize.tokenizer import Tokenizer

MAX_NUM_SEQS = 512
NUM_PROMPTS = 2000
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 256
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
HTTP_STEP_MS = 20


class Clock:
    """Starts when made. CPU time is what counts: on a busy machine the wall clock also measures the others."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def per_token(self, num_tokens: int) -> dict[str, float]:
        """µs per token, of this process's CPU time and of the wall clock."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {
            "us_per_token": round(cpu / num_tokens * 1e6, 3),
            "wall_us_per_token": round(wall / num_tokens * 1e6, 3),
        }


def make_engine(
    tokenizer: Tokenizer,
    pace: Pace | None = None,
    *,
    max_num_batched_tokens: int = 8192,
    text: str = TEXT,
    loop_times: LoopTimes | None = None,
) -> AsyncEngine:
    """An engine over steps that cost nothing, with room for 512 sequences of the workload.

    pace: what a step takes; None: nothing. text: what the sequences "sample", each from a place of its own.
    """
    info = ModelInfo(
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=MAX_NUM_SEQS * 2 * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )
    settings = {
        "executor": "null",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    config = EngineConfig.from_flat(settings)
    draw = tokens_of_text(tokenizer.encode(text))
    executor = NullExecutor(config, info=info, draw=draw, pace=pace)
    return AsyncEngine(config, executor=executor, tokenizer=tokenizer, loop_times=loop_times)


def make_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Random ids."""
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = rng.integers(0, tokenizer.vocab_size, (count, PROMPT_TOKENS)).tolist()
    return prompts


def params() -> SamplingParams:
    """As the anchors' drivers ask."""
    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def measure_offline(tokenizer: Tokenizer) -> dict[str, float]:
    """µs per token of LLM.generate over 2,000 prompts."""
    prompts = make_prompts(tokenizer, NUM_PROMPTS)
    with LLM.over(make_engine(tokenizer)) as llm:
        llm.generate(prompts[:64], params(), use_tqdm=False)
        llm.reset_prefix_cache()
        clock = Clock()
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        times = clock.per_token(NUM_PROMPTS * OUTPUT_TOKENS)
    assert all(len(output.outputs[0].token_ids) == OUTPUT_TOKENS for output in outputs)
    return times


def measure_stream(tokenizer: Tokenizer) -> dict[str, float]:
    """µs per token of 512 streams at once, without HTTP."""
    return asyncio.run(_measure_stream(tokenizer))


async def _measure_stream(tokenizer: Tokenizer) -> dict[str, float]:
    prompts = make_prompts(tokenizer, MAX_NUM_SEQS)
    num_chunks = 0

    async def read(engine: AsyncEngine, prompt: list[int]) -> int:
        nonlocal num_chunks
        num_tokens = 0
        async with await engine.submit(prompt, params()) as stream:
            async for deltas in stream:
                num_chunks += 1
                for delta in deltas:
                    num_tokens += len(delta.token_ids)
        return num_tokens

    async with make_engine(tokenizer) as engine:
        await asyncio.gather(*(read(engine, prompt) for prompt in prompts[:32]))
        num_chunks = 0
        clock = Clock()
        counts = await asyncio.gather(*(read(engine, prompt) for prompt in prompts))
        times = clock.per_token(MAX_NUM_SEQS * OUTPUT_TOKENS)
    assert all(count == OUTPUT_TOKENS for count in counts)
    return {**times, "tokens_per_chunk": round(MAX_NUM_SEQS * OUTPUT_TOKENS / num_chunks, 2)}


def measure_http(_: Tokenizer) -> dict[str, Any]:
    """512 completions streamed at once, each token with text a chunk."""
    return _under_load("--requests", str(MAX_NUM_SEQS), "--token-ids", *_pace(HTTP_STEP_MS))


def measure_http_fast(_: Tokenizer) -> dict[str, Any]:
    """The same with a device that is faster than the host."""
    return _under_load("--requests", str(MAX_NUM_SEQS), "--token-ids", *_pace(0))


def measure_load(_: Tokenizer) -> dict[str, Any]:
    """2,048 text prompts, 512 at once, at the pace of a fast device."""
    return _under_load()


def measure_burst(_: Tokenizer) -> dict[str, Any]:
    """5,120 replies of one token, 512 at once, on new connections and on kept ones."""
    from oneloop_bench import host_burst, host_load

    return host_burst.measure(host_load.read_options(("--requests", "5120", "--output-tokens", "1")))


def _under_load(*options: str) -> dict[str, Any]:
    """µs of the server's CPU time per token, latencies, and its event loop's seconds by part."""
    from oneloop_bench import host_load

    return host_load.measure(host_load.read_options(options))


def _pace(step_ms: float) -> tuple[str, ...]:
    """Steps of the same length, whatever they hold."""
    return "--step-ms", str(step_ms), "--token-us", "0", "--row-us", "0"


def _shown(figures: dict[str, Any]) -> str:
    if "us_per_token" in figures:
        elapsed = figures["wall_us_per_token"]
        return f"{figures['us_per_token']:.2f} µs of CPU per token ({elapsed:.2f} elapsed)"
    new, kept = figures["new_connections"]["loop_us"], figures["kept_connections"]["loop_us"]
    return f"{new:.0f} µs of the loop's CPU per request on a new connection, {kept:.0f} on a kept one"


def main() -> None:
    """Print each figure, then the result."""
    measures: dict[str, Callable[[Tokenizer], dict[str, Any]]] = {
        "offline": measure_offline,
        "stream": measure_stream,
        "http": measure_http,
        "http_fast": measure_http_fast,
        "load": measure_load,
        "burst": measure_burst,
    }
    wanted = sys.argv[1:] or list(measures)
    try:
        tokenizer = named_tokenizer("smollm2")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    result: dict[str, Any] = {}
    for name in wanted:
        result[name] = measures[name](tokenizer)
        print(f"{name}: {_shown(result[name])}")
    print_result(result)


if __name__ == "__main__":
    main()
