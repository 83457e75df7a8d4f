"""Keys and values of 8 bits as left operands of Hopper's matrix products, which take those from registers.

The copy engine leaves a tile as rows of 128 bytes, swizzled. Both operands are float16: it holds these numbers
exactly, and one instruction makes two of them. No byte is moved for the sake of its place but by the choice of what
is called the n-th element:

* A sum over head dimensions may take them in any order. A thread of a product has two neighbours and the two that
  come 8 later, of every 16; a thread loads 32 neighbours, whose first four it takes for those of the first 16. The
  queries are put in the same order (`order_dims`) once per pair.
* Of the values, keys must become neighbours. Two dimensions of one key are a number of 16 bits, of which matrices of
  8 × 8 are transposed as they are loaded; of the four bytes of two such numbers the middle two change places. The
  results' rows then have an order of their own (`dims_of_rows`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _keys_layout(keys):
    """A thread's: 32 neighbours of the rows 8 apart. A phase of 8 threads loads from all banks."""
    more = [[64, 0]] if keys == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], *more],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[keys, 128],
    )


@gluon.constexpr_function
def _values_layout(keys):
    """Of numbers of 16 bits: transposed matrices of 8 keys × 8 numbers, as the hardware loads them."""
    more = [[64, 0]] if keys == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [16, 0], [32, 0], *more, [0, 32]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[keys, 64],
    )


@gluon.jit
def keys_operand(narrow, KEYS: gl.constexpr, layout: gl.constexpr):
    """[KEYS, 128] e4m3 in shared memory → the same in float16, its columns in the order of `order_dims`.

    layout: of the product's result.
    """
    loaded = narrow.load(_keys_layout(KEYS)).to(gl.float16)
    return gl.convert_layout(order_dims(loaded, KEYS), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def order_dims(rows, ROWS: gl.constexpr):
    """[ROWS, 128] of any type, whose columns are put in the order of the keys' operand."""
    parts = gl.reshape(rows, [ROWS, 4, 8, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [ROWS, 128])


@gluon.jit
def values_operand(pairs, KEYS: gl.constexpr, layout: gl.constexpr):
    """[KEYS, 64] numbers of 16 bits in shared memory, each e4m3 of two dimensions → [128, KEYS] float16, its rows in
    the order of `dims_of_rows`. layout: of the product's result.
    """
    even, odd = gl.inline_asm_elementwise(
        "{ .reg .b32 keys; .reg .b16 low, high; prmt.b32 keys, $2, 0, 0x3120; mov.b32 {low, high}, keys; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [pairs.load(_values_layout(KEYS))],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    both = gl.reshape(gl.join(even, odd), [KEYS, 8, 8, 2])
    rows = gl.reshape(gl.permute(both, (1, 3, 2, 0)), [128, KEYS])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def dims_of_rows(rows):
    """Which head dimension the product of `values_operand` has in these rows: 8 even ones, then 8 odd ones."""
    return rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
