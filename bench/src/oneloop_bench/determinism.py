"""What the deterministic mode costs, and how far the default mode's tokens agree between batch sizes.

    python -m oneloop_bench.determinism MODEL_DIR [--batch 1,32,256] [--context 1024] [--steps 40] [--prefill]
    python -m oneloop_bench.determinism MODEL_DIR --agreement 64 [--batch 1,8,64] [--tokens 64]

The first takes decode steps of either kind in one engine, and with --prefill steps full of prompts. The second gives
every prompt (random tokens, half of them behind a common prefix) alone and in batches, with both kinds: how many
answers are as they are alone, and after how many tokens the others part. Dummy weights, or with --settings
'{"load_format": "auto"}' a real checkpoint's.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop.config import EngineConfig
from oneloop.engine.offline import LLM
from oneloop.engine.params import SamplingParams
from oneloop_bench.gpu_step import Stepper
from oneloop_bench.kernels.timing import device_machine
from oneloop_bench.report import run_bench, save_result

if TYPE_CHECKING:
    from collections.abc import Sequence

_WARM_STEPS = 12
_SETTINGS = {
    "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 8192,
    "deterministic_requests": True,
}  # fmt: skip
_KINDS = {"default": False, "deterministic": True}


def step_ms(stepper: Stepper, batch: int, context: int, num_steps: int, *, deterministic: bool) -> float:
    """Median milliseconds of a decode step of so many rows, whose contexts begin with `context` tokens."""
    stepper.submit(batch, context, num_steps + 2 * _WARM_STEPS + batch, deterministic=deterministic)
    while stepper.core.stats().num_waiting or stepper.core.stats().num_running < batch:
        stepper.step()
    times = _timed_steps(stepper, num_steps)
    for handle in stepper.handles:
        stepper.core.abort(handle)
    stepper.finish()
    return statistics.median(times)


def prefill_ms(stepper: Stepper, context: int, num_steps: int, *, deterministic: bool) -> float:
    """Median milliseconds of a step full of prompts of `context` tokens."""
    steps = num_steps + _WARM_STEPS + 4
    stepper.submit(steps * stepper.step_tokens // context + 1, context, 1, deterministic=deterministic)
    times = _timed_steps(stepper, num_steps)
    stepper.finish()
    return statistics.median(times)


def _timed_steps(stepper: Stepper, num_steps: int) -> list[float]:
    for _ in range(_WARM_STEPS):
        stepper.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        stepper.step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure_cost(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both kinds of steps, one after the other, by batch size."""
    settings = _SETTINGS | {"model": options.model} | json.loads(options.settings)
    stepper = Stepper(EngineConfig.from_flat(settings))
    results = []
    for batch in options.batch:
        ms = {
            name: step_ms(stepper, batch, options.context, options.steps, deterministic=kind)
            for name, kind in _KINDS.items()
        }
        results.append({"batch": batch, "context": options.context} | _compared(ms))
        print(results[-1], flush=True)
    if options.prefill:
        ms = {
            name: prefill_ms(stepper, options.context, options.steps, deterministic=kind)
            for name, kind in _KINDS.items()
        }
        results.append({"prefill": stepper.step_tokens, "context": options.context} | _compared(ms))
        print(results[-1], flush=True)
    stepper.executor.shutdown()
    return results


def _compared(ms: dict[str, float]) -> dict[str, float]:
    """speed: of the deterministic steps, as a part of the default ones'."""
    named = {f"{name}_ms": round(value, 4) for name, value in ms.items()}
    return named | {"speed": round(ms["default"] / ms["deterministic"], 3)}


def measure_agreement(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Answers in batches of each size against those given alone; of both kinds, where the settings allow the second."""
    settings = _SETTINGS | json.loads(options.settings) | {"enable_prefix_caching": False}
    results = []
    with LLM(options.model, **settings) as llm:
        prompts = random_prompts(options.agreement, options.context)
        for name, kind in _KINDS.items():
            if kind not in llm.config.worker.orders:
                continue
            params = SamplingParams(
                temperature=0.0, max_tokens=options.tokens, ignore_eos=True, deterministic=kind
            )
            alone = [answers(llm, [prompt], params)[0] for prompt in prompts]
            for batch in options.batch:
                mixed = [
                    tokens
                    for first in range(0, len(prompts), batch)
                    for tokens in answers(llm, prompts[first : first + batch], params)
                ]
                results.append({"mode": name, "batch": batch} | agreement(alone, mixed))
                print(results[-1], flush=True)
    return results


def random_prompts(count: int, context: int) -> list[list[int]]:
    """Of up to so many tokens; every second begins as the others do."""
    rng = np.random.default_rng(count)
    prefix = rng.integers(17, 250, context // 2).tolist()
    return [
        (prefix if number % 2 else []) + rng.integers(17, 250, int(rng.integers(1, context // 2))).tolist()
        for number in range(count)
    ]


def answers(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """Token ids of each prompt's answer."""
    given = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in given]


def agreement(alone: Sequence[list[int]], mixed: Sequence[list[int]]) -> dict[str, Any]:
    """equal: share of the answers; same_tokens: mean number of tokens up to where an answer that differs parts."""
    parted = [
        next(place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        for a, b in zip(alone, mixed, strict=True)
        if a != b
    ]
    return {
        "answers": len(alone),
        "equal": round(1 - len(parted) / len(alone), 4),
        "same_tokens": round(statistics.mean(parted), 1) if parted else None,
    }


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--batch", type=lambda text: [int(size) for size in text.split(",")], default=[1, 32, 256]
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill", action="store_true", help="also steps full of prompts")
    parser.add_argument("--agreement", type=int, metavar="PROMPTS", help="answers instead of times")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--settings", default="{}", help="more settings as JSON")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    options = read_options(arguments)
    measure = measure_cost if options.agreement is None else measure_agreement
    result = {
        "bench": "determinism", "model": Path(options.model).name, "results": measure(options),
        "utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "machine": device_machine(),
    }  # fmt: skip
    if options.json is not None:
        save_result(options.json, result)
    print(json.dumps(result))


if __name__ == "__main__":
    run_bench(main)
