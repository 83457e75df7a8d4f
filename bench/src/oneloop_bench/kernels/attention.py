"""Paged attention planned on the device: decode against the memory's rate, prefill against the matrix units'.

Contexts lie in random blocks. Every launch has a cache of its own, so that nothing is found in the L2 cache. With
--sweep every case of the two head layouts is tried with the tile configurations below.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.paged_attention import AttentionShape, AttentionStep
from oneloop_kernels.ops.paged_attention.triton.attention import TritonAttention
from oneloop_kernels.ops.paged_attention.triton.configs import (
    AttentionConfig,
    DecodeConfig,
    TilesConfig,
    config_for,
    streaming,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop_kernels.ops.paged_attention import DevicePlan

LAYER = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""qkv, cache, out."""

LLAMA_8B = (32, 8, 128)
QWEN_06B = (16, 8, 128)
"""Query heads, key heads, head dimension."""

MIXED = tuple((1, 32 + (i * 37) % 960) for i in range(256))
"""256 decode rows of 33 to 992 tokens, 512 on average."""
DECODE: dict[str, tuple[tuple[int, int], ...]] = {
    "1x512": ((1, 511),),
    "1x1k": ((1, 1023),),
    "1x32k": ((1, 32767),),
    "8x1k": ((1, 1023),) * 8,
    "32x1k": ((1, 1023),) * 32,
    "64x1k": ((1, 1023),) * 64,
    "128x1k": ((1, 1023),) * 128,
    "256x1k": ((1, 1023),) * 256,
    "256x512 mixed": MIXED,
}
PREFILL: dict[str, tuple[tuple[int, int], ...]] = {
    "1x1k": ((1024, 0),),
    "8x1k": ((1024, 0),) * 8,
    "1x8k": ((8192, 0),),
    "2k at 30k": ((2048, 30 * 1024),),
}
"""Rows as (queries of the step, tokens computed before)."""
NARROW = {name: DECODE[name] for name in ("1x1k", "1x32k", "32x1k", "256x1k", "256x512 mixed")} | {
    name: PREFILL[name] for name in ("1x8k", "2k at 30k")
}
"""Cases on a cache of 8 bits."""

BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_BLOCK_SIZE = 16
"""The engine's."""
TORCH_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
SHARED_PREFIX, SHARED_ROWS, SHARED_OWN = 4096, 256, 128
MAX_ROWS, MAX_TOKENS, MAX_CONTEXT = 512, 8192 + 64, 32768
"""Of all planners but the smoke run's, so that kernels are compiled once. Sharing is on from 8 rows."""
SWEPT = ("1x512", "1x1k", "1x32k", "32x1k", "256x1k", "8x1k", "1x8k")
"""Cases of --sweep, with the heads of the 8B model; others by --only."""


