"""Weights of 8-bit floats (e4m3) with scales, and the layouts of config.json that have them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Final, Literal

from oneloop.formats.quantization.spec import StoredTensor
from oneloop.formats.safetensors import FLOATS

if TYPE_CHECKING:
    from oneloop.formats.json_values import JsonValues

BLOCK: Final = 128
"""Columns of a block of weights that has a scale, and elements of an activation that share one."""
_E4M3: Final = ("F8_E4M3",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """Weights in e4m3; activations are quantised to e4m3 as they come, whatever scales the checkpoint has for them."""

    scales: Literal["tensor", "channel", "block"]
    """tensor: one for a weight; channel: one per row; block: one per block_rows × BLOCK elements, and activations have
    one per BLOCK elements instead of one per token."""
    block_rows: int = BLOCK
    stored: bool = True
    """False: the checkpoint has plain numbers, which are quantised while they are loaded."""
    scale_name: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    """Both are factors of what is stored."""

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """What a checkpoint has for a map: last part of the name → tensor."""
        matrix = ((out_size, in_size),)
        if not self.stored:
            return {"weight": StoredTensor(matrix, FLOATS)}
        scales = {
            "tensor": ((), (1,), (1, 1)),
            "channel": ((out_size, 1), (out_size,)),
            "block": ((-(-out_size // self.block_rows), -(-in_size // BLOCK)),),
        }[self.scales]
        return {"weight": StoredTensor(matrix, _E4M3), self.scale_name: StoredTensor(scales, FLOATS)}

    def kept_bytes(self, parts: tuple[int, ...], in_size: int) -> int:
        """Memory of a map of so many results for each of its parts."""
        out_size = sum(parts)
        if self.scales != "block":
            return out_size * in_size + 4 * out_size
        return out_size * in_size + 4 * (out_size // rows_per_scale(self.block_rows, parts)) * -(
            -in_size // BLOCK
        )


def rows_per_scale(block_rows: int, parts: tuple[int, ...]) -> int:
    """Rows that share a scale where parts lie one below the other: their blocks begin at any part's beginning."""
    return gcd(block_rows, *parts)


def fp8_scheme(config: JsonValues) -> Fp8Scheme:
    """quant_method fp8: per tensor, or per block with weight_block_size."""
    if config.string("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
        config.fail("fmt", f"{config.raw('fmt')!r} is not supported; supported is e4m3")
    if "weight_block_size" not in config:
        return Fp8Scheme(scales="tensor")
    rows = _block_rows(config, "weight_block_size")
    return Fp8Scheme(scales="block", block_rows=rows, scale_name="weight_scale_inv")


def float_group_scheme(group: JsonValues) -> Fp8Scheme:
    """A group of compressed-tensors' config_groups whose weights are floats of 8 bits."""
    weights = group.object("weights")
    if "input_activations" not in group:
        group.fail("input_activations", "8-bit weights beside plain activations are not supported")
    activations = group.object("input_activations")
    if activations.string("type", default="float") != "float" or activations.integer("num_bits", 1, 64) != 8:
        activations.fail("type", "only activations of 8-bit floats are supported beside such weights")
    if not weights.boolean("symmetric", default=True):
        weights.fail("symmetric", "false is not supported: 8-bit floats have no zero points")
    strategy = weights.string("strategy", default="tensor")
    if strategy not in ("tensor", "channel", "block"):
        weights.fail("strategy", f"{strategy!r} is not supported; supported are tensor, channel, block")
    if strategy == "block":
        return Fp8Scheme(scales="block", block_rows=_block_rows(weights, "block_structure"))
    return Fp8Scheme(scales="tensor" if strategy == "tensor" else "channel")


def _block_rows(config: JsonValues, key: str) -> int:
    block = config.raw(key)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 0 < size <= 1 << 16 for size in block)
        or block[1] != BLOCK
    ):
        config.fail(key, f"{str(block)[:40]} is not supported; [rows, {BLOCK}] is, with any number of rows")
    rows: int = block[0]
    return rows
