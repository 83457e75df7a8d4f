"""Products that are rounded by themselves."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rounded_product(a, b):
    """a · b, rounded to float32 whatever is added to it: where the compiler made one operation of both, here or in the
    dense kernel alone, a row's bits would depend on which of them multiplies it."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )
