"""One step on the GPU, taken apart: its time, its kernels, and what the device waits for between two steps.

    python -m oneloop_bench.gpu_step MODEL_DIR [--batch 1,8,32] [--context 1024] [--picture FOLDER] [--eager]
    python -m oneloop_bench.gpu_step MODEL_DIR --prefill [--context 1024]     steps full of prompts of that length

Core and runner alone, without event loop and HTTP; dummy weights. The last line is one JSON object.
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
from xml.sax.saxutils import escape

import numpy as np
import torch

from oneloop.config import EngineConfig
from oneloop.executor.cuda import CudaExecutor
from oneloop.start_times import StartTimes
from oneloop_core import Core, CoreConfig, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SLABS = 3
STEP_BEGINS = "_fetch_kernel"
Event = tuple[float, float, str]
"""Begin and end in µs, name."""
_WARM_STEPS = 8


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

    def submit(self, num_requests: int, context: int, num_output: int) -> None:
        """Greedy requests of random tokens that end by length alone."""
        self.handles = []
        rng = np.random.default_rng(num_requests)
        for _ in range(num_requests):
            prompt = rng.integers(17, self.info.vocab_size - 1000, context).tolist()
            self.handles.append(
                self.core.submit(
                    prompt, max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False
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


def measure(
    stepper: Stepper, batch: int, context: int, num_steps: int, picture: Path | None
) -> dict[str, Any]:
    """Milliseconds of a decode step of `batch` rows, and the kernels of a few of them. picture: folder for an SVG."""
    stepper.submit(batch, context, num_steps + 24 + batch)
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(8):
            stepper.step()
        torch.cuda.synchronize()
    events = _device_events(profile)
    kernels, gaps = _kernels(events)
    if picture is not None:
        picture.mkdir(parents=True, exist_ok=True)
        (picture / f"step_{batch}.svg").write_text(step_picture(events, f"decode, {batch} rows"))
    for handle in stepper.handles:
        stepper.core.abort(handle)
    stepper.finish()
    return {
        "batch": batch,
        "context": context,
        "step_ms": round(statistics.mean(times), 4),
        "step_ms_p50": round(statistics.median(times), 4),
        "prefill_s": round(prefill_s, 3),
        "host_us": host,
        "gap_us": gaps,
        "kernels": kernels,
    }


def measure_prefill(stepper: Stepper, context: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step full of prompts of `context` tokens, and the kernels of a few of them."""
    step_tokens = stepper.step_tokens
    stepper.submit((num_steps + 20) * step_tokens // context + 1, context, 1)
    for _ in range(_WARM_STEPS):
        stepper.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        stepper.step()
        times.append((time.perf_counter() - start) * 1e3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(6):
            stepper.step()
        torch.cuda.synchronize()
    kernels, gaps = _kernels(_device_events(profile))
    stepper.finish()
    return {
        "prefill_context": context,
        "step_tokens": step_tokens,
        "step_ms": round(statistics.mean(times), 3),
        "tok_s": round(step_tokens / statistics.mean(times) * 1e3),
        "gap_us": gaps,
        "kernels": kernels,
    }


def _device_events(profile: Any) -> list[Event]:
    """What ran on the device, from the first step's begin to the last step's."""
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in profile.events()
        if e.device_type.name == "CUDA"
    )
    borders = [start for start, _, name in events if STEP_BEGINS in name]
    if len(borders) < 2:
        return events
    return [event for event in events if borders[0] <= event[0] < borders[-1]]


def _kernels(events: list[Event]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Per kernel name: launches and µs per step; and how long the device idles, per step and at step borders.

    With programmatic launches a kernel's time includes its wait for the one before.
    """
    num_steps = max(1, sum(STEP_BEGINS in name for _, _, name in events))
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    idle, at_borders, reached = 0.0, [], 0.0
    for start, end, name in events:
        totals[name][0] += 1
        totals[name][1] += end - start
        if reached and start > reached:
            idle += start - reached
            if STEP_BEGINS in name:
                at_borders.append(start - reached)
        reached = max(reached, end)
    table = [
        {"name": name[:70], "per_step": count / num_steps, "us_per_step": round(us / num_steps, 1)}
        for name, (count, us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    gaps = {"idle_per_step": round(idle / num_steps, 1)}
    if at_borders:
        gaps["border_p50"] = round(statistics.median(at_borders), 1)
    return table, gaps


def step_picture(events: list[Event], title: str) -> str:
    """An SVG of the borders between steps: 60 µs around each, a bar per kernel."""
    borders = [start for start, _, name in events if STEP_BEGINS in name][1:6]
    scale, height, left = 14.0, 34, 10
    colours = ("#4878a8", "#e49444", "#6a9f58", "#d1615d", "#85b6b2", "#967662", "#a87c9f", "#e7ca60")
    names = sorted({name for _, _, name in events})
    parts = [
        f'<text x="{left}" y="16" font-size="13">{escape(title)}: 60 µs around the borders of steps</text>'
    ]
    for row, border in enumerate(borders):
        top = 30 + row * (height + 12)
        first, last = border - 40, border + 20
        parts.append(f'<rect x="{left}" y="{top}" width="{60 * scale}" height="{height}" fill="#eee"/>')
        for start, end, name in events:
            if end < first or start > last:
                continue
            x = left + (max(start, first) - first) * scale
            width = max(0.5, (min(end, last) - max(start, first)) * scale)
            colour = colours[names.index(name) % len(colours)]
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}" '
                f'fill-opacity="0.8"><title>{escape(name[:80])}: {end - start:.2f} µs</title></rect>'
            )
    total = 30 + len(borders) * (height + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{60 * scale + 2 * left:.0f}" height="{total}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>\n'
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,8,32,128,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prefill", action="store_true", help="steps full of prompts, not decode steps")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--settings", default="{}", help="more settings as JSON")
    parser.add_argument(
        "--picture", type=Path, help="folder for an SVG per batch size: kernels around step borders"
    )
    options = parser.parse_args(arguments)
    batches = [int(size) for size in options.batch.split(",")]
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 8192}
    config = EngineConfig.from_flat(
        settings | {"model": options.model, "enforce_eager": options.eager} | json.loads(options.settings)
    )
    start = time.perf_counter()
    stepper = Stepper(config)
    print(f"ready after {time.perf_counter() - start:.1f} s, {stepper.info}")
    results = []
    for batch in [None] if options.prefill else batches:
        if batch is None:
            result = measure_prefill(stepper, options.context, options.steps)
        else:
            result = measure(stepper, batch, options.context, options.steps, options.picture)
        results.append(result)
        print({key: value for key, value in result.items() if key != "kernels"})
        for kernel in result["kernels"][:16]:
            print(
                f"  {kernel['us_per_step']:9.1f} µs {kernel['per_step']:6.1f} x  {kernel['name']}", flush=True
            )
    stepper.executor.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
