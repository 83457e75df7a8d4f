"""The scheduler at a device's pace, without one: the real core, step times by a model fitted to measured ones.

`python -m oneloop_bench.schedule_sim [--only TEXT] [--set FIELD=NUMBER …]`. What a policy does to throughput, to the
time to the first token and to the gaps between tokens is seen in seconds, for the workloads of `h200`. --set: other
values for fields of the core's configuration, all workloads.

A step takes the time of its products (interpolated by tokens between measured sizes: the bandwidth that binds below
a few hundred tokens is in them), of its attention (bytes read by rows with one query, FLOPs of prompts) and a part per
step. The host takes up arrivals, tells tokens and launches steps one after the other; a client sends its next request
when it has its last token. Beside each workload stands what was measured on one H200, with whole steps.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from oneloop.engine.loop import NUM_SLABS
from oneloop_bench.report import print_result
from oneloop_bench.slab import Slab
from oneloop_core import Core, CoreConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.worker.inputs import SlabViews

BLOCK_SIZE: Final = 16
MAX_NUM_SEQS: Final = 512
STEP_TOKENS: Final = 2048
MAX_MODEL_LEN: Final = 8192
TOKEN: Final = 20
"""What every sequence samples."""
NETWORK_S: Final = 0.0005
"""Between the host and a client, one way."""
LAUNCH_S: Final = 0.0004
"""The host's time to schedule and launch a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Step times of one model on one card."""

    name: str
    vocab_size: int
    num_blocks: int
    products: Sequence[tuple[int, float]]
    """(tokens of a step, ms of all but attention), ascending; between them straight lines, beyond the last one too."""
    kv_bytes: int
    """Of a token."""
    attention_flops: int
    """Per query and key."""
    bytes_per_s: float
    """Of decode attention."""
    flops_per_s: float
    """Of prefill attention."""
    overhead_ms: float
    """Per step that holds prompts."""

    def step_s(self, views: SlabViews) -> float:
        """Seconds of the step that the slab describes."""
        header = views.header()
        num_single = header.num_single
        num_scheduled = views.row_num_scheduled[: header.num_rows].astype(np.int64)
        num_computed = views.row_num_computed[: header.num_rows].astype(np.int64)
        contexts = num_computed[:num_single] + 1
        num_read = int(contexts.sum())
        queries, before = num_scheduled[num_single:], num_computed[num_single:]
        num_pairs = float((queries * (before + queries / 2)).sum())
        fixed_ms = self.overhead_ms if len(queries) else 0.0
        seconds: float = (
            (self.products_ms(header.num_tokens) + fixed_ms) / 1e3
            + num_read * self.kv_bytes / self.bytes_per_s
            + num_pairs * self.attention_flops / self.flops_per_s
        )
        return seconds

    def products_ms(self, num_tokens: int) -> float:
        """All but attention, of so many tokens."""
        tokens = [size for size, _ in self.products]
        ms = [time for _, time in self.products]
        if num_tokens > tokens[-1]:
            return ms[-1] * num_tokens / tokens[-1]
        return float(np.interp(num_tokens, tokens, ms))


