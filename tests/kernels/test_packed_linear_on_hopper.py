"""What the compiler makes of the packed linear maps for sm_90: numbers go from words to the tensor cores in registers.

Needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from oneloop_kernels.ops.linear import NUM_TICKETS
from oneloop_kernels.ops.linear.heads import Surroundings
from oneloop_kernels.ops.packed_linear import PackedCall, PackedWeight
from oneloop_kernels.ops.packed_linear.launches import few_rows, slices, stream, unpacked
from oneloop_kernels.ops.packed_linear.plans import StreamPlan, fitting
from oneloop_kernels.ops.rope import RotaryStep
from oneloop_kernels.testing.hopper import compile_all_for_hopper, spec_of_launch

UNALIGNED = ("num_tokens", "in_size", "columns")


@dataclass(frozen=True)
class Case:
    """A weight of 6144 × 4096 (twice as many rows when gated) and a plan for it."""

    plan: StreamPlan
    num_tokens: int
    bits: int = 4
    shift: str = "none"
    groups: int = 1
    gated: bool = False
    heads: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "one row": Case(StreamPlan(2, 16, residents=2), 1),
    "one row, offsets": Case(StreamPlan(1, 16, residents=3), 1, shift="offset"),
    "one row, zeros": Case(StreamPlan(1, 16, residents=3), 1, shift="zero"),
    "gated": Case(StreamPlan(1, 16, residents=2), 16, gated=True),
    "sixteen rows": Case(StreamPlan(1, 16, residents=2), 16, shift="zero", dtype=torch.float16),
    "four residents": Case(StreamPlan(2, 16, residents=4), 1),
    "four residents, slices": Case(StreamPlan(1, 16, residents=4, slices=True), 8),
    "slices": Case(StreamPlan(1, 16, residents=2, slices=True), 1),
    "slices, zeros": Case(StreamPlan(1, 16, residents=3, slices=True), 1, shift="zero"),
    "slices, offsets": Case(StreamPlan(1, 16, residents=2, slices=True), 1, shift="offset"),
    "slices, gated": Case(StreamPlan(1, 16, residents=2, slices=True), 1, gated=True),
    "heads": Case(StreamPlan(1, 16, residents=2, slices=True), 1, heads=True),
    "slices of q4_1": Case(StreamPlan(1, 16, residents=2, slices=True), 8, shift="offset", groups=4),
    "slices of q6_k": Case(StreamPlan(1, 16, residents=2, slices=True), 16, bits=6, groups=8),
    "many rows": Case(StreamPlan(1, 16), 64),
    "many rows, two tiles": Case(StreamPlan(2, 16), 64, shift="zero"),
    "many rows of q6_k": Case(StreamPlan(1, 16, residents=2), 64, bits=6, groups=8),
    "many rows of q4_k, gated": Case(StreamPlan(1, 16), 64, shift="offset", groups=4, gated=True),
    "q4_k": Case(StreamPlan(1, 16, residents=2), 8, shift="offset", groups=4),
    "q6_k": Case(StreamPlan(1, 16, residents=2), 8, bits=6, groups=8),
    "zeros of sixteen": Case(StreamPlan(2, 16), 32, shift="zero", groups=8),
    "q8_0": Case(StreamPlan(1, 16, residents=2), 8, bits=8, groups=4, dtype=torch.float16),
}


def call_of(case):
    """Tensors of the meta device have shapes and no memory."""

    def tensor(*sizes, dtype=torch.int32):
        return torch.empty(sizes, dtype=dtype, device="meta")

    halves = 2 if case.gated else 1
    kinds = 1 if case.shift == "none" else 2
    high = {
        4: None,
        6: tensor(96 * halves, 32, 1024, dtype=torch.int16),
        8: tensor(96 * halves, 32, 1024),
    }[case.bits]
    weight = PackedWeight(
        tensor(96 * halves, 32, 1024),
        high,
        tensor(96 * halves, 32, 32 * case.groups, kinds),
        case.bits,
        case.shift,
        6144 * halves,
        4096,
        halves,
        case.dtype,
    )
    return PackedCall(
        tensor(case.num_tokens, 4096, dtype=case.dtype),
        weight,
        gated=case.gated,
        residual=None if case.gated or case.heads else tensor(case.num_tokens, 6144, dtype=case.dtype),
        tickets=tensor(NUM_TICKETS),
    )


def launch_of(case):
    call = call_of(case)
    plan = fitting(case.plan, call.weight, case.num_tokens, gated=case.gated or case.heads)
    if not case.heads:
        return stream(plan, call)

    def tensor(*sizes, dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    angles = tensor(case.num_tokens, 128, dtype=torch.float32)
    around = Surroundings(
        RotaryStep(angles[:, :64], angles[:, 64:]),
        None,
        tensor(9, 16, 16, 128, dtype=case.dtype),
        tensor(case.num_tokens, dtype=torch.int64),
    )
    return slices(plan, call, around)


def specs():
    """The kernel of each case; those of any card once."""
    for name, case in CASES.items():
        launch = launch_of(case)
        unaligned = (*UNALIGNED, "num_slots")
        yield name, spec_of_launch(launch.kernel, launch.arguments, launch.constants, unaligned)
    launch = unpacked(call_of(CASES["one row, zeros"]).weight)
    yield "written out", spec_of_launch(launch.kernel, launch.arguments, launch.constants, UNALIGNED)
    launch = few_rows(call_of(CASES["q4_k"]))
    yield "any card", spec_of_launch(launch.kernel, launch.arguments, launch.constants, UNALIGNED)


SPECS = dict(specs())


@pytest.fixture(scope="module")
def reports():
    return dict(zip(SPECS, compile_all_for_hopper(list(SPECS.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_numbers_go_straight_to_the_tensor_cores(reports, name):
    """Read 16 bytes at a time and written nowhere, scaled in pairs, multiplied from registers; nothing spilled."""
    report, case = reports[name], CASES[name]
    assert report.spilled == 0
    assert not report.overwritten
    assert report.count("ACQBULK"), "no wait for the kernel before"
    assert report.count("PREEXIT"), "the next kernel is not let in"
    halves = 2 if case.gated or case.heads else 1
    copies = halves * (2 if case.bits == 4 else 3)
    copy = r"UTMALDG\.4D" if case.plan.slices else r"UTMALDG\.3D"
    assert report.count(copy) == 2 * copies  # at the start and later; boxes in parts would lie otherwise
    tiles = case.plan.column_tiles * halves
    assert report.count(r"LDS\.128") >= 2 * tiles
    on_sums = case.plan.on_sums(call_of(case).weight, case.num_tokens)
    by_ones = on_sums and case.shift == "offset"
    scaling = r"HFMA2" if case.shift == "offset" else r"HMUL2"
    assert (report.count(scaling) >= 32 * tiles) != on_sums
    if case.num_tokens > 16:
        assert report.count(rf"HGMMA\.64x{case.num_tokens}x16\.F32") == 8 * tiles
    else:
        products = 8 * max(1, case.num_tokens // 8)
        assert report.count(r"HMMA\.16816\.F32") == products * (tiles + by_ones * case.plan.column_tiles)
        assert report.count(r"LDSM\.16\.M88\.4") >= 4 * case.plan.column_tiles
    assert report.shared * case.plan.residents <= 227 * 1024


@pytest.mark.parametrize("name", ["written out", "any card"])
def test_kernels_of_any_card_compile(reports, name):
    assert reports[name].spilled == 0
