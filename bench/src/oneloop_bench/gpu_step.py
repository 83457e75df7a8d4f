"""One step on the GPU, taken apart: its time, its kernels, and what the device waits for between two steps.

    python -m oneloop_bench.gpu_step MODEL_DIR [--batch 1,8,32] [--context 1024] [--eager]
        [--json FILE] [--picture FILE.svg]      what the host gap's table and picture are made of
    python -m oneloop_bench.gpu_step MODEL_DIR --prefill [--context 1024]     steps full of prompts of that length

Core and runner alone, without event loop and HTTP; dummy weights. Step times are taken without the profiler, kernels
and idle times from its trace after them (gaps.gap_summary says what they are). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oneloop.config import EngineConfig
from oneloop.engine.loop import NUM_SLABS
from oneloop.executor.cuda import CudaExecutor
from oneloop.start_times import StartTimes
from oneloop_bench.gap_picture import Trace, gap_picture
from oneloop_bench.gaps import borders, gap_summary, whole_steps
from oneloop_bench.kernels.timing import device_machine
from oneloop_bench.report import run_bench, save_result
from oneloop_core import Core, CoreConfig, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop_bench.gaps import Event

_WARM_STEPS = 12
"""Enough that the graphs of all slabs are captured, at their second use at the latest."""
_SETTLING_STEPS = 7
"""Traced steps that do not count (see gaps.whole_steps): each slab's graphs twice, and one."""
_TRACED_STEPS = 20


