"""From a word of packed numbers to weights in the tensor cores' registers: a shift, a mask and two operations a pair.

`packing` has put two neighbouring columns 16 bits apart. Under the leading bits of a power of two whose last bit weighs
one (128 in bfloat16, 1024 in float16) a number is that power plus itself; subtracting the power, with the zero, is
exact. Then it is scaled, which rounds once.

What is unpacked at once is a tile of 64 rows × 128 columns, or a slice: 16 rows × four tiles of columns. Then
COLUMN_TILES is SLICE, shapes have the column tile in the place of w, the warp's rows, and a matrix is [4, 16, 128].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE_ROWS = gl.constexpr(64)
TILE_COLUMNS = gl.constexpr(128)
OUTPUTS = 8
SLICE = gl.constexpr(0)


@gluon.constexpr_function
def unpack_asm(bits: int, shift: str, is_bf16: bool) -> str:
    """Two words (d = 0, 1), and what belongs to them, to eight pairs of weights, n = 4 d + 2 s + r.

    Inputs, a register for each d: words; of 8 bits the upper words; of 6 one register with both uppers; the scales of
    r = 0 and of r = 1, each given twice in a register; with a shift those likewise.
    """
    kind, power, sixteen = ("bf16x2", 0x4300, 0x4180) if is_bf16 else ("f16x2", 0x6400, 0x4C00)
    constants = {"power": power, "sixteen": sixteen, "middle": power + 8, "centre": power + (1 << (bits - 1))}
    lines = [f".reg .b32 t, u, {', '.join(constants)};"]
    lines += [f"mov.b32 {name}, {value << 16 | value:#x};" for name, value in constants.items()]
    for number in range(OUTPUTS):
        lines += _pair(number, bits, shift, kind)
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def unpack_constraints(bits: int, shift: str) -> str:
    """Of `unpack_asm`. Results are written while inputs are still to be read."""
    inputs = {4: 2, 6: 3, 8: 4}[bits] + (4 if shift == "none" else 8)
    return ",".join(["=&r"] * OUTPUTS + ["r"] * inputs)


@gluon.constexpr_function
def raw_asm(centre: str, is_bf16: bool) -> str:
    """Two words of 4 bits to eight pairs of numbers, each with a power of two on top, less what `centre` says.

    "middle": the power and 8. "zero": what inputs after the words give, as in `unpack_asm`. "offset": nothing.
    """
    kind, power = ("bf16x2", 0x4300) if is_bf16 else ("f16x2", 0x6400)
    constants = {"power": power, "middle": power + 8}
    lines: list[str] = [f".reg .b32 {', '.join(constants)};"]
    lines += [f"mov.b32 {name}, {value << 16 | value:#x};" for name, value in constants.items()]
    for number in range(OUTPUTS):
        d, place, r = number // 4, number % 4, number % 2
        lines += _nibble(f"${number}", OUTPUTS + d, place, "power")
        if centre != "offset":
            less = "middle" if centre == "middle" else f"${OUTPUTS + 2 + 2 * r + d}"
            lines.append(f"sub.rn.{kind} ${number}, ${number}, {less};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def raw_constraints(centre: str) -> str:
    """Of `raw_asm`."""
    return ",".join(["=&r"] * OUTPUTS + ["r"] * (6 if centre == "zero" else 2))


@gluon.constexpr_function
def _pair(number: int, bits: int, shift: str, kind: str) -> list[str]:
    d, place, r = number // 4, number % 4, number % 2
    high = OUTPUTS + 2
    scale = high + {4: 0, 6: 1, 8: 2}[bits] + 2 * r + d
    lines: list[str] = _nibble("t", OUTPUTS + d, place, "0" if bits == 6 else "power")
    if bits == 6:
        lines += _upper_of_six(high, 2 * number - 4)
    if bits == 8:
        lines += _nibble("u", high + d, place, "power")
        lines += [
            f"sub.rn.{kind} u, u, middle;",
            f"sub.rn.{kind} t, t, power;",
            f"fma.rn.{kind} t, u, sixteen, t;",
        ]
        subtracted = f"${scale + 4}" if shift == "zero" else ""
    else:
        subtracted = f"${scale + 4}" if shift == "zero" else "centre"
    if subtracted:
        lines.append(f"sub.rn.{kind} t, t, {subtracted};")
    if shift == "offset":
        lines.append(f"fma.rn.{kind} ${number}, t, ${scale}, ${scale + 4};")
    else:
        lines.append(f"mul.rn.{kind} ${number}, t, ${scale};")
    return lines


@gluon.constexpr_function
def _nibble(target: str, word: int, place: int, added: str) -> list[str]:
    source = f"${word}"
    lines = []
    if place:
        lines.append(f"shr.u32 {target}, {source}, {4 * place};")
        source = target
    if added == "0":
        lines.append(f"and.b32 {target}, {source}, 0x000f000f;")
    else:
        lines.append(f"lop3.b32 {target}, {source}, 0x000f000f, {added}, 0xea;")  # (a & b) | c
    return lines


@gluon.constexpr_function
def _upper_of_six(word: int, shift: int) -> list[str]:
    """Bits 4 and 5 of both halves, beside the lower four and the power."""
    if shift < 0:
        moved = f"shl.b32 u, ${word}, {-shift};"
    elif shift:
        moved = f"shr.u32 u, ${word}, {shift};"
    else:
        moved = f"mov.b32 u, ${word};"
    return [
        moved,
        "lop3.b32 u, u, 0x00300030, power, 0xea;",
        "or.b32 t, t, u;",
    ]


@gluon.constexpr_function
def _words_layout():
    """Of [a, w, g, c, b, d]; see `packing`. Of scales too, where some dimensions are 1."""
    return gl.BlockedLayout([1, 1, 1, 1, 2, 2], [1, 1, 8, 4, 1, 1], [1, 4, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])


@gluon.constexpr_function
def _rows_layout():
    """Of [w, g, 1]: pairs of rows."""
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _flat(rank):
    """Shared memory without a pattern."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.jit
