"""Experts on a CPU, in float32: the products of `ops.linear.cpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.linear.cpu import STAGES
from oneloop_kernels.ops.moe.reference import moe_apart
from oneloop_kernels.padding import padded_num_tokens

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.moe import MoeCall


def moe(call: MoeCall) -> None:
    """See ops.moe.Moe."""
    moe_apart(call, _STAGES)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """With the rows rounded up: experts get any number of tokens, and each new number has a kernel compiled."""
    num_tokens = x.shape[0]
    missing = padded_num_tokens(num_tokens) - num_tokens
    return STAGES.product(F.pad(x, (0, 0, 0, missing)), weight, bias)[:num_tokens]


_STAGES: Final = STAGES._replace(product=_product)