class Stepper:
    """A core and an executor, driven step by step with two in flight, as the engine's loop does."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = CudaExecutor(config, StartTimes())
        self.executor.locate()
        self.info = self.executor.start()
        resolved = config.resolved
        self.step_tokens = resolved.step_tokens
        self.core = Core(
            CoreConfig(
                num_blocks=self.info.num_blocks,
                block_size=self.info.block_size,
                max_num_seqs=resolved.max_num_seqs,
                max_num_batched_tokens=resolved.step_tokens,
                max_model_len=self.info.max_model_len,
                vocab_size=self.info.vocab_size,
                enable_prefix_caching=False,
            ),
            Vocabulary([b""] * self.info.vocab_size),
        )
        self.slabs = self.executor.attach(self.core.layout, NUM_SLABS, max_num_seqs=resolved.max_num_seqs)
        self._turn = 0
        self.handles: list[int] = []
        self._in_flight: list[tuple[int, int]] = []
        self.host_us: dict[str, list[float]] = defaultdict(list)

    def submit(
        self, num_requests: int, context: int, num_output: int, *, deterministic: bool = False
    ) -> None:
        """Greedy requests of random tokens that end by length alone."""
        self.handles = []
        rng = np.random.default_rng(num_requests)
        for _ in range(num_requests):
            prompt = rng.integers(17, self.info.vocab_size - 1000, context).tolist()
            self.handles.append(
                self.core.submit(
                    prompt,
                    max_tokens=num_output,
                    temperature=0.0,
                    ignore_eos=True,
                    detokenize=False,
                    deterministic=deterministic,
                )
            )

    def step(self) -> bool:
        """Launch until two steps are in flight, then take one. False when there is nothing more."""
        while len(self._in_flight) < 2:
            start = time.perf_counter()
            step_id = self.core.schedule(self.slabs[self._turn])
            if step_id is None:
                break
            scheduled = time.perf_counter()
            self.executor.submit(self._turn)
            self.host_us["schedule"].append((scheduled - start) * 1e6)
            self.host_us["submit"].append((time.perf_counter() - scheduled) * 1e6)
            self._in_flight.append((step_id, self._turn))
            self._turn = (self._turn + 1) % NUM_SLABS
        if not self._in_flight:
            return False
        while not (done := self.executor.completions()):
            select.select([self.executor.completion_fd()], [], [])
        for completion in done:
            step_id, slab_index = self._in_flight.pop(0)
            if completion.error is not None:
                raise RuntimeError(completion.error)
            start = time.perf_counter()
            self.core.commit(step_id, self.slabs[slab_index])
            self.host_us["commit"].append((time.perf_counter() - start) * 1e6)
        return True

    def finish(self) -> None:
        """Run what is left."""
        while self.step():
            pass


def measure(stepper: Stepper, batch: int, context: int, num_steps: int) -> tuple[dict[str, Any], Trace]:
    """Milliseconds of a decode step of `batch` rows; the kernels, and what the device waits for, of a few of them."""
    ahead = _WARM_STEPS + _SETTLING_STEPS + _TRACED_STEPS + 8
    stepper.submit(batch, context, num_steps + ahead + batch)
    start = time.perf_counter()
    while stepper.core.stats().num_waiting or stepper.core.stats().num_running < batch:
        stepper.step()
    for _ in range(_WARM_STEPS):
        stepper.step()
    prefill_s = time.perf_counter() - start
    stepper.host_us.clear()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        stepper.step()
        times.append((time.perf_counter() - start) * 1e3)
    host = {name: round(statistics.median(values), 1) for name, values in stepper.host_us.items()}
    events = _traced(stepper, _TRACED_STEPS)
    for handle in stepper.handles:
        stepper.core.abort(handle)
    stepper.finish()
    gaps = gap_summary(events)
    result = {
        "batch": batch,
        "context": context,
        "step_ms": round(statistics.mean(times), 4),
        "step_ms_p50": round(statistics.median(times), 4),
        "prefill_s": round(prefill_s, 3),
        "host_us": host,
        "gap_us": gaps,
        "kernels": _kernels(events),
    }
    return result, Trace(batch, events, gaps)


def measure_prefill(stepper: Stepper, context: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step full of prompts of `context` tokens, and the kernels of a few of them."""
    step_tokens = stepper.step_tokens
    more = _WARM_STEPS + _SETTLING_STEPS + 4 + 4  # traced ones, and those in flight
    stepper.submit((num_steps + more) * step_tokens // context + 1, context, 1)
    for _ in range(_WARM_STEPS):
        stepper.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        stepper.step()
        times.append((time.perf_counter() - start) * 1e3)
    events = _traced(stepper, 4)
    stepper.finish()
    return {
        "prefill_context": context,
        "step_tokens": step_tokens,
        "step_ms": round(statistics.mean(times), 3),
        "tok_s": round(step_tokens / statistics.mean(times) * 1e3),
        "gap_us": gap_summary(events),
        "kernels": _kernels(events),
    }


def _traced(stepper: Stepper, num_steps: int) -> list[Event]:
    """What runs on the device in whole steps, once the tracing has settled."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        for _ in range(_SETTLING_STEPS + num_steps):
            stepper.step()
        torch.cuda.synchronize()
    events = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in profile.events()
        if e.device_type.name == "CUDA"
    ]
    return whole_steps(events, _SETTLING_STEPS)


def _kernels(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Per kernel name: launches and µs per step. With programmatic launches a kernel's time includes its wait."""
    num_steps = max(1, len(borders(events)))
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for begin, end, name in events:
        totals[name][0] += 1
        totals[name][1] += end - begin
    return [
        {"name": name[:70], "per_step": count / num_steps, "us_per_step": round(us / num_steps, 1)}
        for name, (count, us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,8,32,128,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prefill", action="store_true", help="steps full of prompts, not decode steps")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--settings", default="{}", help="more settings as JSON")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--picture", type=Path, help="an SVG of steps of the smallest and the largest batch")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    options = read_options(arguments)
    batches = [int(size) for size in options.batch.split(",")]
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 8192}
    config = EngineConfig.from_flat(
        settings | {"model": options.model, "enforce_eager": options.eager} | json.loads(options.settings)
    )
    start = time.perf_counter()
    stepper = Stepper(config)
    print(f"ready after {time.perf_counter() - start:.1f} s, {stepper.info}")
    results: list[dict[str, Any]] = []
    traces: list[Trace] = []
    if options.prefill:
        results.append(measure_prefill(stepper, options.context, options.steps))
        _show(results[-1])
    for batch in [] if options.prefill else batches:
        result, trace = measure(stepper, batch, options.context, options.steps)
        results.append(result)
        traces.append(trace)
        _show(result)
    stepper.executor.shutdown()
    _write(options, results, traces)
    print(json.dumps(results))


def _show(result: dict[str, Any]) -> None:
    print({key: value for key, value in result.items() if key != "kernels"})
    for kernel in result["kernels"][:16]:
        print(f"  {kernel['us_per_step']:9.1f} µs {kernel['per_step']:6.1f} x  {kernel['name']}", flush=True)


def _write(options: argparse.Namespace, results: list[dict[str, Any]], traces: list[Trace]) -> None:
    """The files that were asked for."""
    model = Path(options.model).name
    if options.json is not None:
        whole = {
            "bench": "host_gap", "model": model, "steps": results,
            "utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "machine": device_machine(),
        }  # fmt: skip
        save_result(options.json, whole)
    if options.picture is not None and traces:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        sizes = [trace.batch for trace in traces]
        options.picture.write_text(gap_picture(model, traces, (min(sizes), max(sizes))), encoding="utf-8")


if __name__ == "__main__":
    run_bench(main)
