"""`oneloop bench latency`: one batch, again and again; seconds from handing it over to its last token."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from oneloop.cli.arguments import add_engine_options
from oneloop_bench.commands.values import count, whole_number

if TYPE_CHECKING:
    import argparse

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See main."""
    from oneloop_bench.commands.offline import add_offline_options

    parser.add_argument("--input-len", type=count, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-len", type=count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--num-iters-warmup", type=whole_number, default=3, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--num-iters", type=count, default=10, metavar="N", help="default: %(default)s")
    add_offline_options(parser)
    add_engine_options(parser, model_positional=True)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises OneloopError."""
    from oneloop import SamplingParams
    from oneloop_bench.commands import offline

    params = SamplingParams(
        temperature=options.temperature,
        max_tokens=options.output_len,
        ignore_eos=True,
        detokenize=not options.disable_detokenize,
    )
    rng = np.random.default_rng(vars(options).get("seed") or 0)
    seconds = []
    with offline.open_model(options) as llm:
        source = offline.ordinary_ids(llm)
        for number in range(-options.num_iters_warmup, options.num_iters):
            # Other prompts each time: what is measured includes their prefill.
            prompts = [source.draw(rng, options.input_len) for _ in range(options.batch_size)]
            begin = time.perf_counter()
            offline.generate(llm, prompts, [params] * options.batch_size, shows_progress=False)
            if number >= 0:
                seconds.append(time.perf_counter() - begin)
    percentiles = {str(p): float(np.percentile(seconds, p)) for p in PERCENTILES}
    result = {
        "avg_latency": float(np.mean(seconds)),
        "latencies": seconds,
        "percentiles": percentiles,
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_len": options.output_len,
    }
    print(f"Avg latency: {result['avg_latency']:.4f} s")
    for percentile, value in percentiles.items():
        print(f"{percentile}% percentile latency: {value:.4f} s")
    offline.finish(options, result)
    return 0
