"""How many rows are few, and how their kernel is cut: measured per card and shape, with a rule for the rest.

`python -m oneloop_bench.kernels.linear --sweep` prints lines of TUNED.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.launch import card_name, generation, num_sms, of_card
from oneloop_kernels.ops.linear import NUM_TICKETS

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PLANNED_ROWS: Final = 512
"""Beyond, cuBLAS is taken without a look."""
MAX_FEW_ROWS: Final = 16
"""By the rule: up to here one kernel does everything, beyond norm, cuBLAS and activation follow each other."""
MAX_REGISTER_ROWS: Final = 2
"""By the rule: up to here products are taken in registers, beyond by tensor cores."""

MAX_STREAMING_ROWS: Final = 64
"""By the rule, on Hopper: up to here weights stream through shared memory."""

DENSE_BLOCK_K: Final = 64
"""Of `triton.dense`: columns of x in a copy, of 16 bits."""

_STAGES_BYTES: Final = 208 << 10
_MAX_STAGES: Final = 11
_HOPPER: Final = 9
_MIN_TILE: Final = 4096
"""By the rule: weights of a program in registers, at least, even if multiprocessors stay idle."""


@dataclass(frozen=True, slots=True)
class FewRowsPlan:
    """Constants of `triton.few_rows.few_rows_kernel`.

    use_dot: tensor cores, else registers. block_n, block_k: weights of a tile (twice that when gated). split_k:
    programs that share a sum. num_stages: tiles under way (with use_dot). prefetch: bytes of each weight row asked for
    before the kernel's turn has come (with use_dot).
    """

    use_dot: bool
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    prefetch: int = 0

    def num_tiles(self, out_size: int) -> int:
        """out_size: of the result."""
        return -(-out_size // self.block_n)

    def prefetch_bytes(self, weight: torch.Tensor) -> int:
        """prefetch, or 0 where the instruction could not take it: 16-byte pieces that lie inside of each split."""
        row_bytes = weight.stride(0) * weight.itemsize
        split_bytes = weight.shape[1] // self.split_k * weight.itemsize
        fits = weight.stride(1) == 1 and row_bytes % 16 == 0 and weight.data_ptr() % 16 == 0
        even = weight.shape[1] % (self.block_k * self.split_k) == 0 and self.prefetch <= split_bytes
        return self.prefetch if fits and even else 0

    def block_m(self, num_tokens: int) -> int:
        """Rows of x that a tile has room for."""
        return max(8 if self.use_dot else 1, 1 << (num_tokens - 1).bit_length())


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Constants of `triton.stream.stream_kernel`, for Hopper.

    block_n: results of a tile. block_k: columns of a copy. num_stages: copies under way. programs: in the grid, at
    most (0: by a rule). most_rows: of x in a tile. whole: no tile is cut, so that each result is one sum.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    programs: int = 0
    most_rows: int = 128
    whole: bool = False

    def num_tiles(self, num_tokens: int, out_size: int) -> int:
        """out_size: of the result."""
        return -(-out_size // self.block_n) * -(-num_tokens // self.block_m(num_tokens))

    def grid(self, device: torch.device, num_tiles: int, num_blocks: int) -> int:
        """Programs for so many tiles of so many blocks.

        The rule: whole tiles, or pieces of one tile, unless that leaves more than a fifth of the multiprocessors idle.
        To put tiles together from pieces of several programs takes longer than a few idle ones cost.
        """
        sms = num_sms(device)
        programs = self.programs
        if self.whole:
            programs = min(programs or sms, num_tiles)
            return -(-num_tiles // -(-num_tiles // programs))
        if not programs:
            if num_tiles >= sms:
                programs = -(-num_tiles // -(-num_tiles // sms))
            else:
                programs = num_tiles * (sms // num_tiles)
            if 5 * programs < 4 * sms and 2 * num_tiles < sms:
                programs = sms
        return min(programs, num_tiles * num_blocks)

    def block_m(self, num_tokens: int) -> int:
        """Rows of x of a tile: at least 8 for each warp that stands beside another."""
        least = max(8, 8 * 16 * self.num_warps // self.block_n)
        return min(self.most_rows, max(least, 1 << (num_tokens - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class DensePlan:
    """Constants of `triton.dense.dense_kernel`, for Hopper.

    widths: of a chunk of results, powers of two, one to three. num_stages: copies under way. block_m: rows of x of a
    tile, 64 or 128. pieces: of the columns of x that have sums of their own; they divide the blocks of DENSE_BLOCK_K.
    """

    widths: tuple[int, ...]
    num_stages: int
    block_m: int = 128
    pieces: int = 1

    @property
    def three_widths(self) -> tuple[int, int, int]:
        """With zeros for those that are not there."""
        first, second, third = (*self.widths, 0, 0)[:3]
        return first, second, third

    def grid(self, device: torch.device, num_tokens: int, out_size: int) -> int:
        """Programs: each has the same number of tiles, or one less. out_size: of the result."""
        token_tiles = -(-num_tokens // self.block_m)
        num_chunks = -(-out_size // sum(self.widths))
        each = -(-num_chunks // max(1, num_sms(device) // token_tiles))
        return token_tiles * -(-num_chunks // each)


Plan = FewRowsPlan | StreamPlan | DensePlan
Shape = tuple[int, int, bool]
"""Rows of weight, columns of weight, gated."""
Choices = tuple[tuple[int, Plan | None], ...]
"""(up to that many rows, the plan; None: cuBLAS), ascending. More rows than the last entry's: cuBLAS."""

