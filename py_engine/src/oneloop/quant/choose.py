"""Which kind of stored weight a linear map gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.errors import ModelError
from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.quant.fp8 import Fp8Weight
from oneloop.quant.plain import PlainWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.quantization.spec import QuantizationSpec
    from oneloop.quant.base import StoredWeight


def stored_weight(
    quantization: QuantizationSpec | None,
    in_size: int,
    parts: Mapping[str, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> StoredWeight:
    """The uninitialised weight of the map of these parts (checkpoint name prefix → output size).

    ModelError where there are no kernels for what the checkpoint has.
    """
    scheme = None if quantization is None else quantization.scheme_of(parts)
    if scheme is None:
        return PlainWeight(parts, torch.empty(sum(parts.values()), in_size, dtype=dtype, device=device))
    if isinstance(scheme, Fp8Scheme):
        return Fp8Weight(scheme, in_size, parts, dtype=dtype, device=device)
    assert quantization is not None
    raise ModelError(
        "quantization_config",
        f"{quantization.method}: there are no kernels for 4-bit weights",
        item="quant_method",
    )