LLAMA_8B: Final = Device(
    name="llama8b",
    vocab_size=128_256,
    num_blocks=55_897,
    products=(
        (1, 3.95),
        (8, 4.1),
        (32, 4.2),
        (64, 4.3),
        (128, 5.0),
        (256, 7.0),
        (512, 11.6),
        (1024, 22.3),
        (2048, 45.8),
    ),
    kv_bytes=131_072,
    attention_flops=524_288,
    bytes_per_s=4.25e12,
    flops_per_s=213e12,
    overhead_ms=0.3,
)
"""Large steps one after the other bring the card to its 700 W: the clock then falls from 1,980 to some 1,420 MHz, and
products to 620 TFLOP/s. A first step of 2,048 tokens takes 41 ms, later ones 46."""
QWEN_06B: Final = Device(
    name="qwen06b",
    vocab_size=151_936,
    num_blocks=72_032,
    products=((1, 0.86), (8, 0.89), (64, 0.99), (256, 1.18), (512, 1.68), (2048, 4.2), (8192, 15.0)),
    kv_bytes=114_688,
    attention_flops=229_376,
    bytes_per_s=3.7e12,
    flops_per_s=200e12,
    overhead_ms=0.4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the event loop takes, one after the other."""

    intake_s: float
    """Per arrival."""
    delivery_s: float
    """Per token that is sent."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one length. rate: arrivals a second (0: none waits); concurrency: at once (0: all)."""

    name: str
    device: Device
    num_requests: int
    prompt: int
    output: int
    rate: float = 0.0
    concurrency: int = 0
    host: Host | None = None
    """None: offline, nobody watches."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """By the anchors' drivers on one H200, without mixed_step_tokens: seconds, and percentiles in ms."""


_LLAMA_HOST: Final = Host(intake_s=1.5e-3, delivery_s=5e-6)
_QWEN_HOST: Final = Host(intake_s=0.9e-3, delivery_s=7e-6)
WORKLOADS: Final = (
    Workload(
        "llama8b_rate16", LLAMA_8B, 300, prompt=512, output=256, rate=16.0, host=_LLAMA_HOST,
        measured={"seconds": 19.6, "ttft_p50": 24.7, "ttft_p99": 52.8, "itl_p50": 4.7, "itl_p99": 14.9},
    ),
    Workload(
        "llama8b_conc256", LLAMA_8B, 1024, prompt=512, output=256, concurrency=256, host=_LLAMA_HOST,
        measured={"seconds": 24.0, "ttft_p50": 205, "ttft_p99": 3215, "itl_p50": 12.2, "itl_p99": 52.9},
    ),
    Workload(
        "qwen06b_conc512", QWEN_06B, 2048, prompt=128, output=256, concurrency=512, host=_QWEN_HOST,
        measured={"seconds": 7.58, "ttft_p50": 168, "ttft_p99": 675, "itl_p50": 6.6, "itl_p99": 61.8},
    ),
    Workload("llama8b_1000x1024_128", LLAMA_8B, 1000, prompt=1024, output=128, measured={"seconds": 30.6}),
    Workload("llama8b_512x128_1024", LLAMA_8B, 512, prompt=128, output=1024, measured={"seconds": 24.0}),
    Workload("qwen06b_2000x128_256", QWEN_06B, 2000, prompt=128, output=256, measured={"seconds": 6.5}),
)  # fmt: skip
"""The shared prefix is not among them: kernels over shared blocks are not in the model."""


@dataclass(slots=True)
class Request:
    """One request's way. Seconds since the start."""

    sent: float
    tokens: list[float] = field(default_factory=list)


class Simulation:
    """The engine's loop over a clock of its own."""

    def __init__(self, workload: Workload, settings: Mapping[str, int]) -> None:
        self.workload = workload
        sizes: dict[str, Any] = {
            "num_blocks": workload.device.num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": workload.device.vocab_size,
            "hash_key": bytes(16),
        }
        self.core = Core(CoreConfig(**(sizes | dict(settings))))
        self._slabs = [Slab(self.core.layout) for _ in range(NUM_SLABS)]
        for slab in self._slabs:
            slab.views.output_token[:] = TOKEN
        self._host = workload.host or Host(intake_s=0.0, delivery_s=0.0)
        self._turn = 0
        self._in_flight: deque[tuple[int, Slab]] = deque()
        self._device_free = 0.0
        self._host_free = 0.0
        self._arrivals: list[float] = []
        """A heap of when the requests that wait for the host were sent: it takes one after the other."""
        self._completions: deque[float] = deque()
        """When the steps in flight end: what the host does before all else, as the event loop does."""
        self._rng = np.random.default_rng(0)
        self._num_unsent = workload.num_requests
        self.requests: dict[int, Request] = {}
        self.steps: list[tuple[float, int]] = []
        """(seconds, tokens) of each."""

    def run(self) -> None:
        """Until every request has ended."""
        self._send_first()
        while self._arrivals or self._completions:
            begin = max(self._host_free, self._arrivals[0]) if self._arrivals else float("inf")
            if self._completions and self._completions[0] <= begin:
                self._host_free = max(self._host_free, self._completions.popleft())
                self._complete()
                continue
            self._host_free = begin + self._host.intake_s
            self._submit(heapq.heappop(self._arrivals))
            self._launch()

    def _send_first(self) -> None:
        workload = self.workload
        if workload.rate:
            arrivals = random.Random(f"{workload.name}/0/arrivals")
            now = 0.0
            while self._num_unsent:
                self._send(now)
                now += arrivals.expovariate(workload.rate)
            return
        for _ in range(workload.concurrency or workload.num_requests):
            self._send(0.0)

    def _send(self, now: float) -> None:
        if self._num_unsent:
            self._num_unsent -= 1
            heapq.heappush(self._arrivals, now)

    def _submit(self, sent: float) -> None:
        prompt = self._rng.integers(17, 100_000, self.workload.prompt, dtype=np.int32)
        handle = self.core.submit(
            prompt.data,
            max_tokens=self.workload.output,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            final_only=self.workload.host is None,
        )
        self.requests[handle] = Request(sent)

    def _launch(self) -> None:
        while len(self._in_flight) < 2:
            slab = self._slabs[self._turn]
            step_id = self.core.schedule(slab.buffer)
            if step_id is None:
                return
            self._turn = (self._turn + 1) % NUM_SLABS
            self._host_free += LAUNCH_S
            seconds = self.workload.device.step_s(slab.views)
            begin = max(self._host_free, self._device_free)
            self._device_free = begin + seconds
            self._in_flight.append((step_id, slab))
            self._completions.append(self._device_free)
            self.steps.append((seconds, slab.views.header().num_tokens))

    def _complete(self) -> None:
        step_id, slab = self._in_flight.popleft()
        deltas = self.core.commit(step_id, slab.buffer)
        self._launch()
        for delta in deltas:
            self._host_free += self._host.delivery_s * len(delta.token_ids)
            told = self._host_free + NETWORK_S
            self.requests[delta.request].tokens.extend([told] * len(delta.token_ids))
            if delta.finish_reason is not None and self.workload.concurrency:
                self._send(told + NETWORK_S)


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in ms."""
    return {f"{name}_p{p}": round(float(np.percentile(seconds, p)) * 1e3, 1) for p in (50, 90, 99)}


def simulate(workload: Workload, settings: Mapping[str, int]) -> dict[str, float]:
    """Figures as the anchors' drivers give them, and how many steps it took."""
    simulation = Simulation(workload, settings)
    simulation.run()
    requests = list(simulation.requests.values())
    assert all(len(request.tokens) == workload.output for request in requests)
    end = max(request.tokens[-1] for request in requests)
    result = {
        "seconds": round(end, 2),
        "out_tok_s": round(workload.num_requests * workload.output / end),
        "num_steps": len(simulation.steps),
    }
    if workload.host is None:
        return result
    gaps = np.concatenate([np.diff(request.tokens) for request in requests])
    spans = [(request.tokens[-1] - request.tokens[0]) / (workload.output - 1) for request in requests]
    return {
        **result,
        **percentiles("ttft", [request.tokens[0] - request.sent for request in requests]),
        **percentiles("itl", list(gaps)),
        **percentiles("tpot", spans),
    }


def setting(text: str) -> tuple[str, int]:
    """FIELD=NUMBER."""
    name, _, value = text.partition("=")
    return name, int(value)


def main() -> None:
    """Print a line per workload and the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name has it")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=NUMBER")
    arguments = parser.parse_args()
    results = {}
    for workload in WORKLOADS:
        if arguments.only in workload.name:
            results[workload.name] = result = simulate(workload, dict(arguments.set))
            print(workload.name)
            for name, value in result.items():
                measured = workload.measured.get(name)
                print(f"  {name:10}{value:>10}" + (f"   measured {measured}" if measured else ""), flush=True)
    print_result(results)


if __name__ == "__main__":
    main()
