"""`oneloop bench throughput`: all prompts are handed over at once; how long until the last one is done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from oneloop.cli.arguments import add_engine_options
from oneloop_bench.commands.values import as_usage_error

if TYPE_CHECKING:
    import argparse

    from oneloop.engine.params import SamplingParams

DEFAULT_OUTPUT_LEN = 256
"""Of custom prompts that do not say."""
WARM_UP_PROMPTS, WARM_UP_LEN = 8, 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """See main."""
    from oneloop_bench.commands.offline import add_offline_options
    from oneloop_bench.commands.serve_options import add_lengths, add_workload

    add_workload(parser.add_argument_group("workload"), with_chats=False)
    add_lengths(parser.add_argument_group("lengths"), with_chats=False)
    add_offline_options(parser)
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_engine_options(parser, model_positional=True)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises UsageError, OneloopError."""
    from oneloop_bench.commands import offline
    from oneloop_bench.commands.workloads import read_workload

    with as_usage_error():
        workload = read_workload(options)
    rng = np.random.default_rng((vars(options).get("seed") or 0, 0))
    with offline.open_model(options) as llm:
        source = offline.ordinary_ids(llm)
        with as_usage_error():
            turns = [session.turns[0] for session in workload.sessions(options.num_prompts, source, rng)]
            if any(turn.messages is not None for turn in turns):
                raise ValueError("--dataset-path: conversations are for `bench serve`; give prompts")
        params = [_params(options, turn.output_len or DEFAULT_OUTPUT_LEN) for turn in turns]
        warm = [source.draw(rng, WARM_UP_LEN) for _ in range(WARM_UP_PROMPTS)]
        offline.generate(llm, warm, [_params(options, WARM_UP_LEN)] * len(warm), shows_progress=False)
        before = llm.stats().num_prompt_tokens
        begin = time.perf_counter()
        prompts = [turn.prompt for turn in turns]
        counts = offline.generate(llm, prompts, params, shows_progress=not options.disable_tqdm)
        elapsed = time.perf_counter() - begin
        num_prompt_tokens = llm.stats().num_prompt_tokens - before
    result = _result(elapsed, num_prompt_tokens, counts)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    offline.finish(options, {"dataset_name": options.dataset_name, **result})
    return 0


def _params(options: argparse.Namespace, max_tokens: int) -> SamplingParams:
    from oneloop.engine.params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=not options.disable_detokenize,
    )


def _result(elapsed: float, num_prompt_tokens: int, counts: list[int]) -> dict[str, float]:
    """Names as in `vllm bench throughput`, and the output's own."""
    total = num_prompt_tokens + sum(counts)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(counts),
        "total_num_tokens": total,
        "requests_per_second": len(counts) / elapsed,
        "tokens_per_second": total / elapsed,
        "total_prompt_tokens": num_prompt_tokens,
        "total_output_tokens": sum(counts),
        "output_tokens_per_second": sum(counts) / elapsed,
    }
