"""Queries, keys and values by one kernel of Hopper, `triton.heads`: where it pays, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from oneloop_kernels.launch import card_name, of_card, pdl_options
from oneloop_kernels.ops.linear.launches import ROWS_OF_A_WARP, Launch, may_stream, normed, tensor_map
from oneloop_kernels.ops.linear.plans import DENSE_BLOCK_K, can_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.rope import HeadNorms, RotaryStep

_HEAD_DIM: Final = 128


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """Constants of `triton.heads.heads_kernel`.

    block_m: rows of x of a program, 64 or 128. width: columns of both halves of a head, a power of two; all 64 where
    heads are normed. num_stages: copies under way.
    """

    block_m: int
    width: int
    num_stages: int


class Surroundings(NamedTuple):
    """What rope.rotate_and_store takes beside queries, keys and values."""

    rotary: RotaryStep
    """cosines and sines of a token side by side, a row per token."""
    norms: HeadNorms | None
    cache: torch.Tensor
    slots: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        """Of the cache."""
        return self.cache.shape[2] // 2


Shape = tuple[int, int, int, bool]
"""Query heads, key heads, columns of x, whether heads are normed."""
Choices = tuple[tuple[int, HeadsPlan | None], ...]
"""(up to that many rows, the plan; None: product and rotation one after the other), ascending; more: likewise."""

_H200: Final[Mapping[Shape, Choices]] = MappingProxyType(
    {
        (32, 8, 4096, False): (
            (32, None),
            (64, HeadsPlan(64, 32, 11)),
            (128, HeadsPlan(128, 32, 9)),
        ),
        (16, 8, 1024, True): (
            (1, None),
            (256, HeadsPlan(64, 64, 9)),
            (512, HeadsPlan(128, 64, 6)),
        ),
    }
)
"""Measured in whole layers of Llama 3 8B and Qwen 3 0.6B."""

TUNED: Final[Mapping[str, Mapping[Shape, Choices]]] = MappingProxyType({"NVIDIA H200": _H200})
"""Beginning of the card's name → shape → choices, for 16-bit types."""


def plan_for(call: LinearCall, around: Surroundings) -> HeadsPlan | None:
    """The plan; None: product and rotation one after the other."""
    x, weight = call.x, call.weight
    if call.gated or call.residual is not None or not fits(around) or not may_stream(x, weight):
        return None
    num_heads = weight.shape[0] // _HEAD_DIM - 2 * around.num_kv_heads
    shape = (num_heads, around.num_kv_heads, weight.shape[1], around.norms is not None)
    return _plan_for(x.device, x.shape[0], shape)


@cache
def _plan_for(device: torch.device, num_tokens: int, shape: Shape) -> HeadsPlan | None:
    if not can_stream(device):
        return None
    choices = (of_card(card_name(device), TUNED) or {}).get(shape, ())
    return next((plan for most, plan in choices if 0 < num_tokens <= most), None)


def fits(around: Surroundings) -> bool:
    """Whether the kernel can read the angles, and write 16 bytes at a time to the cache."""
    cos, sin = around.rotary
    side_by_side = (
        cos.dim() == 2
        and cos.shape[1] == _HEAD_DIM // 2
        and cos.stride() == sin.stride() == (_HEAD_DIM, 1)
        and sin.data_ptr() == cos.data_ptr() + cos.shape[1] * cos.itemsize
    )
    cache = around.cache
    return (
        side_by_side
        and cache.shape[3] == _HEAD_DIM
        and cache.itemsize == 2
        and all(stride % 8 == 0 for stride in cache.stride()[:3])
        and cache.data_ptr() % 16 == 0
    )


def heads(plan: HeadsPlan, call: LinearCall, around: Surroundings) -> Launch:
    """The call by one kernel, after one for the norm, which is launched at once. → [n, heads, head_dim].

    Of the result only the queries are written. x and weight: as `may_stream` says; a norm of the heads wants
    plan.width = 64.
    """
    from oneloop_kernels.ops.linear.triton.heads import heads_kernel

    call = normed(call)
    x, weight, cache = call.x, call.weight, around.cache
    num_all_heads, half = weight.shape[0] // _HEAD_DIM, _HEAD_DIM // 2
    out = torch.empty(x.shape[0], num_all_heads, _HEAD_DIM, dtype=x.dtype, device=x.device)
    arguments = (
        tensor_map(x, plan.block_m, DENSE_BLOCK_K),
        tensor_map(weight, plan.width, DENSE_BLOCK_K),
        x if call.bias is None else call.bias,
        out,
        around.rotary.cos,
        x if around.norms is None else around.norms.weight,
        cache,
        around.slots,
        x.shape[0],
        x.shape[1],
        len(around.slots),
        *cache.stride()[:3],
        0.0 if around.norms is None else around.norms.eps,
    )
    constants: dict[str, object] = {
        "HAS_BIAS": call.bias is not None,
        "NORM": around.norms is not None,
        "NUM_HEADS": num_all_heads - 2 * around.num_kv_heads,
        "NUM_KV_HEADS": around.num_kv_heads,
        "HALF_DIM": half,
        "BLOCK_SIZE": cache.shape[1],
        "WIDTH": plan.width,
        "BLOCK_M": plan.block_m,
        "BLOCK_K": DENSE_BLOCK_K,
        "STAGES": plan.num_stages,
        "num_warps": plan.block_m // ROWS_OF_A_WARP,
        **pdl_options(x.device),
    }
    grid = -(-x.shape[0] // plan.block_m) * num_all_heads * (half // plan.width)
    return Launch(heads_kernel, (grid,), arguments, constants, out)
