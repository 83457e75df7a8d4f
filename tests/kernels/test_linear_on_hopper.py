"""What the compiler makes of the kernels for sm_90: wide loads, tensor cores, nothing spilled. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.linear.launches import box_layout
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

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


def stream(
    *,
    block_m,
    block_n=64,
    block_k=128,
    stages,
    warps=4,
    gated=False,
    bias=False,
    residual=False,
    merge,
):
    def box(rows):
        return f"tensordesc<bf16[{rows}, {block_k}],{box_layout(torch.bfloat16, rows, block_k)!r}>"

    signature = {
        "x_desc": box(block_m), "weight_desc": box(block_n), "bias_ptr": "*bf16", "out_ptr": "*bf16",
        "partial_ptr": "*fp32", "tickets_ptr": "*i32",
    } | dict.fromkeys(("num_tokens", "in_size", "out_size", "out_stride"), "i32")  # fmt: skip
    constants = {
        "HAS_BIAS": bias, "GATED": gated, "HAS_RESIDUAL": residual,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "MERGE": merge, "USE_PDL": True,
    }  # fmt: skip
    return KernelSpec(
        "oneloop_kernels.ops.linear.triton.stream",
        "stream_kernel",
        signature,
        constants,
        {"num_warps": warps, "launch_pdl": True},
        ("num_tokens", "in_size"),
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


STREAMING = {
    "8 rows": stream(block_m=8, stages=11, merge=8),
    "8 rows, residual": stream(block_m=8, block_n=128, stages=6, residual=True, merge=8),
    "8 rows, gated": stream(block_m=8, block_n=128, stages=3, gated=True, bias=True, merge=8),
    "64 rows": stream(block_m=64, stages=6, residual=True, merge=4),
    "64 rows, gated": stream(block_m=64, stages=4, gated=True, merge=2),
    "32 rows": stream(block_m=32, block_n=128, stages=5, residual=True, merge=4),
    "128 rows, gated": stream(block_m=128, stages=3, gated=True, warps=8, merge=2),
}


@pytest.fixture(scope="module")
def reports():
    specs = SPECS | STREAMING
    return dict(zip(specs, compile_all_for_hopper(list(specs.values())), strict=True))


@pytest.mark.parametrize("name", STREAMING)
def test_the_copy_engine_feeds_the_tensor_cores(reports, name):
    report, options = reports[name], STREAMING[name].constants
    warps_beside = max(1, STREAMING[name].options["num_warps"] * 16 // options["BLOCK_N"])
    assert report.spilled == 0
    assert report.count("ACQBULK") == 1, "no wait for the kernel before"
    assert report.count("PREEXIT") == 1, "the next kernel is not let in"
    assert report.count(r"UTMALDG\.2D") >= 2 * options["STAGES"]
    assert report.count(rf"HGMMA\.64x{options['BLOCK_M'] // warps_beside}x16\.F32\.BF16")
    assert report.count(r"STG\.E\.128") or not 32 <= options["BLOCK_M"] <= 4096 // options["BLOCK_N"]
    assert report.shared <= 227 * 1024


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
