"""Block copies in all layers, and the beginning of a step: angles, and rows of the embedding table.

python -m oneloop_bench.kernels.kv_cache [--sweep] [--json PATH]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.kv_cache.triton import TRITON
from oneloop_kernels.ops.rope import ROPE
from oneloop_kernels.registry import TRITON as TRITON_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop_kernels.ops.rope import Angles, RopeOps

NUM_LAYERS: Final = 32
BLOCK_SHAPE: Final = (16, 16, 128)
"""Block size, 2 · 8 key and value heads, head size: 64 KiB of bfloat16."""
BLOCK_BYTES: Final = 2 * 16 * 16 * 128
MAX_COPIES: Final = 1024
"""Entries of the step's lists; a count on the device says how many are valid."""
DTYPE: Final = torch.bfloat16
VOCAB_SIZE: Final = 128256
HIDDEN_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class Pairs:
    """Block numbers of one launch."""

    source: torch.Tensor
    target: torch.Tensor
    count: torch.Tensor


def make_pairs(num_pairs: int, num_blocks: int, device: torch.device) -> Pairs:
    """Random distinct blocks."""
    blocks = torch.randperm(num_blocks, device=device)[: 2 * num_pairs].to(torch.int32)
    source, target = torch.zeros(2, MAX_COPIES, dtype=torch.int32, device=device)
    source[:num_pairs], target[:num_pairs] = blocks[:num_pairs], blocks[num_pairs:]
    return Pairs(source, target, torch.tensor([num_pairs], device=device))


def make_cache(num_layers: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    """All layers, filled with random numbers."""
    cache = torch.empty(num_layers, num_blocks, *BLOCK_SHAPE, dtype=DTYPE, device=device)
    for layer in cache:
        layer.copy_(torch.randn(BLOCK_SHAPE, device=device))
    return cache


def copy(
    cache: torch.Tensor,
    pairs: Pairs,
    piece_bytes: int = 8192,
    programs_per_sm: int = 8,
    num_warps: int = 4,
) -> None:
    """One launch."""
    TRITON.copy_blocks(
        cache, pairs.source, pairs.target, pairs.count,
        piece_bytes=piece_bytes, programs_per_sm=programs_per_sm, num_warps=num_warps,
    )  # fmt: skip


def measure_copies(bench: KernelBench) -> None:
    """One pair (a fork's last block) to many. All sets share one cache, far larger than the L2 cache."""
    num_blocks = 4096 if not bench.smoke else 16
    num_layers = NUM_LAYERS if not bench.smoke else 2
    cache = make_cache(num_layers, num_blocks, bench.device)
    run = partial(copy, cache)
    for num_pairs in (0, 2) if bench.smoke else (1, 64, 512) if bench.sweep else (0, 1, 8, 64, 512):
        name = f"copy {num_pairs} pairs x {num_layers} layers"
        if not bench.wanted(name):
            continue
        moved = 2 * num_pairs * cache[:, 0].nbytes
        make = partial(make_pairs, num_pairs, num_blocks, bench.device)
        sets = bench.sets(make, num_bytes=max(moved, 1 << 20))
        if bench.sweep:
            launches: dict[str, Callable[[Pairs], object]] = {
                f"{piece}/{programs}/{warps}": partial(
                    run, piece_bytes=piece, programs_per_sm=programs, num_warps=warps
                )
                for piece in (4096, 8192, 16384)
                for programs in (2, 4, 8, 16)
                for warps in (4, 8)
                if programs * warps <= 64
            }
            bench.best(name, launches, sets, num_bytes=moved)
        else:
            bench.measure(name, run, sets, num_bytes=moved)


def make_table(num_rows: int, device: torch.device) -> torch.Tensor:
    """Embeddings."""
    return torch.randn(num_rows, HIDDEN_SIZE, device=device).to(DTYPE)


def make_token_ids(num_tokens: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """Any of the table's."""
    return torch.randint(0, num_rows, (num_tokens,), dtype=torch.int32, device=device)


def angles_of(ops: RopeOps, device: torch.device) -> Angles:
    """Of heads of 128."""
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2, device=device) / 128)
    return ops.angles(frequencies, 1.0, DTYPE)


def begin(angles: Angles, table: torch.Tensor, token_ids: torch.Tensor) -> object:
    """Angles of a step's positions (the ids, taken as numbers), and its rows of the table."""
    return angles.with_embedding(token_ids, token_ids, table)


def beginning_bytes(num_tokens: int) -> int:
    """Rows read and written, angles written."""
    return num_tokens * (2 * HIDDEN_SIZE * DTYPE.itemsize + 128 * 4)


def measure_beginning(bench: KernelBench) -> None:
    """Angles and rows of llama8b's table."""
    rows = VOCAB_SIZE if not bench.smoke else 100
    table = make_table(rows, bench.device)
    for name in (TRITON_NAME, "reference"):
        angles = angles_of(ROPE.resolve(bench.device, DTYPE, name=name), bench.device)
        for num_tokens in (1, 256, 8192) if not bench.smoke else (2,):
            moved = beginning_bytes(num_tokens)
            sets = bench.sets(partial(make_token_ids, num_tokens, rows, bench.device), num_bytes=moved)
            bench.measure(
                f"beginning {num_tokens} {name}", partial(begin, angles, table), sets, num_bytes=moved
            )


def main() -> None:
    """See the module."""
    bench = KernelBench("kv_cache", bench_arguments(__doc__))
    measure_copies(bench)
    if not bench.sweep:
        measure_beginning(bench)
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
