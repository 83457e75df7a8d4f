"""float32 linear maps on a CPU: which GEMM is called, and which way round, by the number of tokens.

torch's `linear` hands float32 to the BLAS as x · Wᵀ, the slow way round for few tokens. Measured on two cores, µs:

| out × in, tokens | linear | BLAS W · xᵀ | oneDNN W · xᵀ | oneDNN x · Wᵀ |
|---|---|---|---|---|
| 3072 × 576, 1 (BLAS with the row twice) | 419 | 172 | 243 | 191 |
| 3072 × 576, 4 | 612 | 162 | 244 | 265 |
| 3072 × 576, 8 | 663 | 350 | 238 | 259 |
| 3072 × 576, 16 | 803 | 559 | 261 | 689 |
| 3072 × 576, 256 | 5405 | 4320 | 2102 | 2092 |
| 49152 × 576, 16 | 13483 | 10272 | 3975 | 4864 |

With AVX2 alone the order is the same and the distances smaller. oneDNN compiles a kernel for every new number of
tokens (about 1 ms a shape), so callers round it up: `padded_num_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.linear.apart import Stages, linear_apart
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall

_BLAS_MAX_TOKENS = 4
"""Up to here the BLAS is the faster one."""
_TRANSPOSED_MAX_TOKENS = 191
"""Up to here oneDNN is faster at W · xᵀ, even though what follows reads a transposed result."""

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear(call: LinearCall) -> torch.Tensor:
    """See ops.linear.Linear."""
    return linear_apart(call, STAGES)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias, the fastest way for that number of rows. x: contiguous."""
    num_tokens = x.shape[0]
    if num_tokens <= _BLAS_MAX_TOKENS or not _HAS_ONEDNN:
        if num_tokens == 1:
            x = x.expand(2, -1).contiguous()  # a matrix-vector product runs on one thread
        out = torch.mm(weight, x.t()).t()[:num_tokens]
    elif num_tokens <= _TRANSPOSED_MAX_TOKENS:
        out = _onednn(weight, x, None).t()
    else:
        return _onednn(x, weight, bias)
    return out if bias is None else out.add_(bias)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias by oneDNN, contiguous. torch's public `linear` never takes it for float32."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


STAGES: Final = Stages(rms_norm, _product, silu_mul)