_H200: Final[Mapping[Shape, Choices]] = MappingProxyType(
    {
        (6144, 4096, False): (
            (8, StreamPlan(64, 128, 11, programs=96)),
            (16, StreamPlan(64, 128, 10, programs=96)),
            (32, StreamPlan(64, 128, 8, programs=96)),
            (64, StreamPlan(64, 128, 6, programs=96)),
        ),
        (4096, 4096, False): (
            (8, StreamPlan(64, 128, 5, programs=256)),
            (16, StreamPlan(64, 128, 5, programs=128)),
            (32, StreamPlan(64, 128, 8, programs=128)),
            (64, StreamPlan(64, 128, 6, programs=128)),
            (128, DensePlan((32,), 10)),
            (256, DensePlan((64,), 8)),
        ),
        (28672, 4096, True): (
            (8, StreamPlan(64, 128, 3, programs=224)),
            (16, StreamPlan(128, 128, 3, programs=112)),
            (32, StreamPlan(64, 128, 5, programs=112)),
            (64, StreamPlan(64, 128, 4, programs=112)),
            (128, DensePlan((64, 32, 16), 4)),
            (256, DensePlan((128,), 4)),
        ),
        (4096, 14336, False): (
            (8, StreamPlan(128, 128, 6, programs=128)),
            (16, StreamPlan(64, 128, 5, programs=256)),
            (32, StreamPlan(64, 128, 8, programs=128)),
            (64, StreamPlan(64, 128, 6, programs=128)),
        ),
        (128256, 4096, False): (
            (8, StreamPlan(128, 128, 3, programs=264)),
            (64, StreamPlan(128, 128, 4, programs=132)),
        ),
        (5120, 2048, False): (
            (8, StreamPlan(64, 128, 11, programs=80)),
            (16, StreamPlan(64, 128, 10, programs=80)),
            (32, StreamPlan(64, 128, 8, programs=80)),
            (64, StreamPlan(64, 128, 6, programs=80)),
            (128, DensePlan((64,), 8)),
        ),
        (2048, 4096, False): (
            (8, StreamPlan(64, 128, 5, programs=256)),
            (16, StreamPlan(64, 128, 10, programs=128)),
            (32, StreamPlan(64, 128, 8, programs=128)),
            (64, StreamPlan(64, 128, 6, programs=128)),
            (128, StreamPlan(64, 128, 6, programs=64, most_rows=64)),
        ),
        (4096, 1024, False): (
            (8, StreamPlan(64, 128, 5, programs=64)),
            (16, StreamPlan(128, 128, 6, programs=64, most_rows=8)),
            (32, StreamPlan(64, 128, 8, programs=64)),
            (64, StreamPlan(64, 128, 6, programs=64)),
            (128, DensePlan((32,), 10)),
        ),
        (1024, 2048, False): (
            (8, StreamPlan(64, 128, 11, programs=64)),
            (16, StreamPlan(64, 128, 5, programs=128, most_rows=16)),
            (32, StreamPlan(64, 128, 8, programs=64)),
            (64, StreamPlan(64, 128, 8, programs=64, most_rows=32)),
            (128, StreamPlan(64, 128, 6, programs=128, most_rows=64)),
            (256, StreamPlan(64, 128, 3, programs=128, most_rows=64)),
            (512, DensePlan((64,), 11, block_m=64)),
        ),
        (6144, 1024, True): (
            (8, StreamPlan(64, 128, 6, programs=48)),
            (16, StreamPlan(64, 128, 6, programs=96, most_rows=8)),
            (64, DensePlan((32,), 11, block_m=64)),
            (128, DensePlan((64,), 9, block_m=64)),
            (256, DensePlan((32, 16), 7)),
            (512, DensePlan((64, 32), 5)),
        ),
        (1024, 3072, False): (
            (8, StreamPlan(64, 128, 11, programs=64)),
            (16, StreamPlan(64, 128, 5, programs=128, most_rows=16)),
            (32, StreamPlan(64, 128, 8, programs=96)),
            (64, StreamPlan(64, 128, 8, programs=64, most_rows=32)),
            (128, StreamPlan(64, 128, 3, programs=128, most_rows=64)),
        ),
        (151936, 1024, False): (
            (8, StreamPlan(128, 128, 6, programs=132)),
            (64, StreamPlan(128, 128, 4, programs=132)),
        ),
    }
)
"""Measured in chains of whole layers of Llama 3 8B and Qwen 3 0.6B, with programmatic dependent launch; the maps of
Qwen 3 30B-A3B (5,120 × 2,048 and 2,048 × 4,096) by themselves at 1 and 128 rows, between as the rule says."""

