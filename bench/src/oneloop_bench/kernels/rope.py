"""Head norms, rotation and cache write of one layer; cosines and sines of a step.

python -m oneloop_bench.kernels.rope [--sweep] [--json PATH]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.rope import ROPE, HeadNorms
from oneloop_kernels.ops.rope.triton import TRITON, Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop_kernels.ops.rope import RotaryStep

BLOCK_SIZE: Final = 16
DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's heads."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: bool

    def num_bytes(self, num_tokens: int, kv_dtype: torch.dtype = DTYPE) -> int:
        """Fewest bytes of one layer: qkv read, queries, keys and values written, angles and slots read."""
        wide = (2 * self.num_heads + 2 * self.num_kv_heads) * DTYPE.itemsize
        kept = 2 * self.num_kv_heads * kv_dtype.itemsize
        return num_tokens * ((wide + kept) * self.head_dim + self.head_dim * 4 + 8)


MODELS: Final = (
    Heads("llama8b", 32, 8, 128, norms=False),
    Heads("qwen06b", 16, 8, 128, norms=True),
    Heads("smollm2", 9, 3, 64, norms=False),
)
TOKENS: Final = (1, 8, 64, 256, 512, 2048, 4096, 8192)
SWEPT_TOKENS: Final = (1, 256, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Layer:
    """Inputs of one launch."""

    qkv: torch.Tensor
    rotary: RotaryStep
    norms: HeadNorms | None
    cache: torch.Tensor
    slots: torch.Tensor


def make_layer(
    heads: Heads, num_tokens: int, device: torch.device, *, by_head: bool, kv_dtype: torch.dtype = DTYPE
) -> Layer:
    """Random inputs; the tokens' slots lie in random blocks, a block's positions in order, as in a prefill."""
    total = heads.num_heads + 2 * heads.num_kv_heads
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    shape = [num_blocks, BLOCK_SIZE, 2 * heads.num_kv_heads, heads.head_dim]
    if by_head:
        shape[1], shape[2] = shape[2], shape[1]
    cache = torch.randn(shape, device=device).to(kv_dtype)
    blocks = torch.randperm(num_blocks, device=device)
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[:num_tokens]
    frequencies = 1.0 / 5e5 ** (torch.arange(0, heads.head_dim, 2, device=device) / heads.head_dim)
    weight = torch.rand(2, heads.head_dim, device=device).to(DTYPE)
    return Layer(
        qkv=torch.randn(num_tokens, total, heads.head_dim, device=device).to(DTYPE),
        rotary=TRITON.angles(frequencies, 1.0, DTYPE)(torch.arange(num_tokens, device=device) + 1000),
        norms=HeadNorms(weight, 1e-6) if heads.norms else None,
        cache=cache.transpose(1, 2) if by_head else cache,
        slots=slots,
    )


def run(layer: Layer, tile: Tile | None = None) -> None:
    """One launch."""
    TRITON.rotate_and_store(layer.qkv, layer.rotary, layer.norms, layer.cache, layer.slots, tile=tile)


def candidates() -> dict[str, Tile]:
    """Tiles worth trying."""
    once = ((1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 16))
    tiles = [Tile(tokens, heads, vectors) for tokens, heads in once for vectors in (1, 2)]
    tiles += [Tile(*shape, 1, steps) for shape in ((2, 8), (4, 4), (16, 1)) for steps in (2, 4)]
    return {f"{tile.tokens}x{tile.heads}/{tile.vectors}·{tile.steps}": tile for tile in tiles}


def measure_angles(bench: KernelBench) -> None:
    """Cosines and sines of a step, beside the reference's."""
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2, device=bench.device) / 128)
    ours = TRITON.angles(frequencies, 1.0, DTYPE)
    theirs = ROPE.resolve(bench.device, DTYPE, name="reference").angles(frequencies, 1.0, DTYPE)
    for num_tokens in (1, 256, 8192) if not bench.smoke else (2,):
        moved = num_tokens * (4 + 128 * 4)
        if not bench.wanted(f"angles {num_tokens}"):
            continue

        def positions(num_tokens: int = num_tokens) -> torch.Tensor:
            return torch.randint(0, 131072, (num_tokens,), dtype=torch.int32, device=bench.device)

        sets = bench.sets(positions, num_bytes=moved)
        bench.measure(f"angles {num_tokens}", ours, sets, num_bytes=moved)
        bench.measure(f"angles {num_tokens} torch", theirs, sets)


def measure_layers(bench: KernelBench, heads: Heads, tokens: Sequence[int], *, by_head: bool) -> None:
    """One model at every number of tokens."""
    for num_tokens in tokens:
        name = f"{heads.name} {num_tokens} {'by head' if by_head else 'by position'}"
        if not bench.wanted(name):
            continue
        moved = heads.num_bytes(num_tokens)
        make = partial(make_layer, heads, num_tokens, bench.device, by_head=by_head)
        sets = bench.sets(make, num_bytes=moved)
        if bench.sweep:
            launches: dict[str, Callable[[Layer], object]] = {
                key: partial(run, tile=tile) for key, tile in candidates().items()
            }
            bench.best(name, launches, sets, num_bytes=moved)
        else:
            bench.measure(name, run, sets, num_bytes=moved)


def main() -> None:
    """See the module."""
    arguments = bench_arguments(__doc__)
    bench = KernelBench("rope", arguments)
    tokens: Sequence[int] = SWEPT_TOKENS if bench.sweep else TOKENS
    if bench.smoke:
        tokens = (1, 8)
    for heads in MODELS[:2] if bench.sweep else MODELS:
        measure_layers(bench, heads, tokens, by_head=True)
    if not bench.sweep:
        measure_layers(bench, MODELS[0], (256, 8192) if not bench.smoke else (8,), by_head=False)
        measure_angles(bench)
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
