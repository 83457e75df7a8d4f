"""What stream.py does otherwise where the cache has 8 bits: tiles of several key heads, widened in registers.

The left operands of the matrix products are keys and values in float16, which holds e4m3 exactly and which one
instruction makes two of; Hopper takes them from registers. No byte is moved for the sake of its place but by the choice
of what is called the n-th element:

* A sum over head dimensions may take them in any order. A thread of a product has two neighbours and the two that
  come 8 later, of every 16; a thread loads 32 neighbours, whose first four it takes for those of the first 16. The
  queries are put in the same order (`_order_dims`) once per pair.
* Of the values, keys must become neighbours. Two dimensions of one key are a number of 16 bits, of which matrices of
  8 × 8 are transposed as they are loaded; of the four bytes of two such numbers the middle two change places. The
  results' rows then have an order of their own (`dims_of_rows`).

A product has 8 columns however few query heads a key head has. So a tile has the keys of TOGETHER neighbouring heads,
which lie side by side in a block of the cache, and what belongs to different heads is hidden like a key that is not
there: "head" and "pair" of stream.py are such heads together.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.paged_attention.triton.softmax import FLOAT16_MAX, HIDDEN

HEAD_DIM = gl.constexpr(128)


@gluon.constexpr_function
def operand_layout(rows, columns):
    """Of a right operand in shared memory, of numbers of 16 bits."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16)


@gluon.constexpr_function
def _matrix_layout(bits):
    return gl.NVMMASharedLayout(128, bits, 2)


@gluon.constexpr_function
def _rows_layout():
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def _keys_layout(rows):
    """A thread's: 32 neighbours of the rows 8 apart. A phase of 8 threads loads from all banks."""
    more = [[64, 0]] if rows == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], *more],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[rows, 128],
    )


@gluon.constexpr_function
def _values_layout(rows):
    """Of numbers of 16 bits: transposed matrices of 8 keys × 8 numbers, as the hardware loads them."""
    more = [[64, 0]] if rows == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [16, 0], [32, 0], *more, [0, 32]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[rows, 64],
    )


