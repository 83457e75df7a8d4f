"""How fast the card reads memory when it does nothing else: the ceiling of kernels that write little."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from oneloop_bench.kernels.timing import event_times
from oneloop_kernels.launch import num_sms

_SIZE: Final = 1 << 29
"""Elements of float32: 2 GiB, far beyond the L2 cache."""
_WAYS: Final = ((4096, 4, 8), (8192, 2, 8), (4096, 8, 4), (8192, 4, 16))
"""Elements of a block, programs per multiprocessor, warps. Which is best differs from card to card."""


@triton.jit
def read_kernel(x_ptr, sums_ptr, size, BLOCK: tl.constexpr):
    """Each program adds up every so many-th block, so that no load can be left out. size: a multiple of BLOCK."""
    total = tl.zeros((BLOCK,), tl.float32)
    lanes = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        total += tl.load(x_ptr + first + lanes)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def compile_ways(device: torch.device) -> None:
    """Launch each way once on little memory, for `compiling_ahead`."""
    x = torch.zeros(1 << 20, device=device)
    for way in _WAYS:
        _launch(x, *way)


def read_rate() -> float:
    """Bytes per second of the fastest way."""
    x = torch.randn(_SIZE, device="cuda")
    times = [statistics.median(event_times(partial(_launch, x, *way), 10)) for way in _WAYS]
    return x.nbytes / min(times)


def _launch(x: torch.Tensor, block: int, programs_per_sm: int, num_warps: int) -> None:
    grid = programs_per_sm * num_sms(x.device)
    sums = torch.empty(grid, device=x.device)
    read_kernel[(grid,)](x, sums, x.numel(), BLOCK=block, num_warps=num_warps)
