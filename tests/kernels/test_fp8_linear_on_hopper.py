"""What the compiler makes of the 8-bit kernels for sm_90: 8-bit tensor cores, nothing spilled. Needs no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.fp8_linear.plans import TUNED, TilesPlan, plan_by_rule
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall
from oneloop_kernels.ops.linear.launches import Scales, dense, stream
from oneloop_kernels.ops.linear.plans import StreamPlan
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper, spec_of_launch

LLAMA_8B = [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)]


def spec_of_plan(plan, shape, num_tokens, *, by_block):
    """Tensors of the meta device have shapes and no memory."""
    out_size, in_size, gated = shape

    def tensor(*sizes, dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    call = LinearCall(
        tensor(num_tokens, in_size, dtype=FP8),
        tensor(out_size, in_size, dtype=FP8),
        gated=gated,
        residual=None if gated else tensor(num_tokens, out_size, dtype=torch.bfloat16),
        tickets=tensor(NUM_TICKETS, dtype=torch.int32),
    )
    blocks = in_size // BLOCK
    scales = Scales(
        tensor(*((blocks, num_tokens) if by_block else (num_tokens,)), dtype=torch.float32),
        tensor(*((out_size // BLOCK, blocks) if by_block else (out_size,)), dtype=torch.float32),
        torch.bfloat16,
    )
    way = stream if isinstance(plan, StreamPlan) else dense
    launch = way(plan, call, scales)
    return spec_of_launch(launch.kernel, launch.arguments, launch.constants, ("num_tokens", "in_size"))


def planned_specs():
    """Each kernel that a plan of the table, or of the rule by block, launches, once."""
    found = {}
    cases = [
        (plan, shape, num_tokens, False)
        for card in TUNED.values()
        for shape, choices in card.items()
        for num_tokens, plan in choices
    ]
    cases += [
        (plan_by_rule(rows, shape, by_block=True), shape, rows, True)
        for shape in LLAMA_8B
        for rows in (1, 16, 64)
    ]
    cases += [
        (plan_by_rule(rows, (512, 512, True), by_block=False), (512, 512, True), rows, False)
        for rows in (1, 64)
    ]
    for plan, shape, num_tokens, by_block in cases:
        if plan is not None and not isinstance(plan, TilesPlan):
            spec = spec_of_plan(plan, shape, num_tokens, by_block=by_block)
            kind = json.dumps([spec.signature, spec.constants, spec.options])
            name = f"{shape[0]}x{shape[1]}, {num_tokens} rows, by {'block' if by_block else 'row'}"
            found.setdefault(kind, (name, spec))
    return dict(found.values())


def tiles(*, by_block, gated, block_m, warps):
    signature = {
        "x_ptr": "*fp8e4nv",
        "weight_ptr": "*fp8e4nv",
        "x_scales_ptr": "*fp32",
        "weight_scales_ptr": "*fp32",
    }
    signature |= {"bias_ptr": "*bf16", "out_ptr": "*bf16", "num_tokens": "i32"}
    signature |= dict.fromkeys(("in_size", "out_size", "weight_stride", "out_stride"), "i32")
    constants = {
        "BY_BLOCK": by_block, "SCALE_ROWS": 128 if by_block else 1, "HAS_BIAS": False, "GATED": gated,
        "HAS_RESIDUAL": not gated, "BLOCK_M": block_m, "BLOCK_N": 64 if gated else 128, "BLOCK_K": BLOCK, "GROUPED": 8,
        "USE_PDL": True,
    }  # fmt: skip
    options = {"num_warps": warps, "num_stages": 4, "launch_pdl": True}
    return KernelSpec(
        "oneloop_kernels.ops.fp8_linear.triton.tiles",
        "tiles_kernel",
        signature,
        constants,
        options,
        ("num_tokens",),
    )


def quantize(*, size, norm=False, gated=False, by_block=False, warps=16):
    signature = {"x_ptr": "*bf16", "norm_ptr": "*bf16", "out_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    signature |= {"num_tokens": "i32", "size": "i32", "x_stride": "i32", "eps": "fp32"}
    constants = {
        "HAS_NORM": norm, "GATED": gated, "BY_BLOCK": by_block, "GROUP": BLOCK, "BLOCK": size, "USE_PDL": True
    }  # fmt: skip
    return KernelSpec(
        "oneloop_kernels.ops.fp8_linear.triton.quantize",
        "quantize_kernel",
        signature,
        constants,
        {"num_warps": warps, "launch_pdl": True},
        ("num_tokens",),
    )


PLANNED = planned_specs()
SPECS = {
    "tiles by block": tiles(by_block=True, gated=False, block_m=128, warps=8),
    "tiles by block, gated": tiles(by_block=True, gated=True, block_m=128, warps=8),
    "tiles by row": tiles(by_block=False, gated=False, block_m=128, warps=8),
    "norm": quantize(size=4096, norm=True, warps=8),
    "wide": quantize(size=16384),
    "wide, gated, by block": quantize(size=16384, gated=True, by_block=True),
}


@pytest.fixture(scope="module")
def reports():
    specs = SPECS | PLANNED
    return dict(zip(specs, compile_all_for_hopper(list(specs.values())), strict=True))


@pytest.mark.parametrize("name", PLANNED)
def test_the_copy_engine_feeds_the_tensor_cores(reports, name):
    report = reports[name]
    assert report.spilled == 0
    assert report.count("ACQBULK"), "no wait for the kernel before"
    assert report.count("PREEXIT"), "the next kernel is not let in"
    assert report.count(r"UTMALDG\.2D") >= 4, "weights and rows, both at the start and later"
    assert report.count(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3")
    assert report.shared <= 227 * 1024


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_spilled(reports, name):
    report = reports[name]
    assert report.spilled == 0
    assert report.count("ACQBULK") == 1, "no wait for the kernel before"
    assert report.count("QGMMA") or "tiles" not in name
