"""The linear map by torch's own choice of GEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.linear.apart import Stages, linear_apart
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear import LinearCall

_STAGES: Final = Stages(rms_norm, F.linear, silu_mul)


def linear(call: LinearCall) -> torch.Tensor:
    """See ops.linear.Linear."""
    return linear_apart(call, _STAGES)
