"""A linear map on Hopper for as many rows as keep the tensor cores busy: one warp copies, two warpgroups multiply.

The work is numbered and cut into equal ranges as in `stream`. Of a tile that is cut, the program that has its first
block finishes it: the others have left their sums in the slot of their own number and raised their flag. In each of
those that piece is the first of the range, so it has been there for long; and they have lower indices in the grid, so
they have been started before.

With SPREAD > 1 each tile is that many programs' only piece, and each of them finishes a slice of its columns. They wait
for one another: the grid must fit the device at once.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.linear.triton.hopper import (
    activate,
    copy_rows,
    copy_weights,
    leave,
    part_places,
    program_of,
    sums_layout,
)

PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def _out_layout(columns, num_warps):
    """Eight results of a row, 16 bytes, to a thread; whole sectors of partial sums to a warp."""
    across = min(4, columns // 8)
    return gl.BlockedLayout([8, 1], [across, 32 // across], [1, num_warps], [0, 1])


@gluon.jit(do_not_specialize=["num_tokens", "in_size"])
def dense_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, in_size, out_size, out_stride,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SPREAD: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = W · xᵀ + bias, or that product itself.

    x_desc, weight_desc: tensor maps with boxes [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K]; what lies outside reads as
    zero. out_size: columns of the result. partial: float32 [programs, 2 if GATED else 1, BLOCK_N · BLOCK_M],
    uninitialised. tickets: int32, one per program or tile, 0 before and after.
    """
    halves: gl.constexpr = 2 if GATED else 1
    num_blocks = gl.cdiv(in_size, BLOCK_K)
    token_tiles = gl.cdiv(num_tokens, BLOCK_M)
    total = gl.cdiv(out_size, BLOCK_N) * token_tiles * num_blocks
    base, extra = total // gl.num_programs(0), total % gl.num_programs(0)
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    begin = program * base + gl.minimum(program, extra)
    end = begin + base + (program < extra).to(gl.int32)

    weights = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES * halves, BLOCK_N, BLOCK_K], weight_desc.layout
    )
    rows = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    weights, rows, arrived, free, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
                    num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra, begin, end,
                    HAS_BIAS, GATED, HAS_RESIDUAL, BLOCK_M, BLOCK_N, STAGES, SPREAD, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, weight_desc, weights, rows, arrived, free,
                    num_blocks, token_tiles, out_size, begin, end,
                    GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, weight_desc, weights, rows, arrived, free, num_blocks, token_tiles, out_size, begin, end,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies: STAGES blocks ahead, the first weights before its kernel's turn has come."""
    for ahead in gl.static_range(STAGES):
        copy_weights(
            weight_desc, weights, arrived, begin + ahead, end, ahead, num_blocks, token_tiles, out_size,
            GATED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for ahead in gl.static_range(STAGES):
        copy_rows(x_desc, rows, arrived, begin + ahead, end, ahead, num_blocks, token_tiles, BLOCK_M, BLOCK_K)
    for unit in range(begin + STAGES, end):
        step = unit - begin
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES - 1) & 1)
        copy_weights(
            weight_desc, weights, arrived, unit, end, stage, num_blocks, token_tiles, out_size,
            GATED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        copy_rows(x_desc, rows, arrived, unit, end, stage, num_blocks, token_tiles, BLOCK_M, BLOCK_K)


@gluon.jit
def _multiply(
    weights, rows, arrived, free, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra, begin, end,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPREAD: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply and finish."""
    layout: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps())
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # what is read and written at the end is the kernel's before
    unit = begin
    while unit < end:
        tile = unit // num_blocks
        first = unit - tile * num_blocks
        count = gl.minimum(end - unit, num_blocks - first)
        gate, up = _products(
            weights, rows, arrived, free, unit - begin, count, GATED, BLOCK_M, BLOCK_N, STAGES, layout
        )
        columns = tile // token_tiles * BLOCK_N
        tokens = tile % token_tiles * BLOCK_M
        if SPREAD > 1:
            _finish_slice(
                gate, up, bias_ptr, out_ptr, partial_ptr, tickets_ptr, program, tile, columns, tokens,
                num_tokens, out_size, out_stride,
                HAS_BIAS, GATED, HAS_RESIDUAL, BLOCK_M, BLOCK_N, SPREAD, layout,
            )  # fmt: skip
        elif first != 0:
            leave(partial_ptr, program, gate, up, GATED, BLOCK_M, BLOCK_N, layout)
            gl.thread_barrier()  # all of the sums are written before the flag is raised
            gl.atomic_xchg(tickets_ptr + program, 1, sem="release", scope="gpu")
        else:
            if count != num_blocks:
                last_program = program_of((tile + 1) * num_blocks - 1, base, extra)
                gate, up = _collect(
                    gate, up, partial_ptr, tickets_ptr, program + 1, last_program,
                    GATED, BLOCK_M, BLOCK_N, layout,
                )  # fmt: skip
            gate = activate(gate, up, bias_ptr, columns, out_size, HAS_BIAS, GATED, BLOCK_N, layout)
            _write(
                gate, out_ptr, columns, tokens, num_tokens, out_size, out_stride,
                HAS_RESIDUAL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        unit += count


@gluon.jit
def _products(
    weights, rows, arrived, free, begin, count,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of so many units, from the program's unit `begin` on: gate, up [BLOCK_N, BLOCK_M]."""
    halves: gl.constexpr = 2 if GATED else 1
    gate = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    up = gate
    if GATED:
        up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    for step in range(begin, begin + count):
        stage = step % STAGES
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        x = rows.index(stage).permute((1, 0))
        gate = warpgroup_mma(weights.index(stage * halves), x, gate, is_async=True)
        if GATED:
            up = warpgroup_mma(weights.index(stage * halves + 1), x, up, is_async=True)
            gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        else:
            gate = warpgroup_mma_wait(1, deps=[gate])
        # Those of the block before are through; this one's are under way.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > begin)
    if GATED:
        gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    else:
        gate = warpgroup_mma_wait(0, deps=[gate])
    mbarrier.arrive(free.index((begin + count - 1) % STAGES))
    return gate, up


@gluon.jit
def _collect(
    gate, up, partial_ptr, tickets_ptr, first, last,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The sums, and those that the programs first … last left. Lowers their flags."""
    halves: gl.constexpr = 2 if GATED else 1
    for slot in range(first, last + 1):
        _wait_for(tickets_ptr + slot, 1)
        gl.thread_barrier()
        gl.store(tickets_ptr + slot, 0)
        places = partial_ptr + slot * (halves * BLOCK_N * BLOCK_M) + part_places(BLOCK_M, BLOCK_N, layout)
        gate += gl.load(places, cache_modifier=".cg")
        if GATED:
            up += gl.load(places + BLOCK_N * BLOCK_M, cache_modifier=".cg")
    return gate, up


@gluon.jit
def _wait_for(ptr, least):
    """Until a counter has come so far."""
    value = gl.atomic_add(ptr, 0, sem="acquire", scope="gpu")
    while value < least:
        value = gl.atomic_add(ptr, 0, sem="acquire", scope="gpu")


@gluon.jit
def _finish_slice(
    gate, up, bias_ptr, out_ptr, partial_ptr, tickets_ptr, program, tile, columns, tokens,
    num_tokens, out_size, out_stride,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPREAD: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Leave the sums, wait for the tile's other programs, finish a slice of the columns."""
    halves: gl.constexpr = 2 if GATED else 1
    SLICE: gl.constexpr = BLOCK_N // SPREAD
    out_layout: gl.constexpr = _out_layout(SLICE, gl.num_warps())
    leave(partial_ptr, program, gate, up, GATED, BLOCK_M, BLOCK_N, layout)
    gl.thread_barrier()  # all of the sums are written before they are counted
    gl.atomic_add(tickets_ptr + tile, 1, sem="release", scope="gpu")
    _wait_for(tickets_ptr + tile, SPREAD)
    gl.thread_barrier()
    part = program % SPREAD * SLICE
    down = gl.arange(0, SLICE, gl.SliceLayout(1, out_layout)) + part
    across = gl.arange(0, BLOCK_M, gl.SliceLayout(0, out_layout))
    places = partial_ptr + (program - program % SPREAD) * (halves * BLOCK_N * BLOCK_M)
    places += down[:, None] * 8 + (across // 8 * (8 * BLOCK_N) + across % 8)[None, :]
    sums = gl.load(places, cache_modifier=".cg")
    others = sums
    if GATED:
        others = gl.load(places + BLOCK_N * BLOCK_M, cache_modifier=".cg")
    for index in gl.static_range(1, SPREAD):
        piece = places + index * (halves * BLOCK_N * BLOCK_M)
        sums += gl.load(piece, cache_modifier=".cg")
        if GATED:
            others += gl.load(piece + BLOCK_N * BLOCK_M, cache_modifier=".cg")
    sums = activate(sums, others, bias_ptr, columns + part, out_size, HAS_BIAS, GATED, SLICE, out_layout)
    _write(
        sums, out_ptr, columns + part, tokens, num_tokens, out_size, out_stride, HAS_RESIDUAL, BLOCK_M, SLICE
    )
    gl.thread_barrier()
    if gl.atomic_add(tickets_ptr + tile, 1, sem="relaxed", scope="gpu") == 2 * SPREAD - 1:
        gl.store(tickets_ptr + tile, 0)


@gluon.jit
def _write(
    sums, out_ptr, first_column, first_token, num_tokens, out_size, out_stride,
    HAS_RESIDUAL: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Write (or add) the results [COLUMNS, BLOCK_M]."""
    layout: gl.constexpr = _out_layout(COLUMNS, gl.num_warps())
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    tokens = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    places = out_ptr + tokens[None, :].to(gl.int64) * out_stride + columns[:, None]
    mask = (columns < out_size)[:, None] & (tokens < num_tokens)[None, :]
    if HAS_RESIDUAL:
        out = gl.convert_layout(sums, layout)
        out += gl.load(places, mask=mask, other=0.0).to(gl.float32)
        gl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), layout)
        gl.store(places, out, mask=mask)
