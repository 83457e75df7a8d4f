"""Scales for keys and values of 8 bits that a checkpoint has beside its weights: one of each per layer. No torch.

What is kept is the key or value divided by its scale, so any positive number is right; the makers have measured which
uses the range of 8 bits best.
"""

from __future__ import annotations

import logging
import math
import struct
from typing import TYPE_CHECKING, Final

from oneloop.errors import ModelError
from oneloop.formats.safetensors import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.safetensors import SafetensorsTensor

_log = logging.getLogger(__name__)

_PAIRS: Final = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Ends of names: compressed-tensors' and what is written by engines, ModelOpt's, two of older checkpoints."""
_MOST: Final = 2.0**60
"""A scale, and its inverse, may be so large: far from the ends of float32, also after a product with what is kept."""
_FORMATS: Final = {"F64": "<d", "F32": "<f", "F16": "<e"}


def kv_scale_names(num_layers: int) -> frozenset[str]:
    """All names that scales may have."""
    return frozenset(_prefix(layer) + end for layer in range(num_layers) for pair in _PAIRS for end in pair)


def read_kv_scales(
    tensors: Mapping[str, SafetensorsTensor], num_layers: int
) -> tuple[tuple[float, float], ...]:
    """Of every layer the keys' and the values' scale, 1 where the checkpoint has none; (): it has none at all.

    tensors: a folder's, of all names. ModelError where a file cannot be read. Scales that are no positive numbers of a
    whole layer are named in one log line and not used, for whoever keeps keys and values in full needs none.
    """
    scales = []
    used: set[str] = set()
    for layer in range(num_layers):
        pair = _pair(tensors, _prefix(layer))
        found = tuple(_value(tensor) for tensor in pair)
        if not found or not all(1.0 / _MOST <= scale <= _MOST for scale in found):
            scales.append((1.0, 1.0))
            continue
        used |= {tensor.name for tensor in pair}
        scales.append((found[0], found[1]))
    unused = sorted((kv_scale_names(num_layers) & tensors.keys()) - used)
    if unused:
        _log.warning(
            "%d scales of keys or values are not used: one positive number for a layer's keys and one for its values "
            "are supported; %s is not that, or stands alone",
            len(unused),
            unused[0],
        )
    return tuple(scales) if used else ()


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def _pair(
    tensors: Mapping[str, SafetensorsTensor], prefix: str
) -> tuple[SafetensorsTensor, SafetensorsTensor] | tuple[()]:
    """The first pair of names under which the layer has two single numbers."""
    for keys, values in _PAIRS:
        pair = tensors.get(prefix + keys), tensors.get(prefix + values)
        if pair[0] is not None and pair[1] is not None and _is_number(pair[0]) and _is_number(pair[1]):
            return pair[0], pair[1]
    return ()


def _is_number(tensor: SafetensorsTensor) -> bool:
    return math.prod(tensor.shape) == 1 and tensor.dtype in FLOATS


def _value(tensor: SafetensorsTensor) -> float:
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            raw = file.read(tensor.num_bytes)
    except OSError as error:
        raise ModelError(str(tensor.path), f"cannot be read: {error.strerror or error}") from error
    if tensor.dtype == "BF16":
        raw = b"\0\0" + raw
    (value,) = struct.unpack(_FORMATS.get(tensor.dtype, "<f"), raw)
    return float(value)