@gluon.jit
def copy_tile(
    kv_desc, boxes, arrived, freed, table, index, length, head, count, with_queries,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, TOGETHER: gl.constexpr,
    QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As stream._copy_tile. kv_desc: of the cache as [blocks · heads, BLOCK_SIZE, HEAD_DIM], boxes [TOGETHER, BOX,
    HEAD_DIM], of which `boxes` has those of all stages' keys and values.
    """
    BOXES: gl.constexpr = boxes.shape[0] // (2 * STAGES)
    SPAN: gl.constexpr = BOXES * BOX
    KV_BYTES: gl.constexpr = 2 * SPAN * TOGETHER * HEAD_DIM
    Q_BYTES: gl.constexpr = QUERIES * HEAD_DIM * 2
    stage = count % STAGES
    barrier = arrived.index(stage)
    blocks = ()
    for box in gl.static_range(BOXES):
        position = index * SPAN + box * BOX
        blocks = blocks + (gl.load(table + position // BLOCK_SIZE, mask=position < length, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(freed.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(barrier, KV_BYTES + Q_BYTES, pred=with_queries)
    mbarrier.expect(barrier, KV_BYTES, pred=not with_queries)
    for box in gl.static_range(BOXES):
        position = index * SPAN + box * BOX
        keys = blocks[box] * (2 * KV_HEADS) + head * TOGETHER
        values = gl.where(position < length, keys + KV_HEADS, -TOGETHER)
        keys = gl.where(position < length, keys, -TOGETHER)
        inside = position % BLOCK_SIZE
        target = stage * (2 * BOXES) + box
        tma.async_copy_global_to_shared(kv_desc, [keys, inside, 0], barrier, boxes.index(target))
        tma.async_copy_global_to_shared(kv_desc, [values, inside, 0], barrier, boxes.index(target + BOXES))


@gluon.jit
def attend(
    begin, end, count, length, queries, boxes, weights, ordered, arrived, freed, scale_log2,
    GROUP: gl.constexpr, BOX: gl.constexpr, TOGETHER: gl.constexpr, QUERIES: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As stream._attend; the result's rows are in the order of `dims_of_rows`. A tile's values are made operands beside
    the product of its keys, the next tile's keys beside that of its values.

    boxes: of all stages. weights: [2, QUERIES, TILE], ordered: [QUERIES, HEAD_DIM], float16, scratch in shared memory.
    GROUP: query heads of one key head.
    """
    matrices = boxes._reinterpret(boxes.dtype, [STAGES * 2, TILE, HEAD_DIM], _matrix_layout(8))
    pairs = boxes._reinterpret(gl.int16, [STAGES * 2, TILE, HEAD_DIM // 2], _matrix_layout(16))
    parts = boxes._reinterpret(gl.int16, [boxes.shape[0], TOGETHER * BOX, HEAD_DIM // 2], _matrix_layout(16))
    acc = gl.zeros([HEAD_DIM, QUERIES], gl.float32, layout)
    sums = gl.zeros([TILE, QUERIES], gl.float32, layout)
    none = gl.zeros([TILE, QUERIES], gl.float32, layout)
    maximum = gl.full([QUERIES], HIDDEN, gl.float32, gl.SliceLayout(0, layout))
    rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    mine = gl.arange(0, QUERIES, gl.SliceLayout(0, layout)) // GROUP
    belong = (rows // BOX % TOGETHER)[:, None] == mine[None, :]
    mbarrier.wait(arrived.index(count % STAGES), count // STAGES & 1)
    _order_queries(queries, ordered)
    fence_async_shared()
    gl.thread_barrier()
    keys = _keys_operand(matrices.index(count % STAGES * 2), layout)
    for index in range(begin, end):
        stage = count % STAGES
        there = length - index * (TILE // TOGETHER)
        if (there < TILE // TOGETHER) & (there % BOX != 0):
            _clear(parts.index((2 * stage + 1) * (TILE // (TOGETHER * BOX)) + there // BOX), there % BOX, BOX)
            gl.thread_barrier()
        scores = warpgroup_mma(keys, ordered.permute((1, 0)), none, is_async=True)
        values = _values_operand(pairs.index(2 * stage + 1), layout)
        scores, keys = warpgroup_mma_wait(0, deps=[scores, keys])
        seen = (_keys_of_rows(rows, BOX, TOGETHER) < there)[:, None] & belong
        scores = gl.where(seen, scores, HIDDEN)
        new_maximum = gl.maximum(maximum, gl.max(scores, 0) * scale_log2)
        powers = gl.where(seen, gl.exp2(scores * scale_log2 - new_maximum[None, :]), 0.0)
        shrink = gl.exp2(maximum - new_maximum)[None, :]
        maximum = new_maximum
        sums = sums * shrink + powers
        acc = acc * shrink
        place = weights.index(count % 2)  # of the other one a slower warp may still read
        place.permute((1, 0)).store(powers.to(gl.float16))
        fence_async_shared()
        gl.thread_barrier()  # every warp's weights are there, and all have read the stage
        acc = warpgroup_mma(values, place.permute((1, 0)), acc, is_async=True)
        mbarrier.arrive(freed.index(stage), count=1)
        count += 1
        if index + 1 < end:
            mbarrier.wait(arrived.index(count % STAGES), count // STAGES & 1)
            keys = _keys_operand(matrices.index(count % STAGES * 2), layout)
        acc, values = warpgroup_mma_wait(0, deps=[acc, values])
    return acc, maximum, gl.sum(sums, 0)


@gluon.jit
def dims_of_rows(rows):
    """Which head dimension a result has in these rows: of every 16, 8 even ones, then 8 odd ones."""
    return rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2


@gluon.jit
def _keys_of_rows(rows, BOX: gl.constexpr, TOGETHER: gl.constexpr):
    """Which key of a tile is in these rows: BOX of each head in turn."""
    return rows // (BOX * TOGETHER) * BOX + rows % BOX


@gluon.jit
def float16_or_nan(values):
    """Into float16: what is beyond its numbers becomes the largest, and what is none stays none."""
    values = gl.maximum(values, -FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return gl.minimum(values, FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL).to(gl.float16)


@gluon.jit
def _order_queries(queries, ordered):
    """Queries into float16, in the order of the keys' operand; what is beyond its numbers becomes the largest."""
    values = queries.load(_rows_layout()).to(gl.float32)
    values = float16_or_nan(values)
    ordered.store(_order_dims(values))


@gluon.jit
def _order_dims(rows):
    """[n, HEAD_DIM] of any type, whose columns are put in the order of the keys' operand."""
    parts = gl.reshape(rows, [rows.shape[0], 4, 8, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [rows.shape[0], HEAD_DIM])


@gluon.jit
def _keys_operand(narrow, layout: gl.constexpr):
    """[TILE, HEAD_DIM] e4m3 in shared memory → the same in float16, columns reordered. layout: of the product."""
    loaded = narrow.load(_keys_layout(narrow.shape[0])).to(gl.float16)
    return gl.convert_layout(_order_dims(loaded), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _values_operand(pairs, layout: gl.constexpr):
    """[TILE, HEAD_DIM / 2] numbers of 16 bits in shared memory, each e4m3 of two dimensions → [HEAD_DIM, TILE] float16,
    its rows in the order of `dims_of_rows`. layout: of the product.
    """
    TILE: gl.constexpr = pairs.shape[0]
    even, odd = gl.inline_asm_elementwise(
        "{ .reg .b32 keys; .reg .b16 low, high; prmt.b32 keys, $2, 0, 0x3120; mov.b32 {low, high}, keys; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [pairs.load(_values_layout(TILE))],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    both = gl.reshape(gl.join(even, odd), [TILE, 8, 8, 2])
    rows = gl.reshape(gl.permute(both, (1, 3, 2, 0)), [HEAD_DIM, TILE])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _clear(part, there, BOX: gl.constexpr):
    """Zeros for a box's values from the key `there` on: nobody has written them, and zero times NaN would be felt.
    Boxes behind it are zeros as they come.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
    kept = part.load(layout)
    part.store(gl.where((rows % BOX < there)[:, None], kept, gl.zeros_like(kept)))
