"""What the compiler makes of the kernels for sm_90: wide loads, tensor cores, nothing spilled. Needs no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, ordered
from oneloop_kernels.ops.linear.launches import planned
from oneloop_kernels.ops.linear.plans import TUNED
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper, spec_of_launch

FIXED_ORDER_ROWS = (1, 64, 256, 2048)
TENSORS = ("x_ptr", "weight_ptr", "bias_ptr", "norm_ptr", "residual_ptr", "out_ptr")
SIZES = ("in_size", "out_size", "x_stride", "weight_stride", "residual_stride")


def few_rows(
    *, use_dot, block_m, block_n, block_k, split_k=1, gated=False, norm=False, residual=False, stages=4
):
    signature = (
        dict.fromkeys(TENSORS, "*bf16")
        | {"partial_ptr": "*fp32", "tickets_ptr": "*i32", "num_tokens": "i32", "eps": "fp32"}
        | dict.fromkeys(SIZES, "i32")
    )
    constants = {
        "weight_in_stride": 1, "HAS_BIAS": True, "HAS_NORM": norm, "GATED": gated, "HAS_RESIDUAL": residual,
        "USE_DOT": use_dot, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": split_k,
        "PREFETCH": 512 if use_dot else 0, "USE_PDL": True,
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": stages, "launch_pdl": True}
    return KernelSpec(
        "oneloop_kernels.ops.linear.triton.few_rows",
        "few_rows_kernel",
        signature,
        constants,
        options,
        ("num_tokens",),
    )


def rms_norm(*, rows, block, warps):
    signature = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16") | dict.fromkeys(
        (
            "num_rows",
            "size",
            "x_outer_stride",
            "x_inner_stride",
            "residual_outer_stride",
            "residual_inner_stride",
        ),
        "i32",
    )
    constants = {
        "inner": 1, "x_stride": 1, "residual_stride": 1, "HAS_RESIDUAL": True, "ROWS": rows, "BLOCK": block,
        "USE_PDL": True,
    }  # fmt: skip
    return KernelSpec(
        "oneloop_kernels.ops.rms_norm.triton",
        "rms_norm_kernel",
        signature | {"eps": "fp32"},
        constants,
        {"num_warps": warps, "launch_pdl": True},
        ("num_rows",),
    )


SPECS = {
    "stream-1": few_rows(use_dot=False, block_m=1, block_n=8, block_k=1024, norm=True),
    "stream-2-gated": few_rows(use_dot=False, block_m=2, block_n=4, block_k=1024, norm=True, gated=True),
    "dot-16-split": few_rows(use_dot=True, block_m=16, block_n=64, block_k=128, split_k=4, residual=True),
    "dot-16-norm": few_rows(use_dot=True, block_m=16, block_n=64, block_k=128, split_k=4, norm=True),
    "dot-8": few_rows(use_dot=True, block_m=8, block_n=64, block_k=128, norm=True),
    "dot-16-gated": few_rows(
        use_dot=True, block_m=16, block_n=64, block_k=128, norm=True, gated=True, stages=3
    ),
    "norm-row": rms_norm(rows=1, block=4096, warps=8),
    "norm-heads": rms_norm(rows=16, block=128, warps=4),
    "silu": KernelSpec(
        "oneloop_kernels.ops.silu_mul.triton",
        "silu_mul_kernel",
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32", "row_stride": "i32"},
        {"stride": 1, "BLOCK": 2048, "USE_PDL": True},
        {"num_warps": 8, "launch_pdl": True},
    ),
}


def tuned_specs():
    """Each kernel that a tuned plan launches, once. Tensors of the meta device have shapes and no memory."""
    found = {}
    for card in TUNED.values():
        for shape, choices in card.items():
            for num_tokens, plan in choices:
                if plan is not None:
                    note(found, plan, shape, num_tokens, "")
            for num_tokens in FIXED_ORDER_ROWS:
                pieces = ordered.num_pieces(shape)
                rule = ordered._streaming(num_tokens, shape, pieces)
                if num_tokens > 64:
                    rule = ordered._dense(132, num_tokens, shape, pieces)
                note(found, rule, shape, num_tokens, ", fixed order")
    return dict(found.values())


def note(found, plan, shape, num_tokens, more):
    spec = spec_of_plan(plan, shape, num_tokens)
    kind = json.dumps([spec.signature, spec.constants, spec.options])
    found.setdefault(kind, (f"{shape[0]}x{shape[1]}, {num_tokens} rows{more}", spec))


def spec_of_plan(plan, shape, num_tokens):
    out_size, in_size, gated = shape

    def tensor(*sizes, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    call = LinearCall(
        tensor(num_tokens, in_size),
        tensor(out_size, in_size),
        gated=gated,
        residual=None if gated else tensor(num_tokens, out_size),
        tickets=tensor(NUM_TICKETS, dtype=torch.int32),
    )
    launch = planned(plan, call)
    return spec_of_launch(launch.kernel, launch.arguments, launch.constants, ("num_tokens", "in_size"))


TUNED_SPECS = tuned_specs()


@pytest.fixture(scope="module")
def reports():
    specs = SPECS | TUNED_SPECS
    return dict(zip(specs, compile_all_for_hopper(list(specs.values())), strict=True))


@pytest.mark.parametrize("name", TUNED_SPECS)
def test_the_copy_engine_feeds_the_tensor_cores(reports, name):
    """Nothing spilled, with which products would be serialised; the next kernel let in, this one's turn awaited, wide
    stores where rows are many."""
    report, constants = reports[name], TUNED_SPECS[name].constants
    assert report.spilled == 0
    assert report.count("ACQBULK"), "no wait for the kernel before"
    assert report.count("PREEXIT"), "the next kernel is not let in"
    assert report.count(r"UTMALDG\.2D") >= 4, "weights and rows, both at the start and later"
    assert report.count(rf"HGMMA\.64x{widest_instruction(TUNED_SPECS[name])}x16\.F32\.BF16")
    many_rows = 32 <= constants["BLOCK_M"] <= 4096 // constants.get("BLOCK_N", 1)
    assert report.count(r"STG\.E\.128") or not many_rows
    assert report.shared <= 227 * 1024


def widest_instruction(spec):
    """Columns of the widest product: rows of x in `stream`, of the weights (gate and up at once) in `dense`."""
    constants = spec.constants
    if spec.name == "dense_kernel":
        return constants["FIRST"] * (2 if constants["GATED"] else 1)
    return constants["BLOCK_M"] // max(1, spec.options["num_warps"] * 16 // constants["BLOCK_N"])


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_spilled_and_loads_are_wide(reports, name):
    report = reports[name]
    assert report.spilled == 0
    assert report.count(r"LDG(STS)?\.E.*\.128")
    assert report.count("ACQBULK") == 1, "no wait for the kernel before"


@pytest.mark.parametrize("name", ["dot-16-split", "dot-16-norm", "dot-8", "dot-16-gated"])
def test_tensor_cores_are_fed_by_copies_under_way(reports, name):
    report = reports[name]
    assert report.count("HGMMA" if "16" in name else "HMMA")
    assert report.count(r"LDGSTS\.E\.BYPASS\.128") >= 16
    assert report.count("UBLKPF"), "weights are not asked for ahead"
    assert report.shared <= 113 * 1024, "two programs must fit a multiprocessor"
