"""RMS norm (alone, of heads, with the residual) and the gated activation: share of the memory's bandwidth.

`python -m oneloop_bench.kernels.norm [--sweep] [--only TEXT]`. Names: "norm 4096 x 04096" is size x rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.rms_norm import triton as norm_kernel
from oneloop_kernels.ops.silu_mul import triton as silu_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS: Final = (1, 16, 256, 4096, 8192)
SIZES: Final = (1024, 4096)
HEADS: Final = ((40, 128), (24, 128))
"""Query and key heads of a token, head_dim: llama8b's, qwen06b's."""
ACTIVATIONS: Final = (14336, 3072)
EPS: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Inputs:
    """x: [rows, size] or [rows, heads, size]."""

    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor | None
    out: torch.Tensor


def make(device: torch.device, *shape: int, residual: bool = False) -> Inputs:
    """Random inputs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device)

    x = normal(*shape)
    return Inputs(x, normal(shape[-1]), normal(*shape) if residual else None, torch.empty_like(x))


def norms(bench: KernelBench, name: str, shape: tuple[int, ...], *, residual: bool = False) -> None:
    """One shape; with --sweep rows and warps per program."""
    if not bench.wanted(name):
        return
    num_bytes = 2 * torch.Size(shape).numel() * (4 if residual else 2)
    sets = bench.sets(lambda: make(bench.device, *shape, residual=residual), num_bytes=num_bytes)

    def normalise(one: Inputs) -> torch.Tensor:
        return norm_kernel.rms_norm(one.x, one.weight, EPS, residual=one.residual)

    if not bench.sweep:
        bench.measure(name, normalise, sets, num_bytes=num_bytes)
        return
    ways: dict[str, Callable[[Inputs], object]] = {"as it is": normalise}
    for rows in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8, 16):
            elements = rows * shape[-1] / (32 * warps)
            if 8 <= elements <= 64:

                def launch(one: Inputs, rows: int = rows, warps: int = warps) -> None:
                    norm_kernel.launch(
                        one.x, one.weight, EPS, one.residual, one.out, rows=rows, num_warps=warps
                    )

                ways[f"{rows} rows, {warps} warps"] = launch
    bench.best(name, ways, sets, num_bytes=num_bytes)


def activations(bench: KernelBench, num_tokens: int, size: int) -> None:
    """One shape; with --sweep columns and warps per program."""
    name = f"silu_mul {size} x {num_tokens:05d}"
    if not bench.wanted(name):
        return
    num_bytes = 2 * num_tokens * size * 3
    sets = bench.sets(lambda: make(bench.device, num_tokens, 2 * size), num_bytes=num_bytes)
    if not bench.sweep:
        bench.measure(name, lambda one: silu_kernel.silu_mul(one.x), sets, num_bytes=num_bytes)
        return
    ways: dict[str, Callable[[Inputs], object]] = {"as it is": lambda one: silu_kernel.silu_mul(one.x)}
    for block in (512, 1024, 2048, 4096, 8192):
        for warps in (2, 4, 8, 16):
            if 4 <= block / (32 * warps) <= 32:

                def launch(one: Inputs, block: int = block, warps: int = warps) -> None:
                    silu_kernel.launch(
                        one.x,
                        one.out.view(-1)[: num_tokens * size].view(num_tokens, size),
                        block=block,
                        num_warps=warps,
                    )

                ways[f"{block} columns, {warps} warps"] = launch
    bench.best(name, ways, sets, num_bytes=num_bytes)


def main() -> None:
    """Run the bench."""
    bench = KernelBench("norm", bench_arguments(__doc__))
    rows = ROWS if bench.device.type == "cuda" else ROWS[:2]
    for num_tokens in rows:
        for size in SIZES:
            norms(bench, f"norm {size} x {num_tokens:05d}", (num_tokens, size))
        for heads, size in HEADS:
            norms(bench, f"norm of {heads} heads {size} x {num_tokens:05d}", (num_tokens, heads, size))
        norms(bench, f"add and norm 4096 x {num_tokens:05d}", (num_tokens, 4096), residual=True)
        for size in ACTIVATIONS:
            activations(bench, num_tokens, size)
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
