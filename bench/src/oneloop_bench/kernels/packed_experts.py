"""Experts of a few bits: the block of Qwen 3 30B-A3B and its parts, by the kernel of any card and by Hopper's.

`python -m oneloop_bench.kernels.packed_experts [--only TEXT]`, names as "gptq 0032 whole", "q4_k 2048 h4 gate_up":
GPTQ's 4 bits (symmetric, groups of 128) and GGUF's Q4_K; "h4": Hopper's kernel, four stages deep. Beside each is what
it takes to read the experts that are asked for. Plans by Hopper's kernel belong into `oneloop_kernels/ops/moe/configs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from oneloop.device.cpus import usable_cpus
from oneloop_bench.kernels.moe import (
    SHAPES,
    SMOKE_SHAPE,
    SMOKE_TOKENS,
    Inputs,
    floors,
    make_inputs,
    mean_active,
    parts_of,
    prepare,
)
from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.moe.launches import shape_of
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.plans import plan_of_packed
from oneloop_kernels.ops.packed_linear.packing import Numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop_kernels.ops.moe.plans import Shape
    from oneloop_kernels.ops.packed_linear import Shift

TOKENS: Final = (1, 32, 128, 2048)
STAGES: Final = (0, 4, 6)
"""Of Hopper's kernel; 0: by the kernel of any card."""


class Kind(NamedTuple):
    """Numbers of 4 bits."""

    shift: Shift
    group_size: int


KINDS: Final = {"gptq": Kind("none", 128), "q4_k": Kind("offset", 32)}


def packed_inputs(kind: Kind, shape: Shape, num_tokens: int, device: torch.device) -> Inputs:
    """Random numbers, of which all experts have the same."""
    plain = make_inputs(shape, num_tokens, device)
    experts = plain.call.experts._replace(
        gate_up=_stack(kind, shape.num_experts, 2 * shape.width, shape.hidden, 2, plain.call.x),
        down=_stack(kind, shape.num_experts, shape.hidden, shape.width, 1, plain.call.x),
    )
    return Inputs(plain.call._replace(experts=experts), plain.num_active)


def _stack(
    kind: Kind, num_experts: int, rows: int, columns: int, halves: int, x: torch.Tensor
) -> PackedStack:
    stack = PackedStack.empty(
        num_experts,
        rows,
        columns,
        halves=halves,
        bits=4,
        shift=kind.shift,
        group_size=kind.group_size,
        ordered=False,
        dtype=x.dtype,
        device=x.device,
    )
    groups = rows // halves, -(-columns // kind.group_size)
    scales = torch.rand(groups, device=x.device).mul_(0.008)
    values = torch.randint(0, 16, (rows // halves, columns), dtype=torch.uint8, device=x.device)
    shifts = None if kind.shift == "none" else torch.zeros(groups, device=x.device)
    for half in range(halves):
        stack.put(0, Numbers(values, scales, 4, kind.group_size, kind.shift, shifts), half)
    for tensor in (stack.words, stack.params):
        tensor[1:] = tensor[:1]
    return stack


def measure(
    bench: KernelBench,
    kind: str,
    shape: Shape,
    num_tokens: int,
    all_stages: Sequence[int],
    workers: CompileWorkers | None,
) -> None:
    """Every kernel and its parts. workers: who compiles beside each other, on a GPU."""
    names = {stages: f"{kind} {num_tokens:04d}" + (f" h{stages}" if stages else "") for stages in all_stages}
    parts = floors(shape, num_tokens, 1)
    if not any(bench.wanted(f"{name} {part}") for name in names.values() for part in parts):
        return
    per_expert = 3 * shape.hidden * shape.width // 2 * min(shape.num_experts, num_tokens * shape.top_k)
    sets = bench.sets(
        lambda: packed_inputs(KINDS[kind], shape, num_tokens, bench.device), num_bytes=per_expert
    )
    active, call = mean_active(sets), sets[0].call
    counted = floors(shape, num_tokens, active / 4)  # of the weights, which are of 4 bits and not of 16
    plans = {
        stages: plan_of_packed(num_tokens, shape_of(call), hopper_stages=stages) for stages in all_stages
    }
    if bench.device.type == "cuda":
        with compiling_ahead(usable_cpus(), workers):
            for plan in plans.values():
                parts_of(plan)["whole"](prepare(sets[0], plan))
    for stages, plan in plans.items():
        prepared = [prepare(one, plan) for one in sets]
        for part, launch in parts_of(plan).items():
            num_bytes, num_flops = counted[part]
            bench.measure(
                f"{names[stages]} {part}", launch, prepared, num_bytes=num_bytes, num_flops=num_flops
            )


def main() -> None:
    """Run the bench."""
    bench = KernelBench("packed_experts", bench_arguments(__doc__))
    on_gpu = bench.device.type == "cuda"
    shape = SHAPES["qwen30ba3b"] if on_gpu else SMOKE_SHAPE
    workers = CompileWorkers.start(usable_cpus()) if on_gpu else None
    try:
        for kind in KINDS:
            for num_tokens in TOKENS if on_gpu else SMOKE_TOKENS:
                measure(bench, kind, shape, num_tokens, STAGES if on_gpu else STAGES[:1], workers)
    finally:
        if workers is not None:
            workers.close()
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
