"""Which kind of stored weight a linear map gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.formats.quantization.int4 import Int4Scheme
from oneloop.quant.fp8 import Fp8Weight
from oneloop.quant.gguf import GgufWeight
from oneloop.quant.int4 import Int4Weight
from oneloop.quant.packed import packs
from oneloop.quant.plain import PlainWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.quantization.gguf import GgufQuantization
    from oneloop.formats.quantization.spec import QuantizationSpec
    from oneloop.quant.base import StoredWeight


def stored_weight(
    quantization: QuantizationSpec | GgufQuantization | None,
    in_size: int,
    parts: Mapping[str, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> StoredWeight:
    """The uninitialised weight of the map of these parts (checkpoint name prefix → output size)."""
    scheme = None if quantization is None else quantization.scheme_of(parts)
    if isinstance(scheme, Fp8Scheme):
        return Fp8Weight(scheme, in_size, parts, dtype=dtype, device=device)
    if isinstance(scheme, Int4Scheme):
        return Int4Weight(scheme, in_size, parts, dtype=dtype, device=device)
    if scheme is not None and packs(device, dtype):
        return GgufWeight(scheme, in_size, parts, dtype=dtype, device=device)
    return PlainWeight(parts, torch.empty(sum(parts.values()), in_size, dtype=dtype, device=device))
