"""Rotation and cache write on the GPU: one kernel per layer. cos, sin: [n, head_dim / 2] float32, rows side by side.

Unlike the reference, cosine and sine keep float32, and a rotated element is rounded once: closer to the exact rotation
than Hugging Face's, whose products are each rounded to the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.rope import RotaryStep

if TYPE_CHECKING:
    from oneloop_kernels.ops.rope import HeadNorms


@triton.jit(do_not_specialize=["num_tokens"])
def angles_kernel(
    positions,
    frequencies,
    out,
    num_tokens,
    factor,
    HALF_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A tile [TOKENS, HALF_BLOCK] of angles. out: [num_tokens, 2 · HALF_DIM], cosines before sines."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, HALF_BLOCK)
    in_head = column < HALF_DIM
    frequency = tl.load(frequencies + column, mask=in_head, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + token, mask=token < num_tokens, other=0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    place = out + token.to(tl.int64)[:, None] * (2 * HALF_DIM) + column[None, :]
    mask = (token < num_tokens)[:, None] & in_head[None, :]
    tl.store(place, tl.cos(angle) * factor, mask=mask)
    tl.store(place + HALF_DIM, tl.sin(angle) * factor, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    norm_weight,
    cache,
    slots,
    num_tokens,
    num_slots,
    block_stride,
    position_stride,
    head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """TOKENS tokens × HEADS heads; both halves of a head are tiles [TOKENS · HEADS, HALF_BLOCK].

    Queries, keys and values take the same way; masks say which of them is normed, rotated, and stored where.
    """
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    head = tl.program_id(1) * HEADS + row % HEADS
    column = tl.arange(0, HALF_BLOCK)
    in_head = (column < HALF_DIM)[None, :]
    present = (token < num_tokens) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_rotated = head < NUM_HEADS + NUM_KV_HEADS
    loaded = present[:, None] & in_head
    turned = (present & is_rotated)[:, None] & in_head
    if NORM:
        weights = norm_weight + tl.where(head < NUM_HEADS, 0, 2 * HALF_DIM)[:, None] + column[None, :]
        first_weight = tl.load(weights, mask=turned, other=1.0).to(tl.float32)
        second_weight = tl.load(weights + HALF_DIM, mask=turned, other=1.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    wide_token = token.to(tl.int64)
    place = (
        qkv + (wide_token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * (2 * HALF_DIM) + column[None, :]
    )
    angle = wide_token[:, None] * (2 * HALF_DIM) + column[None, :]
    first = tl.load(place, mask=loaded, other=0.0).to(tl.float32)
    second = tl.load(place + HALF_DIM, mask=loaded, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=turned, other=1.0)
    sine = tl.load(sin + angle, mask=turned, other=0.0)
    slot = tl.load(slots + token, mask=present & (token < num_slots), other=-1)
    dtype = qkv.dtype.element_ty
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.where(is_rotated, tl.rsqrt(squares / (2 * HALF_DIM) + eps), 1.0)[:, None]
        first = ((first * inverse).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * inverse).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    first_out = (first * cosine - second * sine).to(dtype)
    second_out = (second * cosine + first * sine).to(dtype)
    tl.store(place, first_out, mask=turned)
    tl.store(place + HALF_DIM, second_out, mask=turned)
    kept = (present & (head >= NUM_HEADS) & (slot >= 0))[:, None] & in_head
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
    target += (head - NUM_HEADS).to(tl.int64) * head_stride
    stored = cache + target[:, None] + column[None, :]
    tl.store(stored, first_out, mask=kept)
    tl.store(stored + HALF_DIM, second_out, mask=kept)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes. vectors: how many times each thread loads 8 elements of either half."""

    tokens: int
    heads: int
    vectors: int

    def num_warps(self, half_block: int) -> int:
        """A power of two, 1 to 8. half_block: elements of half a head, padded to a power of two."""
        return max(1, min(8, self.tokens * self.heads * half_block // (self.vectors * 8 * 32)))


_FEW_TOKENS: Final = 512
TILES: Final = (Tile(tokens=1, heads=8, vectors=1), Tile(tokens=2, heads=16, vectors=2))
"""For up to _FEW_TOKENS tokens, where latency counts, and for more, where bandwidth does."""

_ANGLE_TOKENS: Final = 4


class TritonAngles:
    """See the contract Angles."""

    __slots__ = ("_factor", "_frequencies", "_half_block")

    def __init__(self, frequencies: torch.Tensor, factor: float) -> None:
        self._frequencies = frequencies.contiguous()
        self._factor = factor
        self._half_block = triton.next_power_of_2(len(frequencies))

    def __call__(self, positions: torch.Tensor) -> RotaryStep:
        """See the contract."""
        num_tokens, half_dim = len(positions), len(self._frequencies)
        out = torch.empty(num_tokens, 2 * half_dim, dtype=torch.float32, device=positions.device)
        angles_kernel[(triton.cdiv(num_tokens, _ANGLE_TOKENS),)](
            positions,
            self._frequencies,
            out,
            num_tokens,
            self._factor,
            HALF_DIM=half_dim,
            HALF_BLOCK=self._half_block,
            TOKENS=_ANGLE_TOKENS,
            num_warps=4,
            **pdl_options(positions.device),
        )
        return RotaryStep(out[:, :half_dim], out[:, half_dim:])


class TritonRopeOps:
    """See the contract."""

    __slots__ = ()

    def angles(self, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> TritonAngles:
        """See the contract. dtype is not used: cosine and sine stay float32."""
        return TritonAngles(frequencies, factor)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep,
        norms: HeadNorms | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        tile: Tile | None = None,
    ) -> None:
        """See the contract. tile: another than TILES gives, for measuring."""
        num_tokens, num_all_heads, head_dim = qkv.shape
        if num_tokens == 0:
            return
        chosen = tile or TILES[num_tokens > _FEW_TOKENS]
        half_block = triton.next_power_of_2(head_dim // 2)
        num_kv_heads = cache.shape[2] // 2
        block_stride, position_stride, head_stride, _ = cache.stride()
        grid = (triton.cdiv(num_tokens, chosen.tokens), triton.cdiv(num_all_heads, chosen.heads))
        rotate_and_store_kernel[grid](
            qkv,
            rotary.cos,
            rotary.sin,
            qkv if norms is None else norms.weight,  # not read without norms
            cache,
            slots,
            num_tokens,
            len(slots),
            block_stride,
            position_stride,
            head_stride,
            0.0 if norms is None else norms.eps,
            NUM_HEADS=num_all_heads - 2 * num_kv_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF_DIM=head_dim // 2,
            HALF_BLOCK=half_block,
            BLOCK_SIZE=cache.shape[1],
            NORM=norms is not None,
            TOKENS=chosen.tokens,
            HEADS=chosen.heads,
            num_warps=chosen.num_warps(half_block),
            **pdl_options(qkv.device),
        )


TRITON: Final = TritonRopeOps()