@dataclass
class Case:
    """A step and what a layer of it reads."""

    name: str
    rows: Sequence[tuple[int, int]]
    heads: tuple[int, int, int]
    block_size: int = DEFAULT_BLOCK_SIZE
    by_head: bool = True
    """Storage order [blocks, 2 · key heads, block_size, head_dim]; else [blocks, block_size, …]."""
    shared: int = 0
    """First tokens that all rows have in common."""
    may_share: bool = False
    """As the engine says of steps whose rows have much in common."""
    cache_dtype: torch.dtype | None = None
    """Of keys and values; None: as the queries."""

    def __post_init__(self) -> None:
        self.lengths = [scheduled + computed for scheduled, computed in self.rows]
        self.num_tokens = sum(scheduled for scheduled, _ in self.rows)
        self.has_multi = any(scheduled > 1 for scheduled, _ in self.rows)
        own = [-(-(length - self.shared) // self.block_size) for length in self.lengths]
        self.num_blocks = sum(own) + self.shared // self.block_size
        self.width = max(own) + self.shared // self.block_size

    @property
    def num_bytes(self) -> int:
        """Keys and values once, queries and results."""
        heads, kv_heads, dim = self.heads
        tokens = sum(length - self.shared for length in self.lengths) + self.shared
        kept = 2 if self.cache_dtype is None else self.cache_dtype.itemsize
        return dim * (kept * 2 * kv_heads * tokens + 2 * 2 * heads * self.num_tokens)

    @property
    def num_flops(self) -> int:
        """Of the two products, over the keys that each query sees."""
        heads, _, dim = self.heads
        seen = sum(n * computed + n * (n + 1) // 2 for n, computed in self.rows)
        return 4 * heads * dim * seen

    def shape(self) -> AttentionShape:
        """Of one layer."""
        heads, kv_heads, dim = self.heads
        return AttentionShape(heads, kv_heads, dim, self.block_size, dim**-0.5)

    def step(self, device: torch.device) -> AttentionStep:
        """Rows in slots of their own number, blocks in random order."""
        ids = torch.randperm(self.num_blocks, device=device, dtype=torch.int32)
        tables = torch.zeros(len(self.rows), self.width, dtype=torch.int32, device=device)
        common = self.shared // self.block_size
        tables[:, :common] = ids[:common]
        taken = common
        for row, length in enumerate(self.lengths):
            own = -(-(length - self.shared) // self.block_size)
            tables[row, common : common + own] = ids[taken : taken + own]
            taken += own
        starts = [0, *itertools.accumulate(scheduled for scheduled, _ in self.rows)]

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return AttentionStep(
            row_slot=ints(range(len(self.rows))),
            seq_lens=ints(self.lengths),
            query_start=ints(starts),
            num_rows=ints([len(self.rows)]),
            num_single=ints([sum(scheduled == 1 for scheduled, _ in self.rows)]),
            block_tables=tables,
        )

    def layer(self, dtype: torch.dtype, device: torch.device) -> LAYER:
        """Random queries and cache."""
        heads, kv_heads, dim = self.heads
        qkv = torch.randn(self.num_tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
        if self.by_head:
            storage = torch.randn(
                self.num_blocks, 2 * kv_heads, self.block_size, dim, dtype=dtype, device=device
            )
            kv = self._kept(storage).transpose(1, 2)
        else:
            kv = self._kept(
                torch.randn(self.num_blocks, self.block_size, 2 * kv_heads, dim, dtype=dtype, device=device)
            )
        return qkv, kv, torch.empty(self.num_tokens, heads * dim, dtype=dtype, device=device)

    def _kept(self, storage: torch.Tensor) -> torch.Tensor:
        return storage if self.cache_dtype is None else storage.to(self.cache_dtype)

    def queries(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Queries, keys and values of the step's tokens alone."""
        return self.layer(dtype, device)[0]

    def attention(
        self, dtype: torch.dtype, device: torch.device, config: AttentionConfig | None = None
    ) -> TritonAttention:
        """The planner of such steps."""
        small = INTERPRETED
        return TritonAttention(
            self.shape(), max_rows=len(self.rows) if small else MAX_ROWS,
            max_tokens=self.num_tokens if small else MAX_TOKENS,
            max_blocks_per_row=self.width if small else max(self.width, MAX_CONTEXT // self.block_size),
            dtype=dtype, device=device, config=config, cache_dtype=self.cache_dtype,
        )  # fmt: skip

    def plan(
        self, dtype: torch.dtype, device: torch.device, config: AttentionConfig | None = None
    ) -> DevicePlan:
        """A planned step."""
        step = self.step(device)
        return self.attention(dtype, device, config).plan(
            step, len(self.rows), self.num_tokens, self.has_multi, may_share=self.may_share
        )


def main() -> None:
    """Run the bench."""
    bench = KernelBench("attention", bench_arguments(__doc__))
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    measure = partial(_measure, bench, dtype)
    for model, heads in (("8B", LLAMA_8B), ("0.6B", QWEN_06B)):
        for kind, cases in (("decode", DECODE), ("prefill", PREFILL)):
            for name, rows in _cases(bench, cases, model).items():
                measure(Case(f"{kind} {model} {name}", rows, heads))
    for name, rows in _cases(bench, NARROW, "8B").items():
        measure(Case(f"8 bits 8B {name}", rows, LLAMA_8B, cache_dtype=FP8))
    if not bench.sweep and not bench.smoke:
        _measure_caches(bench, dtype)
        _measure_shared(bench, dtype)
        _measure_plans(bench, dtype)
        _measure_torch(bench, dtype)
    bench.finish()


def _cases(
    bench: KernelBench, cases: dict[str, tuple[tuple[int, int], ...]], model: str
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Those of a full run; of a sweep; or one small step where nothing is measured."""
    if bench.smoke:
        return {"smoke": tuple((min(n, 20), 40) for n, _ in next(iter(cases.values())))}
    if bench.sweep and bench.wanted(""):
        return {name: rows for name, rows in cases.items() if model == "8B" and name in SWEPT}
    return cases


def _measure(bench: KernelBench, dtype: torch.dtype, case: Case) -> None:
    if not bench.wanted(case.name):
        return
    sets = bench.sets(partial(case.layer, dtype, bench.device), num_bytes=case.num_bytes)
    work = {"num_bytes": case.num_bytes, "num_flops": case.num_flops}
    if bench.sweep:
        configs = _prefill_configs(case) if case.has_multi else _decode_configs(case)
        candidates: dict[str, Callable[[LAYER], object]] = {
            key: _planned_at_first(case, dtype, bench.device, tried) for key, tried in configs.items()
        }
        bench.best(case.name, candidates, sets, **work)
    else:
        plan = case.plan(dtype, bench.device)
        bench.measure(case.name, partial(_run, plan), sets, **work)


def _measure_caches(bench: KernelBench, dtype: torch.dtype) -> None:
    """Block sizes and storage orders; and what the readiness to share costs where nothing is shared."""
    for block_size, by_head in itertools.product(BLOCK_SIZES, (True, False)):
        cache = f"blocks of {block_size} by {'head' if by_head else 'token'}"
        for name in ("32x1k", "1x32k"):
            case = Case(f"decode 8B {name} {cache}", DECODE[name], LLAMA_8B, block_size, by_head)
            _measure(bench, dtype, case)
        case = Case(f"prefill 8B 1x8k {cache}", PREFILL["1x8k"], LLAMA_8B, block_size, by_head)
        _measure(bench, dtype, case)
    for name in ("32x1k", "256x1k"):
        case = Case(f"decode 8B {name} ready to share", DECODE[name], LLAMA_8B, may_share=True)
        _measure(bench, dtype, case)


def _run(plan: DevicePlan, layer: LAYER) -> None:
    plan.run(*layer)


def _planned_at_first(
    case: Case, dtype: torch.dtype, device: torch.device, config: AttentionConfig
) -> Callable[[LAYER], None]:
    """Plans when it is first called, which is before the capture."""

    @cache
    def plan() -> DevicePlan:
        return case.plan(dtype, device, config)

    return lambda layer: plan().run(*layer)


def _decode_configs(case: Case) -> dict[str, AttentionConfig]:
    base = config_for("", 2, case.heads[2])
    tiles = (
        # block_n, warps, stages, programs per multiprocessor, registers
        (32, 4, 3, 3, None), (32, 4, 3, 4, 128), (32, 4, 4, 3, None), (32, 4, 4, 4, 128), (32, 4, 5, 3, None),
        (64, 4, 2, 2, None), (64, 4, 2, 3, 168), (64, 4, 2, 4, 128), (64, 4, 3, 1, None), (64, 4, 3, 2, None),
        (64, 4, 3, 3, 168), (64, 4, 4, 1, None), (64, 4, 4, 2, None),
        (128, 4, 2, 2, None), (128, 8, 2, 2, 128), (128, 8, 3, 1, None), (128, 4, 3, 1, None),
    )  # fmt: skip
    min_tiles = (1, 2, 4) if sum(case.lengths) * case.heads[1] < 64 * 1024 else (1,)
    configs = {
        f"n{n} w{w} s{s} x{x} r{r} m{m}": DecodeConfig(n, w, s, x, m, r)
        for n, w, s, x, r in tiles
        for m in min_tiles
    } | {
        f"stream s{s} x{x} m{m}": streaming(s, x, m)
        for s, x in ((6, 1), (5, 1), (4, 1), (3, 1), (3, 2), (2, 2))
        for m in min_tiles
    }
    if case.cache_dtype is FP8:
        configs |= {
            f"stream s{s} x{x} k{keys} t{together} m{m}": streaming(s, x, m, keys=keys, together=together)
            for s, x, keys in ((5, 2, 64), (3, 3, 64), (6, 1, 128), (3, 2, 128), (2, 2, 128))
            for together in (1, 8)
            for m in min_tiles
        }
    return {key: replace(base, decode=config, few_rows=(), streamed=()) for key, config in configs.items()}


def _prefill_configs(case: Case) -> dict[str, AttentionConfig]:
    base = config_for("", 2, case.heads[2])
    tiles = (
        # block_m, block_n, warps, stages, programs per multiprocessor, registers
        (64, 64, 4, 2, 2, None), (64, 64, 4, 3, 2, None), (64, 64, 4, 3, 1, None), (64, 128, 4, 2, 1, None),
        (64, 32, 4, 4, 2, None), (64, 32, 4, 4, 3, 168), (128, 64, 4, 2, 2, None), (128, 64, 8, 2, 1, None),
        (128, 64, 8, 3, 1, None), (128, 64, 8, 4, 1, None), (128, 128, 8, 2, 1, None), (128, 128, 8, 3, 1, None),
        (128, 32, 8, 4, 2, 128), (128, 32, 4, 4, 2, None), (256, 64, 8, 2, 1, None),
    )  # fmt: skip
    rings = {
        f"ring {ring}": replace(base, tiles=replace(base.tiles, block_m=128, ring=ring)) for ring in (4, 5)
    }
    return rings | {
        f"m{m} n{n} w{w} s{s} x{x}{' tma' if tma else ''}": replace(
            base, tiles=TilesConfig(m, n, w, s, x, tma, r)
        )
        for m, n, w, s, x, r in tiles
        for tma in ((False, True) if case.block_size % n == 0 else (False,))
    }


def _measure_shared(bench: KernelBench, dtype: torch.dtype) -> None:
    """A batch over one prefix: shared parts read once, and, for comparison, by every row."""
    rows = ((1, SHARED_PREFIX + SHARED_OWN - 1),) * SHARED_ROWS
    name = f"decode 8B {SHARED_ROWS} over {SHARED_PREFIX}"
    for more, may_share in (("", True), (" sharing off", False)):
        _measure(bench, dtype, Case(name + more, rows, LLAMA_8B, shared=SHARED_PREFIX, may_share=may_share))


def _measure_plans(bench: KernelBench, dtype: torch.dtype) -> None:
    """The planning, once per step."""
    for name, rows in (("256 rows", DECODE["256x1k"]), ("8k tokens", MIXED[:64] + PREFILL["8x1k"])):
        case = Case(f"plan {name}", rows, LLAMA_8B)
        if bench.wanted(case.name):
            attention = case.attention(dtype, bench.device)
            plan = partial(
                attention.plan, num_rows=len(rows), num_tokens=case.num_tokens, has_multi=case.has_multi
            )
            bench.measure(case.name, plan, [case.step(bench.device)])


def torch_attention(case: Case, backend: SDPBackend) -> Callable[[torch.Tensor], object]:
    """qkv → torch's own causal attention of a prefill without a cache. Rows of one length, nothing computed before."""
    heads, kv_heads, _ = case.heads
    count = len(case.rows)

    def attend(qkv: torch.Tensor) -> object:
        batched = qkv.view(count, -1, *qkv.shape[1:]).transpose(1, 2)
        q, k, v = torch.split(batched, [heads, kv_heads, kv_heads], 1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _measure_torch(bench: KernelBench, dtype: torch.dtype) -> None:
    """Torch's own attention on the same prefills, without a cache: what a detour around ours could gain."""
    for name in ("1x1k", "8x1k", "1x8k"):
        case = Case(f"torch {name}", PREFILL[name], LLAMA_8B)
        if not bench.wanted(case.name):
            continue
        sets = bench.sets(partial(case.queries, dtype, bench.device), num_bytes=case.num_bytes)
        for key, backend in TORCH_BACKENDS.items():
            bench.best(
                case.name, {key: torch_attention(case, backend)}, sets,
                num_bytes=case.num_bytes, num_flops=case.num_flops,
            )  # fmt: skip


if __name__ == "__main__":
    run_bench(main)
