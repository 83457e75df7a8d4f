"""Parts of one map that are kept in different ways: everything around their product is done as for a plain map."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from oneloop.quant.packed import Packed
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.reference import linear
from oneloop_kernels.ops.packed_linear import PACKED_LINEAR, PackedCall
from oneloop_kernels.ops.packed_linear.packing import Numbers, pack, plain
from oneloop_kernels.registry import prefer

CPU: Final = torch.device("cpu")
DTYPE: Final = torch.float16
INPUTS: Final = 128
Part = Numbers | torch.Tensor


def numbers(rows: int, seed: int) -> Numbers:
    """4 bits in groups of 32."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (rows, INPUTS), generator=generator, dtype=torch.uint8)
    return Numbers(values, torch.rand(rows, INPUTS // 32, generator=generator) * 0.02 + 0.01, 4, 32)


def ordered(rows: int, seed: int) -> Numbers:
    """Columns in an order of their own."""
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(seed)).int()
    return numbers(rows, seed)._replace(order=order)


def matrix(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(seed)).mul(0.05).to(DTYPE)


PARTS: Final[dict[str, tuple[Part, ...]]] = {
    "one": (numbers(128, 1),),
    "numbers and plain": (numbers(64, 1), matrix(64, 2)),
    "plain and numbers": (matrix(64, 1), numbers(64, 2)),
    "two orders": (ordered(64, 1), ordered(64, 2)),
    "plain alone": (matrix(64, 1), matrix(64, 2)),
}
AROUND: Final = ("nothing", "bias", "norm", "residual", "gated", "everything")


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", PARTS)
def test_what_stands_around_the_product(name: str, around: str, num_tokens: int) -> None:
    parts = PARTS[name]
    sizes = [64, 64] if name != "one" else [128]
    if name == "one" and around in ("gated", "everything"):
        sizes, parts = [64, 64], (numbers(64, 1), numbers(64, 2))  # a gate has two parts: here of one kind
    with prefer("triton"):
        kept = Packed(sizes, dtype=DTYPE, device=CPU)
    for index in reversed(range(len(parts))):
        kept.put(index, parts[index])
    generator = torch.Generator().manual_seed(9)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPE)

    everything = around == "everything"
    gated = around == "gated" or everything
    call = LinearCall(
        normal(num_tokens, INPUTS),
        kept.matrix,
        normal(128) if around == "bias" or everything else None,
        norm=Norm(normal(INPUTS), 1e-5) if around == "norm" or everything else None,
        gated=gated,
        residual=normal(num_tokens, 64 if gated else 128) if around == "residual" or everything else None,
        tickets=torch.zeros(NUM_TICKETS, dtype=torch.int32),
    )
    wide = torch.cat([plain(part) if isinstance(part, Numbers) else part.float() for part in parts])
    wanted = linear(
        call._replace(
            x=call.x.float(),
            weight=wide,
            bias=None if call.bias is None else call.bias.float(),
            norm=None if call.norm is None else Norm(call.norm.weight.float(), call.norm.eps),
            residual=None if call.residual is None else call.residual.float(),
        )
    )
    given = None if call.residual is None else call.residual
    found = kept.multiply(call)
    assert given is None or found.data_ptr() == given.data_ptr()
    torch.testing.assert_close(found.float(), wanted, atol=4e-3, rtol=1e-2)


def test_halves_that_a_call_takes_for_others_are_refused() -> None:
    """96 rows in halves of their own have other tiles than 96 in a row."""
    call = PackedCall(torch.zeros(1, INPUTS, dtype=DTYPE), pack(numbers(96, 1), DTYPE), gated=True)
    with prefer("triton"):
        compute = PACKED_LINEAR.resolve(CPU, DTYPE)
    with pytest.raises(ValueError, match="halves: a weight of 1 for a call with gated True"):
        compute(call)
