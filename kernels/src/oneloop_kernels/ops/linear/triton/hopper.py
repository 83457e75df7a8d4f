"""What both kernels of Hopper share: how work is cut, copied and put together.

Units of work, blocks of BLOCK_K columns of tiles [BLOCK_N, BLOCK_M], are numbered tile by tile, the tiles of the same
weights one after the other, and cut into equal ranges, one per program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.constexpr_function
def sums_layout(block_m, block_n, num_warps):
    """Sixteen results to a warp, and where there are more warps than that, the rows of x divided among them."""
    down = min(num_warps, block_n // 16)
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[down, num_warps // down],
        instr_shape=[16, block_m * down // num_warps, 16],
    )


@gluon.jit
def copy_weights(
    weight_desc, weights, arrived, unit, end, stage, num_blocks, token_tiles, out_size,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; the stage has arrived when they and the unit's rows of x have."""
    halves: gl.constexpr = 2 if GATED else 1
    tile = unit // num_blocks
    column = (unit - tile * num_blocks) * BLOCK_K
    row = tile // token_tiles * BLOCK_N
    barrier = arrived.index(stage)
    mbarrier.expect(barrier, 2 * (halves * BLOCK_N + BLOCK_M) * BLOCK_K, pred=unit < end)
    tma.async_copy_global_to_shared(
        weight_desc, [row, column], barrier, weights.index(stage * halves), pred=unit < end
    )
    if GATED:
        tma.async_copy_global_to_shared(
            weight_desc,
            [out_size + row, column],
            barrier,
            weights.index(stage * halves + 1),
            pred=unit < end,
        )


@gluon.jit
def copy_rows(
    x_desc, rows, arrived, unit, end, stage, num_blocks, token_tiles,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's rows of x."""
    tile = unit // num_blocks
    column = (unit - tile * num_blocks) * BLOCK_K
    tma.async_copy_global_to_shared(
        x_desc,
        [(tile % token_tiles) * BLOCK_M, column],
        arrived.index(stage),
        rows.index(stage),
        pred=unit < end,
    )


@gluon.jit
def program_of(unit, base, extra):
    """Whose range has this unit. Every range has one at least."""
    longer = extra * (base + 1)
    return gl.where(unit < longer, unit // (base + 1), extra + (unit - longer) // base)


@gluon.jit
def part_places(BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Offsets in a tile of partial sums: eight tokens side by side, so that a warp writes 256 bytes in a row."""
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    return columns[:, None] * 8 + (tokens // 8 * (8 * BLOCK_N) + tokens % 8)[None, :]


@gluon.jit
def activate(
    gate, up, bias_ptr, first_column, out_size,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Bias, then the gate."""
    if HAS_BIAS:
        columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
        within = columns < out_size
        gate += gl.load(bias_ptr + columns, mask=within, other=0.0).to(gl.float32)[:, None]
        if GATED:
            up += gl.load(bias_ptr + out_size + columns, mask=within, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate = gate / (1.0 + gl.exp(-gate)) * up
    return gate


@gluon.jit
def leave(
    partial_ptr, slot, gate, up,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of a tile, or of a piece of one, into a slot of partial sums."""
    halves: gl.constexpr = 2 if GATED else 1
    places = partial_ptr + slot * (halves * BLOCK_N * BLOCK_M) + part_places(BLOCK_M, BLOCK_N, layout)
    gl.store(places, gate)
    if GATED:
        gl.store(places + BLOCK_N * BLOCK_M, up)
