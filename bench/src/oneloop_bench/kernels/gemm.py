"""cuBLAS on the shapes of two models: which way round weights should lie, and how a residual is best added.

`python -m oneloop_bench.kernels.gemm [--only TEXT]`, 1 to 8192 rows. Names: "llama8b down 00128 rows W[out,in]" and
"… W[in,out]": the storage order of the weight; "… addmm" and "… mm, add": the residual by cuBLAS or after it. About
80 s in all; "--only 00128" or "--only llama8b" takes a part. The heads are measured up to 512 rows. --sweep adds the
fused kernel's best plan at 32, 64 and 128 rows, where cuBLAS may fall short.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.linear import (
    MODELS,
    Map,
    candidates,
    compile_all,
    make_inputs,
    short,
    shrunken,
    way,
)
from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.linear.plans import can_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop_bench.kernels.linear import Inputs

ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SMOKE_ROWS: Final = (1, 32)
SPLIT_ROWS: Final = (32, 64, 128)
MAX_HEAD_ROWS: Final = 512


def plain(one: Map) -> Map:
    """The product alone."""
    return replace(one, norm=False, gated=False, residual=False)


def turned(inputs: Inputs) -> Inputs:
    """The same weights stored [in, out]."""
    return replace(inputs, weight=inputs.weight.t().contiguous().t())


def product(inputs: Inputs) -> torch.Tensor:
    """x · Wᵀ into new memory."""
    return torch.mm(inputs.x, inputs.weight.t())


def add_apart(inputs: Inputs) -> torch.Tensor:
    """residual += x · Wᵀ in two kernels."""
    assert inputs.residual is not None
    return inputs.residual.add_(torch.mm(inputs.x, inputs.weight.t()))


def measure(bench: KernelBench, model: str, one: Map, num_tokens: int) -> None:
    """Both orders of the weight; with a residual also both ways to add it."""
    ways: dict[str, tuple[Map, bool, Callable[[Inputs], object]]] = {
        "W[out,in]": (plain(one), False, product),
        "W[in,out]": (plain(one), True, product),
    }
    if one.residual:
        ways["addmm"] = (one, False, lambda inputs: inputs.apart())
        ways["mm, add"] = (one, False, add_apart)
    for label, (kind, turn, launch) in ways.items():
        name = f"{model} {one.name} {num_tokens:05d} rows {label}"
        if not bench.wanted(name):
            continue

        def make(kind: Map = kind, turn: bool = turn) -> Inputs:
            inputs = make_inputs(kind, num_tokens, bench.device)
            return turned(inputs) if turn else inputs

        num_bytes = kind.num_bytes(num_tokens)
        sets = bench.sets(make, num_bytes=num_bytes)
        flops = 2 * num_tokens * one.in_size * one.out_size
        bench.measure(name, launch, sets, num_bytes=num_bytes, num_flops=flops)


def fused(bench: KernelBench, model: str, one: Map, num_tokens: int) -> None:
    """The fused kernel's best plan for more rows than are few."""
    name = f"{model} {one.name} {num_tokens:05d} rows fused"
    if not bench.wanted(name):
        return
    num_bytes = one.num_bytes(num_tokens)
    sets = bench.sets(lambda: make_inputs(one, num_tokens, bench.device), num_bytes=num_bytes)
    plans = {short(plan): plan for plan in candidates(one, num_tokens, streaming=can_stream(bench.device))}
    compile_all([sets[0].fused(plan) for plan in plans.values()])
    flops = 2 * num_tokens * one.in_size * one.out_size
    bench.best(
        name, {key: way(plan) for key, plan in plans.items()}, sets, num_bytes=num_bytes, num_flops=flops
    )


def main() -> None:
    """Run the bench."""
    bench = KernelBench("gemm", bench_arguments(__doc__))
    on_gpu = bench.device.type == "cuda"
    for model, maps in MODELS.items():
        for one in maps if on_gpu else tuple(shrunken(one) for one in maps):
            for num_tokens in ROWS if on_gpu else SMOKE_ROWS:
                if one.name != "head" or num_tokens <= MAX_HEAD_ROWS:
                    measure(bench, model, one, num_tokens)
            if bench.sweep and on_gpu:
                for num_tokens in SPLIT_ROWS:
                    fused(bench, model, one, num_tokens)
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
