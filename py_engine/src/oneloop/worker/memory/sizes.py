"""Sizes that follow from the model's shape and element type, whatever the device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from oneloop.formats.expected import linear_maps, num_parameters
from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.formats.quantization.packed import halves_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.config import DtypeName, EngineConfig
    from oneloop.formats.expected import LinearMap
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.formats.quantization.gguf import GgufScheme
    from oneloop.formats.quantization.int4 import Int4Scheme

ITEM_BYTES: Final[Mapping[DtypeName, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}

FP8_BYTES: Final = 1
WIDENED_AT_ONCE: Final = 1 << 22
"""As oneloop_kernels.ops.moe.weights has it."""


def weight_bytes(spec: ModelSpec, item_bytes: int, *, on_gpu: bool) -> int:
    """Every parameter once, of so many bytes each, but for the weights of quantised maps: as they are kept.

    Numbers of a few bits are kept on a GPU, where the model's are of 16 bits (quant.packed).
    """
    total = num_parameters(spec) * item_bytes
    if spec.quantization is None:
        return total
    for one in linear_maps(spec):
        total += (
            _map_bytes(spec, one, item_bytes, on_gpu=on_gpu) - sum(one.out_sizes) * one.in_size * item_bytes
        )
    return total


def expert_bytes(spec: ModelSpec, item_bytes: int, *, on_gpu: bool) -> int:
    """Of `weight_bytes` those of experts that tokens are sent to."""
    maps = (one for one in linear_maps(spec) if one.experts)
    return sum(_map_bytes(spec, one, item_bytes, on_gpu=on_gpu) for one in maps)


def _map_bytes(spec: ModelSpec, one: LinearMap, item_bytes: int, *, on_gpu: bool) -> int:
    scheme = None if spec.quantization is None else spec.quantization.scheme_of(one.names)
    if isinstance(scheme, Fp8Scheme) or (scheme is not None and on_gpu and item_bytes == 2):
        return _kept_bytes(one, scheme)
    return sum(one.out_sizes) * one.in_size * item_bytes


def _kept_bytes(one: LinearMap, scheme: Fp8Scheme | Int4Scheme | GgufScheme) -> int:
    """Of a map whose numbers are not plain, or of all experts' maps; plain ones are of 16 bits here."""
    if not one.experts or isinstance(scheme, Fp8Scheme):
        return one.stacked * scheme.kept_bytes(one.of_one, one.in_size)
    form = scheme.expert_form(len(one.of_one), one.in_size)
    if form is None:
        return 2 * sum(one.out_sizes) * one.in_size
    return one.stacked * form.kept_bytes(sum(one.of_one), one.in_size, halves=halves_of(one.of_one))


def kv_item_bytes(config: EngineConfig, item_bytes: int) -> int:
    """Of one element of the KV cache. item_bytes: of the model's type."""
    return item_bytes if config.cache.kv_cache_dtype == "auto" else FP8_BYTES


def written_out_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """The largest packed weight as the plain numbers of the model's type: of many rows it is multiplied as such.

    But for experts', which are unpacked in the product.
    """
    if spec.quantization is None or item_bytes != 2:
        return 0
    sizes = [
        sum(one.of_one) * one.in_size * item_bytes
        for one in linear_maps(spec)
        if not one.experts and not isinstance(spec.quantization.scheme_of(one.names), Fp8Scheme | None)
    ]
    return max(sizes, default=0)


def widened_bytes(spec: ModelSpec) -> int:
    """The largest weight of 8 bits in float32: as such it is multiplied where it has no kernels. Of an expert only so
    many rows at a time as have WIDENED_AT_ONCE numbers."""
    if spec.quantization is None:
        return 0
    sizes = [
        4 * min(sum(one.of_one) * one.in_size, WIDENED_AT_ONCE if one.experts else sys.maxsize)
        for one in linear_maps(spec)
        if isinstance(spec.quantization.scheme_of(one.names), Fp8Scheme)
    ]
    return max(sizes, default=0)


def kv_token_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Keys and values of one token in all layers: layers · 2 · KV heads · head size · bytes."""
    return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * item_bytes


def block_bytes(spec: ModelSpec, block_size: int, item_bytes: int) -> int:
    """One block of the KV cache over all layers."""
    return block_size * kv_token_bytes(spec, item_bytes)


def longest_context(spec: ModelSpec, config: EngineConfig) -> int:
    """The most tokens any sequence may come to have: max_model_len, where auto is the model's own at most."""
    wanted = config.model.max_model_len
    return min(spec.max_position, wanted) if isinstance(wanted, int) else spec.max_position


def max_blocks_per_seq(context: int, block_size: int) -> int:
    """Width of a block table: a step ahead may have begun the block after the last."""
    return -(-context // block_size) + 1
