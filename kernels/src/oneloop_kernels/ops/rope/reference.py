"""Rotation and cache write in plain torch. cos, sin: [n, 1, head_dim] of the model's dtype, both halves alike.

The first half of sin is negated, so that exchanging the halves of a head is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.kv_cache.reference import as_copyable, narrowed
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.rope import RotaryStep

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.packed_linear import PackedCall
    from oneloop_kernels.ops.rope import HeadNorms


class ReferenceAngles:
    """See the contract Angles. The angles are float32 whatever the model's dtype; cos and sin are rounded to it."""

    __slots__ = ("_dtype", "_factor", "_frequencies", "_sin_factor")

    def __init__(self, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        half = torch.full_like(frequencies, factor)
        self._frequencies = torch.cat((frequencies, frequencies))
        self._factor = factor
        self._sin_factor = torch.cat((-half, half))
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> RotaryStep:
        """See the contract."""
        angles = (positions[:, None].to(torch.float32) * self._frequencies)[:, None, :]
        cos, sin = angles.cos(), angles.sin_().mul_(self._sin_factor)
        if self._factor != 1.0:
            cos.mul_(self._factor)
        return RotaryStep(cos.to(self._dtype), sin.to(self._dtype))

    def with_embedding(
        self, positions: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor
    ) -> tuple[RotaryStep, torch.Tensor]:
        """See the contract."""
        if table.device.type != "cpu":  # there torch would stop the device for good
            token_ids = token_ids.clamp(0, table.shape[0] - 1)
        return self(positions), F.embedding(token_ids, table)


class ReferenceRopeOps:
    """See the contract."""

    __slots__ = ()

    def angles(self, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> ReferenceAngles:
        """See the contract."""
        return ReferenceAngles(frequencies, factor, dtype)

    def project_and_store(
        self,
        call: LinearCall | PackedCall,
        rotary: RotaryStep,
        norms: HeadNorms | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """See the contract: always one by one."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep,
        norms: HeadNorms | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """See the contract."""
        num_kv_heads = cache.shape[2] // 2
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        rotated = qkv[:, : num_heads + num_kv_heads]
        if norms is not None:
            for part, weight in zip(
                (rotated[:, :num_heads], rotated[:, num_heads:]), norms.weight, strict=True
            ):
                part.copy_(rms_norm(part, weight, norms.eps))
        exchanged = rotated.roll(qkv.shape[2] // 2, -1)
        rotated.mul_(rotary.cos).addcmul_(exchanged, rotary.sin)
        _store(qkv[: slots.shape[0], num_heads:], cache, slots)


def _store(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    if kv.dtype != cache.dtype:
        kv, cache = as_copyable(narrowed(kv, cache.dtype)), as_copyable(cache)
    if cache.is_contiguous() and cache.is_cpu:
        try:
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, kv)
            return
        except (
            IndexError
        ):  # a slot is −1. A CPU's steps have none, and looking first would cost each layer 1 µs
            pass
    kept = slots >= 0
    slots = slots[kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = kv[kept]


REFERENCE: Final = ReferenceRopeOps()
