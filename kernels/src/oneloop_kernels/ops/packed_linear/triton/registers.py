"""From a word of packed numbers to weights in the tensor cores' registers: a shift, a mask and two operations a pair.

`packing` has put two neighbouring columns 16 bits apart. Under the leading bits of a power of two whose last bit weighs
one (128 in bfloat16, 1024 in float16) a number is that power plus itself; subtracting the power, with the zero, is
exact. Then it is scaled, which rounds once.
"""

from __future__ import annotations

from triton.experimental import gluon

OUTPUTS = 8


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
def raw_asm(is_bf16: bool) -> str:
    """Two words of 4 bits to eight pairs of numbers, each with a power of two on top."""
    power = 0x43004300 if is_bf16 else 0x64006400
    lines = [".reg .b32 power;", f"mov.b32 power, {power:#x};"]
    for number in range(OUTPUTS):
        lines += _nibble(f"${number}", OUTPUTS + number // 4, number % 4, "power")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def raw_constraints() -> str:
    """Of `raw_asm`."""
    return ",".join(["=&r"] * OUTPUTS + ["r"] * 2)


@gluon.constexpr_function
def _pair(number: int, bits: int, shift: str, kind: str) -> list[str]:
    d, place, r = number // 4, number % 4, number % 2
    high = OUTPUTS + 2
    scale = high + {4: 0, 6: 1, 8: 2}[bits] + 2 * r + d
    lines = _nibble("t", OUTPUTS + d, place, "0" if bits == 6 else "power")
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
        return [*lines, f"and.b32 {target}, {source}, 0x000f000f;"]
    return [*lines, f"lop3.b32 {target}, {source}, 0x000f000f, {added}, 0xea;"]  # (a & b) | c


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