def raw_numbers(
    words, params, place, tile,
    SHIFT: gl.constexpr, COLUMN_TILES: gl.constexpr, kind: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """[64, 128] of a stage's tile, unscaled: less their zero; with offsets, with a power of two on top."""
    inputs = (_numbers(words, place, tile, COLUMN_TILES, gl.int32),)
    centre: gl.constexpr = "middle" if SHIFT == "none" else SHIFT
    if centre == "zero":
        both = _of_tile(params, place, tile, gl.int64, [COLUMN_TILES, 1, 4, 8, 1, 1, 1]).load(_words_layout())
        inputs = inputs + _twice((both >> 32).to(gl.int32))
    o = gl.inline_asm_elementwise(
        raw_asm(centre, kind == gl.bfloat16),
        raw_constraints(centre),
        inputs,
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )
    return _matrix(o, kind, sums)


@gluon.jit
def scaled_weights(
    words, high, params, place, tile,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, COLUMN_TILES: gl.constexpr,
    kind: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """[64, 128] of a stage's tile, scaled."""
    layout: gl.constexpr = _words_layout()
    a: gl.constexpr = 2 if GROUPS > 1 else 1
    b: gl.constexpr = 2 if GROUPS > 2 else 1
    d: gl.constexpr = 2 if GROUPS > 4 else 1
    per_group: gl.constexpr = [COLUMN_TILES, a, 4, 8, 1, b, d]
    if SHIFT == "none":
        inputs = _twice(_of_tile(params, place, tile, gl.int32, per_group).load(layout))
    else:
        both = _of_tile(params, place, tile, gl.int64, per_group).load(layout)
        inputs = _twice(both.to(gl.int32)) + _twice((both >> 32).to(gl.int32))
    if BITS > 4:
        inputs = (_numbers(high, place, tile, COLUMN_TILES, high.dtype),) + inputs  # noqa: RUF005 Gluon has no stars
    o = gl.inline_asm_elementwise(
        unpack_asm(BITS, SHIFT, kind == gl.bfloat16),
        unpack_constraints(BITS, SHIFT),
        (_numbers(words, place, tile, COLUMN_TILES, gl.int32),) + inputs,  # noqa: RUF005
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )
    return _matrix(o, kind, sums)


@gluon.jit
def tile_scale(
    params,
    place,
    tile,
    SHIFT: gl.constexpr,
    COLUMN_TILES: gl.constexpr,
    kind: gl.constexpr,
    sums: gl.constexpr,
):
    """float32 [64] or [4, 16] each: what a tile's sums are multiplied by, and of offsets what the sum of x."""
    power: gl.constexpr = 128.0 if kind == gl.bfloat16 else 1024.0
    middle: gl.constexpr = power + 8.0
    layout: gl.constexpr = _rows_layout()
    per_row: gl.constexpr = [COLUMN_TILES, 4, 8, 1]
    if SHIFT == "none":
        pairs = _of_tile(params, place, tile, gl.int32, per_row).load(layout)
        scale = _by_rows(pairs, kind, sums)
        shift = scale * -middle
    else:
        both = _of_tile(params, place, tile, gl.int64, per_row).load(layout)
        scale = _by_rows(both.to(gl.int32), kind, sums)
        stored = _by_rows((both >> 32).to(gl.int32), kind, sums)
        shift = stored - scale * middle if SHIFT == "offset" else -scale * stored
    return scale, shift


@gluon.jit
def _by_rows(pairs, kind: gl.constexpr, sums: gl.constexpr):
    """int32 [w, g, 1] of two numbers → float32 [64], a row each, or [4, 16]."""
    low = pairs.to(gl.int16).to(kind, bitcast=True).to(gl.float32)
    up = (pairs >> 16).to(gl.int16).to(kind, bitcast=True).to(gl.float32)
    rank: gl.constexpr = sums.rank
    # [w, g, 1, r] → (w, r, g)
    return gl.convert_layout(
        gl.join(low, up).permute((0, 3, 1, 2)).reshape(_rows_shape(rank)),
        gl.SliceLayout(rank - 1, sums),
        assert_trivial=True,
    )


@gluon.jit
def _numbers(words, place, tile, COLUMN_TILES: gl.constexpr, kind: gl.constexpr):
    """[a, w, g, c, b, d] of a stage's tile."""
    return _of_tile(words, place, tile, kind, [COLUMN_TILES, 2, 4, 8, 4, 2, 2]).load(_words_layout())


@gluon.jit
def _of_tile(buffer, place, tile, kind: gl.constexpr, shape: gl.constexpr):
    """A tile's part of a stage. shape: [column tiles, (a,) w, …]; a slice lies as [column tile, (a,) …] in memory."""
    if shape[0] == SLICE:
        lying: gl.constexpr = _lying(shape)
        lies = buffer.index(place)._reinterpret(kind, lying, _flat(len(lying)))
        part = lies.permute(_standing(len(lying)))
    else:
        part = buffer.index(place)._reinterpret(kind, shape, _flat(len(shape) - 1)).index(tile)
    return part


@gluon.constexpr_function
def _lying(shape):
    """Of a slice that is to have the shape after its first number: a behind the column tile, where there is an a."""
    return list(shape[1:]) if len(shape) == 4 else [shape[2], shape[1], *shape[3:]]


@gluon.constexpr_function
def _standing(rank):
    """The way back."""
    return list(range(rank)) if rank == 3 else [1, 0, *range(2, rank)]


@gluon.constexpr_function
def _rows_shape(rank):
    return [64] if rank == 2 else [4, 16]


@gluon.constexpr_function
def _matrix_shape(rank):
    return [*_rows_shape(rank), 128]


@gluon.jit
def _matrix(o, kind: gl.constexpr, sums: gl.constexpr):
    """Pairs n = 4 d + 2 s + r of [a, w, g, c, b, h] → [64, 128] as the tensor cores take it from registers."""
    even = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    odd = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    # [a, w, g, c, b, h, r, s, d] → (w, r, g) × (a, b, d, s, c, h)
    matrix = gl.join(even, odd).permute((1, 6, 2, 0, 4, 8, 7, 3, 5)).reshape(_matrix_shape(sums.rank))
    return gl.convert_layout(
        matrix.to(kind, bitcast=True), gl.DotOperandLayout(0, sums, 2), assert_trivial=True
    )


@gluon.jit
def _twice(pairs):
    """The lower and the upper half of each, both given twice."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;",
        "=&r,=r,r",
        [pairs],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
