"""What is read in a kernel's SASS: operands of matrix products that are overwritten while these are in flight."""

from __future__ import annotations

import pytest

from oneloop_kernels.testing.sass import overwritten_operands

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R76, gdesc[UR16], R24, gsb0"
FIRST = "HGMMA.64x64x16.F32.BF16 R24, R80, gdesc[UR16], R24"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
END = "EXIT "


def code(*lines):
    return [(16 * place, line) for place, line in enumerate(lines)]


@pytest.mark.parametrize(
    "write",
    [
        "LDS.128 R76, [R2]",
        "LDS.64 R78, [R2]",
        "@!P0 IMAD.MOV.U32 R79, RZ, RZ, 0x1",
        "IMAD.WIDE R78, R1, R2, R4",
        "LDS.128 R72, [R2+0x10]",
        "LDSM.16.M88.4 R76, [R2]",
    ],
)
def test_a_write_before_the_wait_is_found(write):
    reaches = "R72" not in write
    assert bool(overwritten_operands(code(PRODUCT, write, WAIT, END))) is reaches
    assert not overwritten_operands(code(PRODUCT, WAIT, write, END))


@pytest.mark.parametrize(
    "other",
    [
        "ISETP.NE.AND P1, PT, R76, R77, PT",
        "LDS.64 R80, [R76]",
        "STS.128 [R76], R80",
        "HADD2.BF16_V2 R74, R76, R77",
        "UMOV UR76, UR2",
    ],
)
def test_who_only_reads_them_does_no_harm(other):
    assert not overwritten_operands(code(PRODUCT, other, WAIT, END))


def test_a_write_in_the_next_turn_of_a_loop_is_found():
    loop = ["MOV R76, R2", WAIT, FIRST, PRODUCT, "@P1 BRA 0x0", WAIT, "MOV R80, R3", END]
    (found,) = overwritten_operands(code(*loop))
    assert "R76" in found
    assert "in flight at 0x0" in found
    safe = ["MOV R76, R2", FIRST, PRODUCT, WAIT, "@P1 BRA 0x0", "MOV R80, R3", END]
    assert not overwritten_operands(code(*safe))


def test_a_wait_may_leave_products_in_flight():
    other = PRODUCT.replace("R76", "R90")
    write = "MOV R76, R2"
    assert overwritten_operands(code(PRODUCT, WAIT_FOR_ALL_BUT_ONE, write, WAIT, END))
    assert not overwritten_operands(code(PRODUCT, other, WAIT_FOR_ALL_BUT_ONE, write, WAIT, END))
    assert overwritten_operands(code(PRODUCT, other, WAIT_FOR_ALL_BUT_ONE, "MOV R90, R2", WAIT, END))


def test_a_way_without_the_wait_is_found():
    assert overwritten_operands(code(PRODUCT, "@P0 BRA 0x30", WAIT, "MOV R77, R2", WAIT, END))
    assert not overwritten_operands(code(PRODUCT, "BRA 0x30", "MOV R77, R2", WAIT, END))


def test_operands_in_shared_memory_are_no_concern():
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24, gsb0"
    assert not overwritten_operands(code(product, "MOV R16, R2", WAIT, END))
