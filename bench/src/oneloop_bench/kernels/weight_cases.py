"""Linear maps whose weights are kept in few bits, and those of the fixed order: cases of the kernel table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels import fp8_linear, linear, packed_linear
from oneloop_bench.kernels.kernel_case import OURS, KernelCase
from oneloop_kernels.ops.linear.gpu import linear as by_plan
from oneloop_kernels.ops.packed_linear.gpu import linear as unpacked
from oneloop_kernels.ops.packed_linear.gpu import written_out
from oneloop_kernels.ops.packed_linear.launches import prepared
from oneloop_kernels.order import fixed_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oneloop_kernels.ops.packed_linear import PackedWeight

MODEL: Final = "llama8b"
FP8_ROWS: Final = (1, 32, 128, 256, 2048)
W4_ROWS: Final = (1, 16, 64, 256)
GGUF_ROWS: Final = (1, 16)
FIXED_ROWS: Final = (1, 32, 256, 2048)
GGUF_KINDS: Final = ("q4_0", "q4_k", "q6_k", "q8_0")
BF16: Final = "bf16"


def all_cases(device: torch.device, *, small: bool) -> Iterator[KernelCase]:
    """In the order in which they are measured. small: sizes that the interpreter can do."""
    maps = linear.MODELS[MODEL]
    if small:
        maps = tuple(linear.shrunken(one) for one in maps)
    for one in maps[:4]:
        for num_tokens in FP8_ROWS[:1] if small else FP8_ROWS:
            yield _in_8_bits(one, num_tokens, device)
    for one in maps[:4]:
        for num_tokens in W4_ROWS[:1] if small else W4_ROWS:
            yield _in_4_bits(one, num_tokens, device)
    for one in maps[2:4]:
        for kind in GGUF_KINDS[:1] if small else GGUF_KINDS:
            for num_tokens in GGUF_ROWS[:1] if small else GGUF_ROWS:
                yield _of_gguf(one, num_tokens, kind, device)
    for one in maps:
        for num_tokens in FIXED_ROWS[:1] if small else FIXED_ROWS:
            yield _in_fixed_order(one, num_tokens, device)


def _name(one: linear.Map, num_tokens: int) -> str:
    return f"{MODEL} {one.name} {num_tokens} rows"


def _stand_in(one: linear.Map, kind: str) -> PackedWeight:
    """A weight that has its sizes and no memory."""
    return packed_linear.random_weight(one, kind, torch.bfloat16, torch.device("meta"))


def _in_8_bits(one: linear.Map, num_tokens: int, device: torch.device) -> KernelCase:
    """With the quantisation of the input, by row and by block; and in bf16."""
    ways = {OURS: "by row", "by block": "by block", BF16: BF16}
    return KernelCase(
        "GEMM of 8 bits",
        _name(one, num_tokens),
        partial(fp8_linear.make_inputs, one, num_tokens, device),
        {name: partial(_by, way) for name, way in ways.items()},
        fp8_linear.num_bytes(one, num_tokens, "by row"),
        "read",
        2.0 * num_tokens * one.in_size * one.out_size,
        compute="fp8",
    )


def _by(way: str) -> Callable[[fp8_linear.Inputs], object]:
    return lambda inputs: inputs.run(way)


def _in_4_bits(one: linear.Map, num_tokens: int, device: torch.device) -> KernelCase:
    """Groups of 128: what the family takes, and the weight written out for cuBLAS."""
    make = partial(packed_linear.make_inputs, one, num_tokens, "w4", device)
    return KernelCase(
        "GEMM of 4 bits",
        _name(one, num_tokens),
        make,
        {
            OURS: lambda: lambda inputs: unpacked(inputs.call),
            "written out": lambda: lambda inputs: written_out(prepared(inputs.call)),
        },
        packed_linear.num_bytes_of(one, num_tokens, _stand_in(one, "w4")),
        "read",
        2.0 * num_tokens * one.in_size * one.out_size,
    )


def _of_gguf(one: linear.Map, num_tokens: int, kind: str, device: torch.device) -> KernelCase:
    """As GGUF's quantised tensors are kept."""
    return KernelCase(
        "quantised as in GGUF",
        f"{MODEL} {one.name} {kind} {num_tokens} rows",
        partial(packed_linear.make_inputs, one, num_tokens, kind, device),
        {OURS: lambda: lambda inputs: unpacked(inputs.call)},
        packed_linear.num_bytes_of(one, num_tokens, _stand_in(one, kind)),
        "read",
        2.0 * num_tokens * one.in_size * one.out_size,
    )


def _in_fixed_order(one: linear.Map, num_tokens: int, device: torch.device) -> KernelCase:
    """As the deterministic mode takes them; and by the default's plan."""
    return KernelCase(
        "GEMM in the fixed order",
        _name(one, num_tokens),
        partial(linear.make_inputs, one, num_tokens, device),
        {OURS: lambda: _fixed, "default": lambda: lambda inputs: by_plan(inputs.call())},
        one.num_bytes(num_tokens),
        "read",
        2.0 * num_tokens * one.in_size * one.out_size,
    )


def _fixed(inputs: linear.Inputs) -> object:
    with fixed_order():
        return by_plan(inputs.call())
