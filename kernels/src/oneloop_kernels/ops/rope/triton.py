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
from oneloop_kernels.ops.float8.triton import as_float8
from oneloop_kernels.ops.linear.heads import Surroundings, heads, plan_for
from oneloop_kernels.ops.packed_linear import PackedCall
from oneloop_kernels.ops.packed_linear.heads import project_and_store as packed_heads
from oneloop_kernels.ops.rope import RotaryStep
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.rope import HeadNorms


@triton.jit
def _write_angles(positions, frequency, out, token, column, mask, factor, HALF_DIM: tl.constexpr):
    """A tile of angles of tokens (int64): cosines before sines, rows of 2 · HALF_DIM. mask: [tokens, columns]."""
    position = tl.load(positions + token, mask=tl.max(mask.to(tl.int32), 1) > 0, other=0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    place = out + token[:, None] * (2 * HALF_DIM) + column[None, :]
    tl.store(place, tl.cos(angle) * factor, mask=mask)
    tl.store(place + HALF_DIM, tl.sin(angle) * factor, mask=mask)


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
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, HALF_BLOCK)
    in_head = column < HALF_DIM
    frequency = tl.load(frequencies + column, mask=in_head, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = (token < num_tokens)[:, None] & in_head[None, :]
    _write_angles(positions, frequency, out, token, column, mask, factor, HALF_DIM)


@triton.jit
def _copy_row(token_ids, table, out, token, element, vocab_size, row_stride, size):
    """Elements of the table's row of one token (its place, int64)."""
    token_id = tl.load(token_ids + token).to(tl.int64)
    row = tl.minimum(tl.maximum(token_id, 0), vocab_size - 1)
    mask = element < size
    tl.store(out + token * size + element, tl.load(table + row * row_stride + element, mask=mask), mask=mask)


@triton.jit
def begin_kernel(
    positions, frequencies, out, token_ids, table, hidden, factor, vocab_size, row_stride, size,
    HALF_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, PIECE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One token's angles (program 0 of its programs), and the pieces of its row of the table (the others)."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, HALF_BLOCK)
    frequency = tl.load(frequencies + column, mask=column < HALF_DIM, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if part == 0:
        tokens = token + tl.zeros((1,), tl.int64)
        mask = (column < HALF_DIM)[None, :]
        _write_angles(positions, frequency, out, tokens, column, mask, factor, HALF_DIM)
    else:
        element = (part - 1) * PIECE + tl.arange(0, PIECE)
        _copy_row(token_ids, table, hidden, token, element, vocab_size, row_stride, size)


@triton.jit
def _norm_weights(
    norm_weight, head, is_turned, column, in_head, NUM_HEADS: tl.constexpr, HALF_DIM: tl.constexpr
):
    """Both halves of the weight of each row's head, float32: the queries' or the keys'."""
    weights = norm_weight + tl.where(head < NUM_HEADS, 0, 2 * HALF_DIM)[:, None] + column[None, :]
    mask = is_turned[:, None] & in_head
    first = tl.load(weights, mask=mask, other=1.0).to(tl.float32)
    return first, tl.load(weights + HALF_DIM, mask=mask, other=1.0).to(tl.float32)


@triton.jit
def _turned(
    first, second, first_weight, second_weight, cosine, sine, turned, eps,
    dtype: tl.constexpr, NORM: tl.constexpr, HALF_DIM: tl.constexpr,
):  # fmt: skip
    """Both halves (float32) of heads normed and rotated where `turned`, as they are elsewhere; rounded to dtype."""
    a, b = first, second
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
        a = ((first * inverse).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        b = ((second * inverse).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    first_out = tl.where(turned, a * cosine - b * sine, first).to(dtype)
    return first_out, tl.where(turned, b * cosine + a * sine, second).to(dtype)


@triton.jit
def _store(cache, target, head, kept, column, in_head, head_stride, first, second, HALF_DIM: tl.constexpr):
    """Both halves of key and value heads (of heads ≥ 0) to their place in the cache."""
    if cache.dtype.element_ty == tl.float8e4nv:
        first, second = as_float8(first), as_float8(second)
    mask = (kept & (head >= 0))[:, None] & in_head
    stored = cache + (target + head.to(tl.int64) * head_stride)[:, None] + column[None, :]
    tl.store(stored, first, mask=mask)
    tl.store(stored + HALF_DIM, second, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def rotate_and_store_kernel(
    qkv, cos, sin, norm_weight, cache, slots, num_tokens, num_slots, block_stride, position_stride,
    head_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    STEPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens × HEADS heads, STEPS times; both halves of the heads are tiles [TOKENS · HEADS, HALF_BLOCK].

    Queries, keys and values take the same way; masks say which of them is normed, rotated, and stored where. A program
    that has values alone copies them. The angles depend on the token alone: one load for all steps.
    """
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    head = tl.program_id(1) * (HEADS * STEPS) + row % HEADS
    column = tl.arange(0, HALF_BLOCK)
    in_head = (column < HALF_DIM)[None, :]
    known = token < num_tokens
    first_weight, second_weight = 1.0, 1.0
    if NORM:
        is_turned = known & (head < NUM_HEADS + NUM_KV_HEADS)
        first_weight, second_weight = _norm_weights(
            norm_weight, head, is_turned, column, in_head, NUM_HEADS, HALF_DIM
        )
    if USE_PDL:
        # In this order: when the attention starts, all that came before this kernel has ended.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide_token = token.to(tl.int64)
    places = qkv + (wide_token * (NUM_HEADS + 2 * NUM_KV_HEADS))[:, None] * (2 * HALF_DIM) + column[None, :]
    slot = tl.load(slots + token, mask=known & (token < num_slots), other=-1)
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
    if tl.program_id(1) * (HEADS * STEPS) >= NUM_HEADS + NUM_KV_HEADS:
        for _ in tl.static_range(STEPS):
            present = known & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
            loaded = present[:, None] & in_head
            place = places + head[:, None] * (2 * HALF_DIM)
            first = tl.load(place, mask=loaded, other=0.0)
            second = tl.load(place + HALF_DIM, mask=loaded, other=0.0)
            kept = present & (slot >= 0)
            _store(
                cache, target, head - NUM_HEADS, kept, column, in_head, head_stride, first, second, HALF_DIM
            )  # fmt: skip
            head += HEADS
        return
    angle = wide_token[:, None] * (2 * HALF_DIM) + column[None, :]
    cosine = tl.load(cos + angle, mask=known[:, None] & in_head, other=1.0)
    sine = tl.load(sin + angle, mask=known[:, None] & in_head, other=0.0)
    for step in tl.static_range(STEPS):
        present = known & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
        is_turned = known & (head < NUM_HEADS + NUM_KV_HEADS)
        loaded = present[:, None] & in_head
        turned = is_turned[:, None] & in_head
        place = places + head[:, None] * (2 * HALF_DIM)
        first = tl.load(place, mask=loaded, other=0.0).to(tl.float32)
        second = tl.load(place + HALF_DIM, mask=loaded, other=0.0).to(tl.float32)
        if NORM:
            if step > 0:
                first_weight, second_weight = _norm_weights(
                    norm_weight, head, is_turned, column, in_head, NUM_HEADS, HALF_DIM
                )
        first_out, second_out = _turned(
            first, second, first_weight, second_weight, cosine, sine, turned, eps,
            qkv.dtype.element_ty, NORM, HALF_DIM,
        )  # fmt: skip
        is_query = turned & (head < NUM_HEADS)[:, None]
        tl.store(place, first_out, mask=is_query)
        tl.store(place + HALF_DIM, second_out, mask=is_query)
        kept = present & (slot >= 0)
        _store(
            cache, target, head - NUM_HEADS, kept, column, in_head, head_stride, first_out, second_out, HALF_DIM
        )  # fmt: skip
        head += HEADS


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: tokens × heads at once, `steps` times with the next heads.

    vectors: how often each thread loads 8 elements of either half at once.
    """

    tokens: int
    heads: int
    vectors: int
    steps: int = 1

    def num_warps(self, half_block: int) -> int:
        """A power of two, 1 to 8. half_block: elements of half a head, padded to a power of two."""
        return max(1, min(8, self.tokens * self.heads * half_block // (self.vectors * 8 * 32)))


TILES: Final = (
    (16, Tile(tokens=1, heads=2, vectors=1)),
    (128, Tile(tokens=1, heads=4, vectors=1)),
    (256, Tile(tokens=1, heads=16, vectors=1)),
    (512, Tile(tokens=1, heads=32, vectors=1)),
    (1 << 30, Tile(tokens=4, heads=4, vectors=1, steps=2)),
)
"""By most tokens, from a sweep on an H200: for few of them latency counts, for many bandwidth."""

_FIXED_TILE: Final = Tile(tokens=1, heads=4, vectors=1)
_ANGLE_TOKENS: Final = 4
_PIECE: Final = 1024
"""Elements of a row of the table that a program copies: one 16-byte access of each of 128 threads for short types."""


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

    def with_embedding(
        self, positions: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor
    ) -> tuple[RotaryStep, torch.Tensor]:
        """See the contract."""
        num_tokens, half_dim = len(positions), len(self._frequencies)
        vocab_size, size = table.shape
        out = torch.empty(num_tokens, 2 * half_dim, dtype=torch.float32, device=positions.device)
        hidden = torch.empty(num_tokens, size, dtype=table.dtype, device=table.device)
        if num_tokens:
            begin_kernel[(num_tokens, 1 + triton.cdiv(size, _PIECE))](
                positions,
                self._frequencies,
                out,
                token_ids,
                table,
                hidden,
                self._factor,
                vocab_size,
                table.stride(0),
                size,
                HALF_DIM=half_dim,
                HALF_BLOCK=self._half_block,
                PIECE=_PIECE,
                num_warps=4,
                **pdl_options(positions.device),
            )
        return RotaryStep(out[:, :half_dim], out[:, half_dim:]), hidden


class TritonRopeOps:
    """See the contract."""

    __slots__ = ()

    def angles(self, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> TritonAngles:
        """See the contract. dtype is not used: cosine and sine stay float32."""
        return TritonAngles(frequencies, factor)

    def project_and_store(
        self,
        call: LinearCall | PackedCall,
        rotary: RotaryStep,
        norms: HeadNorms | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor | None:
        """See the contract."""
        if order_is_fixed():  # one way for any number of tokens: that of rotate_and_store
            return None
        around = Surroundings(rotary, norms, cache, slots)
        if isinstance(call, PackedCall):
            return packed_heads(call, around)
        plan = plan_for(call, around)
        return None if plan is None else heads(plan, call, around).run()

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
        chosen = tile or _tile_for(num_tokens)
        half_block = triton.next_power_of_2(head_dim // 2)
        num_kv_heads = cache.shape[2] // 2
        block_stride, position_stride, head_stride, _ = cache.stride()
        grid = (
            triton.cdiv(num_tokens, chosen.tokens),
            triton.cdiv(num_all_heads, chosen.heads * chosen.steps),
        )
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
            STEPS=chosen.steps,
            num_warps=chosen.num_warps(half_block),
            **pdl_options(qkv.device),
        )


def _tile_for(num_tokens: int) -> Tile:
    """In the fixed order one for all: with it the lanes that a head's squares are added up in."""
    if order_is_fixed():
        return _FIXED_TILE
    return next(tile for most, tile in TILES if num_tokens <= most)


TRITON: Final = TritonRopeOps()
