"""Numbers from the layouts of quantised checkpoints: AWQ's, GPTQ's, compressed-tensors' "pack-quantized".

All pack 32 / bits numbers into an int32. AWQ: `qweight` [in, out / 8], along the outputs, in the order 0 2 4 6 1 3 5 7;
`qzeros` [groups, out / 8] alike; `scales` [groups, out]. GPTQ: `qweight` [in / 8, out], along the inputs; `qzeros`
[groups, out / 8], along the outputs, in its first version less one; `scales` [groups, out]; `g_idx` [in], the group of
each input. compressed-tensors: `weight_packed` [out, in / 8], along the inputs; `weight_scale` [out, groups];
`weight_zero_point` [out / 8, groups], along the outputs; `weight_g_idx` [in]; numbers and zeros are shifted to be
positive. A weight is (number − zero) · scale; without zeros the zero is the middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.packed_linear.packing import Numbers

if TYPE_CHECKING:
    from oneloop_kernels.ops.packed_linear import Bits

_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 the first, second, … number is."""


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, group_size: int) -> Numbers:
    """Of 4 bits. group_size: as the checkpoint says, or the number of inputs."""
    values = unpacked(qweight, 4, _AWQ_PLACES).t()
    zeros = unpacked(qzeros, 4, _AWQ_PLACES).t()
    return _with_zeros(values.contiguous(), scales.t(), zeros, 4, group_size)


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    *,
    bits: Bits,
    group_size: int,
    zeros_less_one: bool,
) -> Numbers:
    """zeros_less_one: the first version of the format. g_idx: None where groups follow each other."""
    values = unpacked(qweight.t(), bits).contiguous()
    zeros = unpacked(qzeros, bits).t()
    if zeros_less_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return _in_order(_with_zeros(values, scales.t(), zeros, bits, group_size), g_idx)


def compressed(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    *,
    bits: Bits,
    group_size: int,
    columns: int,
) -> Numbers:
    """columns: of the weight; the last int32 of a row may have more room."""
    values = unpacked(packed, bits)[:, :columns].contiguous()
    if zero_point is None:
        numbers = Numbers(values, scale, bits, group_size)
    else:
        zeros = unpacked(zero_point.t(), bits).t()[: values.shape[0]]
        numbers = _with_zeros(values, scale, zeros, bits, group_size)
    return _in_order(numbers, g_idx)


def unpacked(words: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [n, m] → uint8 [n, m · 32 / bits], the last dimension unpacked from the lowest bits up, or by places."""
    count = 32 // bits
    shifts = torch.tensor(places or range(count), dtype=torch.int32, device=words.device) * bits
    wide = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return wide.to(torch.uint8).flatten(-2)


def _with_zeros(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: Bits, group_size: int
) -> Numbers:
    """Zeros that are all the middle are left out."""
    if bool((zeros == 1 << (bits - 1)).all()):
        return Numbers(values, scales, bits, group_size)
    return Numbers(values, scales, bits, group_size, "zero", zeros)


def _in_order(numbers: Numbers, g_idx: torch.Tensor | None) -> Numbers:
    """Columns sorted by their groups, where they are not. ValueError for groups of unequal sizes."""
    if g_idx is None:
        return numbers
    columns, size = numbers.values.shape[1], numbers.group_size
    order = torch.argsort(g_idx.long(), stable=True)
    expected = torch.arange(columns, device=g_idx.device) // size
    if not torch.equal(g_idx.long()[order], expected):
        raise ValueError(f"g_idx: groups must have {size} inputs each")
    if torch.equal(order, torch.arange(columns, device=order.device)):
        return numbers
    return numbers._replace(values=numbers.values[:, order].contiguous(), order=order)
