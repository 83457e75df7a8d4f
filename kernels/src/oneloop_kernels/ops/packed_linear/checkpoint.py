"""Numbers from the layouts of quantised checkpoints: AWQ's, GPTQ's, compressed-tensors' "pack-quantized".

All pack 32 / bits numbers into an int32. AWQ: `qweight` [in, out / 8], along the outputs, in the order 0 2 4 6 1 3 5 7;
`qzeros` [groups, out / 8] alike; `scales` [groups, out]. GPTQ: `qweight` [in / 8, out], along the inputs; `qzeros`
[groups, out / 8], along the outputs, in its first version less one; `scales` [groups, out]; `g_idx` [in], the group of
each input. compressed-tensors: `weight_packed` [out, in / 8], along the inputs; `weight_scale` [out, groups];
`weight_zero_point` [out / 8, groups], along the outputs; `weight_g_idx` [in]; numbers and zeros are shifted to be
positive. A weight is (number − zero) · scale; without zeros the zero is the middle. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.packed_linear.packing import Numbers

if TYPE_CHECKING:
    from oneloop_kernels.ops.packed_linear import Bits


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, group_size: int) -> Numbers:
    """Of 4 bits. group_size: as the checkpoint says, or the number of inputs."""
    values = unpacked(qweight, 4, even_first=True).t().contiguous()
    return Numbers(values, scales.t(), 4, group_size, "zero", unpacked(qzeros, 4, even_first=True).t())


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    *,
    bits: Bits,
    group_size: int,
    zeros_less_one: bool,
) -> Numbers:
    """zeros_less_one: the first version of the format. qzeros: None where all mean the middle, whatever is stored.
    g_idx: None where groups follow each other; else groups are whole (`are_whole`)."""
    numbers = Numbers(unpacked(qweight.t(), bits).contiguous(), scales.t(), bits, group_size)
    if qzeros is not None:
        zeros = unpacked(qzeros, bits).t()
        zeros = (zeros + 1) & ((1 << bits) - 1) if zeros_less_one else zeros
        numbers = numbers._replace(shift="zero", shifts=zeros)
    return _in_order(numbers, g_idx)


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
    """columns: of the weight; the last int32 of a row may have more room. g_idx: as `gptq`."""
    numbers = Numbers(unpacked(packed, bits)[:, :columns].contiguous(), scale, bits, group_size)
    if zero_point is not None:
        zeros = unpacked(zero_point.t(), bits).t()[: packed.shape[0]]
        numbers = numbers._replace(shift="zero", shifts=zeros)
    return _in_order(numbers, g_idx)


def are_whole(g_idx: torch.Tensor, group_size: int) -> torch.Tensor:
    """A bool on the device: whether every group has so many inputs, the last what is left, and none is skipped."""
    sizes = torch.arange(len(g_idx), device=g_idx.device) // group_size
    return (g_idx.sort().values == sizes).all()


def unpacked(words: torch.Tensor, bits: int, *, even_first: bool = False) -> torch.Tensor:
    """int32 [n, m] → uint8 [n, m · 32 / bits], the last dimension unpacked from the lowest bits up. even_first: there
    numbers 0, 2, 4, … of a word come before 1, 3, 5, …
    """
    count = 32 // bits
    places = torch.arange(count, dtype=torch.int32, device=words.device)
    if even_first:
        places = places // 2 + places % 2 * (count // 2)
    wide = (words[..., None] >> places * bits) & ((1 << bits) - 1)
    return wide.to(torch.uint8).flatten(-2)


def _in_order(numbers: Numbers, g_idx: torch.Tensor | None) -> Numbers:
    """Columns sorted by their groups, which are whole."""
    if g_idx is None:
        return numbers
    order = torch.argsort(g_idx.long(), stable=True)
    return numbers._replace(values=numbers.values[:, order].contiguous(), order=order.int())
