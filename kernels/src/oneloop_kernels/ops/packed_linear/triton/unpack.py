"""Packed weights written out, tile by tile; `packing` says how they lie. For any card."""

from __future__ import annotations

import triton
import triton.language as tl

TILE_ROWS = tl.constexpr(64)
TILE_COLUMNS = tl.constexpr(128)
TILE_WORDS = tl.constexpr(1024)


@triton.jit
def unpack_kernel(
    words_ptr, high_ptr, params_ptr, out_ptr,
    half_tiles, half_rows, columns,
    BITS: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out: [rows, columns] contiguous, of the scales' type. Grid: [row tiles, column tiles]."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the kernel before may still read what was there before
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    tile = row_tile.to(tl.int64) * tl.num_programs(1) + column_tile
    weights = unpacked_tile(words_ptr, high_ptr, params_ptr, tile, BITS, SHIFT, GROUPS)
    row = row_tile % half_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    place = (row_tile // half_tiles * half_rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + place, weights, mask=(row < half_rows)[:, None] & (column < columns)[None, :])


@triton.jit
def unpacked_tile(
    words_ptr, high_ptr, params_ptr, tile, BITS: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr
):
    """[64, 128] of the scales' type. tile: int64. params: of 16-bit numbers."""
    place = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)
    digit = tl.arange(0, 8)[None, :]
    lower = (tl.load(words_ptr + place)[:, None] >> (4 * digit)) & 15
    numbers = _by_words(lower)
    if BITS == 8:
        upper = (tl.load(high_ptr + place)[:, None] >> (4 * digit)) & 15
        numbers += _by_words(upper) * 16
    if BITS == 6:
        upper = (tl.load(high_ptr + place).to(tl.int32)[:, None] >> (2 * digit)) & 3
        numbers += _by_pairs(upper) * 16
    centre: tl.constexpr = 1 << (BITS - 1)
    kinds: tl.constexpr = 1 if SHIFT == "none" else 2
    scale = _per_column(params_ptr, tile, 0, kinds, GROUPS)
    wide = numbers.to(tl.float32)
    if SHIFT == "zero":
        base: tl.constexpr = (
            -128.0 if BITS == 8 else 128.0 if params_ptr.dtype.element_ty == tl.bfloat16 else 1024.0
        )
        wide = (wide + base - _per_column(params_ptr, tile, 1, kinds, GROUPS)) * scale
    elif SHIFT == "offset":
        wide = (wide - centre) * scale + _per_column(params_ptr, tile, 1, kinds, GROUPS)
    else:
        wide = (wide - centre) * scale
    return wide.to(params_ptr.dtype.element_ty)


@triton.jit
def _by_words(eights):
    """[a, w, g, c, b, d] × [h, s, r] → (w, r, g) × (a, b, d, s, c, h)."""
    apart = eights.reshape(2, 4, 8, 4, 2, 2, 2, 2, 2)
    return apart.permute(1, 8, 2, 0, 4, 5, 7, 3, 6).reshape(TILE_ROWS, TILE_COLUMNS)


@triton.jit
def _by_pairs(eights):
    """[a, w, g, c, b, h] × [d, s, r] → (w, r, g) × (a, b, d, s, c, h)."""
    apart = eights.reshape(2, 4, 8, 4, 2, 2, 2, 2, 2)
    return apart.permute(1, 8, 2, 0, 4, 6, 7, 3, 5).reshape(TILE_ROWS, TILE_COLUMNS)


@triton.jit
def _per_column(params_ptr, tile, kind: tl.constexpr, kinds: tl.constexpr, GROUPS: tl.constexpr):
    """float32 [64, 128]: scales or shifts of a tile."""
    na: tl.constexpr = 2 if GROUPS > 1 else 1
    nb: tl.constexpr = 2 if GROUPS > 2 else 1
    nd: tl.constexpr = 2 if GROUPS > 4 else 1
    row, k = tl.arange(0, TILE_ROWS)[:, None], tl.arange(0, 8)[None, :]
    place = k // 4 % na * 32 + row // 16 * 8 + row % 8
    place = (place * nb + k // 2 % nb) * nd + k % nd
    place = tile * (64 * GROUPS * kinds) + (place * kinds + kind) * 2 + row // 8 % 2
    found = tl.load(params_ptr + place).to(tl.float32)
    return tl.broadcast_to(found[:, :, None], (TILE_ROWS, 8, 16)).reshape(TILE_ROWS, TILE_COLUMNS)