TUNED: Final[Mapping[str, Mapping[Shape, Choices]]] = MappingProxyType({"NVIDIA H200": _H200})
"""Beginning of the card's name → shape → choices, for 16-bit types."""


def plan_for(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    shape: Shape,
    *,
    may_split: bool,
    may_stream: bool = False,
) -> Plan | None:
    """The plan for that many rows of x; None: norm, cuBLAS and activation one after the other.

    may_split: whether there are tickets. Without them a plan that splits is taken without the split, and none streams.
    may_stream: whether the tensors are as `gpu.may_stream` asks.
    """
    if 0 < num_tokens <= MAX_PLANNED_ROWS:
        return _plan_for(device, dtype, num_tokens, shape, may_split, may_stream)
    return None


@cache
def _plan_for(
    device: torch.device, dtype: torch.dtype, num_tokens: int, shape: Shape, may_split: bool, may_stream: bool
) -> Plan | None:
    tuned = (of_card(card_name(device), TUNED) or {}).get(shape)
    plan: Plan | None
    if tuned is None or dtype.itemsize != 2:
        plan = _streaming_by_rule(device, dtype, num_tokens, shape) or _by_rule(
            device, dtype, num_tokens, shape
        )
    else:
        plan = next((plan for most, plan in tuned if num_tokens <= most), None)
    if isinstance(plan, DensePlan) and not may_stream:
        plan = None
    elif isinstance(plan, DensePlan):
        return plan
    if isinstance(plan, StreamPlan):
        if may_stream and may_split and plan.num_tiles(num_tokens, _out_size(shape)) <= NUM_TICKETS:
            return plan
        plan = _by_rule(device, dtype, num_tokens, shape)
    if plan is None or plan.split_k == 1 or (may_split and plan.num_tiles(_out_size(shape)) <= NUM_TICKETS):
        return plan
    return replace(plan, split_k=1)


def _streaming_by_rule(
    device: torch.device, dtype: torch.dtype, num_tokens: int, shape: Shape
) -> StreamPlan | None:
    """On Hopper, for as many rows as weights are still what takes the time: all of shared memory under way."""
    if not can_stream(device) or dtype.itemsize != 2 or num_tokens > MAX_STREAMING_ROWS:
        return None
    halves = 2 if shape[2] else 1
    plan = StreamPlan(block_n=64, block_k=128, num_stages=2)
    stage_bytes = 2 * plan.block_k * (halves * plan.block_n + plan.block_m(num_tokens))
    return replace(plan, num_stages=min(_MAX_STAGES, _STAGES_BYTES // stage_bytes))


def _by_rule(device: torch.device, dtype: torch.dtype, num_tokens: int, shape: Shape) -> FewRowsPlan | None:
    """Tiles of about 16 KB, and enough programs that every multiprocessor has two or more."""
    sms, (_, in_size, gated) = num_sms(device), shape
    out_size = _out_size(shape)
    if num_tokens <= MAX_REGISTER_ROWS:
        block_k = min(1024, max(128, 1 << (in_size - 1).bit_length()))
        block_n = 4 if gated or num_tokens > 1 else 8
        while block_n < 64 and block_n * in_size < _MIN_TILE:
            block_n *= 2
        while block_n > 1 and out_size // block_n < 4 * sms and block_n * in_size > _MIN_TILE:
            block_n //= 2
        return FewRowsPlan(use_dot=False, block_n=block_n, block_k=block_k)
    if num_tokens > MAX_FEW_ROWS or dtype.itemsize != 2:
        return None
    num_tiles = -(-out_size // 64)
    split_k = 1
    while split_k < 8 and num_tiles * split_k < 2 * sms and in_size // (2 * split_k) >= 512:
        split_k *= 2
    stages = 3 if gated else 4  # two programs then share a multiprocessor
    return FewRowsPlan(True, block_n=64, block_k=128, split_k=split_k, num_stages=stages, prefetch=512)


def _out_size(shape: Shape) -> int:
    """Columns of the result."""
    return shape[0] // 2 if shape[2] else shape[0]


@cache
def can_stream(device: torch.device) -> bool:
    """Whether the device runs `triton.stream`: other generations have other tensor core instructions."""
    return generation(device) == _HOPPER
