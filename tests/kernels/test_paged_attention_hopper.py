"""What the compiler makes of the attention kernels for sm_90: the instructions they stand for, nothing spilled."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.paged_attention.triton.hopper import box_layout
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

MODULE = "oneloop_kernels.ops.paged_attention.triton"
HEADS, KV_HEADS, DIM = 32, 8, 128
LAYER = {
    "HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": DIM, "DIM": DIM, "WINDOW": 0, "SOFT_CAP": 0.0,
    "HAS_SINKS": False, "sinks": None, "USE_PDL": True,
}  # fmt: skip
TENSORS = {"qkv": "*bf16", "cache": "*bf16", "block_tables": "*i32", "table_stride": "i32", "max_rows": "i32"}
STRIDES = {
    "stride_block": "i32",
    "stride_token": "i32",
    "stride_head": "i32",
    "scale_log2": "fp32",
    "value_scale": "fp32",
}


def pointers(names, kind="*i32"):
    return dict.fromkeys(names.split(), kind)


def decode_spec(shared):
    signature = TENSORS | STRIDES | pointers("row_slot seq_lens programs split tickets") | {"out": "*bf16"}
    signature |= pointers("partial_acc partial_norm", "*fp32")
    constants = LAYER | {
        "BLOCK_SIZE": 16, "BLOCK_N": 64, "GROUP_ROWS": 4, "MERGE": 16, "SHARED": 4 if shared else 0, "STAGES": 3,
        "BESIDE": shared, "WAIT_SHARED": shared,
    }  # fmt: skip
    if shared:
        signature |= pointers("shared_lens shared_chunks") | pointers("shared_acc shared_norm", "*fp32")
    else:
        constants |= dict.fromkeys(("shared_lens", "shared_chunks", "shared_acc", "shared_norm"))
    options = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
    return KernelSpec(f"{MODULE}.decode", "decode_kernel", signature, constants, options, ("max_rows",))


def tiles_spec(*, tma, partial):
    signature = (
        TENSORS | STRIDES | pointers("items num_items counters") | {"out": "*fp32" if partial else "*bf16"}
    )
    constants = LAYER | {
        "BLOCK_SIZE": 64 if tma else 16, "BLOCK_M": 128, "BLOCK_N": 64, "PARTIAL": partial,
        "TMA": tma, "STAGES": 3,
    }  # fmt: skip
    if partial:
        signature["norm"] = "*fp32"
    else:
        constants["norm"] = None
    if tma:
        signature["descriptor"] = f"tensordesc<bf16[1, 64, 1, {DIM}]>"
    else:
        constants["descriptor"] = None
    options = {"num_warps": 8, "launch_pdl": True}
    return KernelSpec(f"{MODULE}.tiles", "tiles_kernel", signature, constants, options, ("max_rows",))


def boxes(*shape, dtype=torch.bfloat16, name="bf16"):
    return f"tensordesc<{name}[{', '.join(map(str, shape))}],{box_layout(dtype, *shape)!r}>"


def stream_spec(
    heads, block_size, *, beside=False, narrow=False, keys=64, together=1, stages=6, registers=128
):
    box = min(64, block_size, keys // together)
    cache = boxes(together, box, 128, dtype=FP8, name="fp8e4nv") if narrow else boxes(box, 64)
    signature = pointers("row_slot seq_lens block_tables programs split tickets") | {
        "q_desc": boxes(8, 64), "kv_desc": cache, "out_ptr": "*bf16", "table_stride": "i32",
        "partial_acc": "*fp32", "partial_norm": "*fp32", "scale_log2": "fp32", "value_scale": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": KV_HEADS, "BLOCK_SIZE": block_size, "BOX": box, "QUERIES": 8, "TILE": keys,
        "TOGETHER": together, "STAGES": stages, "MERGE": 8, "BESIDE": beside, "USE_PDL": True,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
    return KernelSpec(f"{MODULE}.stream", "stream_kernel", signature, constants, options, ("table_stride",))


def prefill_spec(heads, block_size, *, narrow=False):
    box, group = min(64, block_size), heads // KV_HEADS
    cache = boxes(box, 128, dtype=FP8, name="fp8e4nv") if narrow else boxes(box, 64)
    signature = pointers("block_tables items num_items") | {
        "q_desc": boxes(64 // group, group, 64), "kv_desc": cache, "out_ptr": "*bf16", "table_stride": "i32",
        "scale_log2": "fp32", "value_scale": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": KV_HEADS, "BLOCK_SIZE": block_size, "BOX": box, "RING": 4 if narrow else 5,
        "NARROW_RING": 2 if narrow else 0, "USE_PDL": True,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": 128 if narrow else 168, "launch_pdl": True}
    return KernelSpec(f"{MODULE}.prefill", "prefill_kernel", signature, constants, options, ("table_stride",))


def ordered_decode_spec(heads, block_size, stages=3):
    box = min(64, block_size)
    signature = pointers("row_slot seq_lens block_tables programs split tickets") | {
        "q_desc": boxes(8, 64), "kv_desc": boxes(box, 64), "out_ptr": "*bf16", "table_stride": "i32",
        "partial_acc": "*fp32", "partial_norm": "*fp32", "max_parts": "i32", "scale_log2": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": KV_HEADS, "BLOCK_SIZE": block_size, "BOX": box, "QUERIES": 8, "STAGES": stages,
        "BESIDE": False, "USE_PDL": True,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": 128, "launch_pdl": True}
    return KernelSpec(f"{MODULE}.ordered", "decode_kernel", signature, constants, options, ("table_stride",))


def ordered_blocks_spec(heads, block_size):
    box, group = min(64, block_size), heads // KV_HEADS
    signature = pointers("block_tables items num_items") | {
        "q_desc": boxes(32 // group, group, 64), "kv_desc": boxes(box, 64), "out_ptr": "*bf16", "table_stride": "i32",
        "scale_log2": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": KV_HEADS, "BLOCK_SIZE": block_size, "BOX": box, "QUERIES": 32, "STAGES": 2,
        "USE_PDL": True,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": 128, "launch_pdl": True}
    return KernelSpec(f"{MODULE}.ordered", "blocks_kernel", signature, constants, options, ("table_stride",))


def plan_specs():
    common = KernelSpec(
        f"{MODULE}.planning", "common_kernel",
        pointers("row_slot seq_lens num_single block_tables common") | {"table_stride": "i32"},
        {"BLOCK_SIZE": 16, "UNIT": 128, "CHUNK": 256, "USE_PDL": True},
        {"num_warps": 2, "launch_pdl": True}, ("table_stride",),
    )  # fmt: skip
    decode = KernelSpec(
        f"{MODULE}.planning", "decode_plan_kernel",
        pointers(
            "row_slot seq_lens num_single common programs split ends shared_lens shared_chunks run_first run_common "
            "run_rows items num_items"
        ) | pointers("max_items num_programs min_tiles shared_programs", "i32"),
        {
            "KV_HEADS": KV_HEADS, "BLOCK_N": 64, "WINDOW": 0, "PROGRAM_LANES": 512, "ROW_LANES": 1024, "ROW_STEPS": 11,
            "SHARED": True, "MIN_SHARED": 1024, "MIN_SHARERS": 8, "CHUNK": 1024, "MAX_CHUNKS": 4, "TOKENS": 16,
            "MAX_TILES": 0, "USE_PDL": True,
        },
        {"num_warps": 4, "launch_pdl": True}, ("max_items", "num_programs", "min_tiles", "shared_programs"),
    )  # fmt: skip
    prefill = KernelSpec(
        f"{MODULE}.planning", "prefill_plan_kernel",
        pointers("row_slot seq_lens query_start num_rows num_single ends classes items num_items")
        | {"max_items": "i32"},
        {
            "TOKENS": 16, "BLOCK_N": 64, "WINDOW": 0, "ROW_LANES": 1024, "ROW_STEPS": 11, "ITEM_LANES": 1024,
            "USE_PDL": True,
        },
        {"num_warps": 8, "launch_pdl": True}, ("max_items",),
    )  # fmt: skip
    return [common, decode, prefill]


@pytest.fixture(scope="module")
def reports():
    specs = {
        "decode": decode_spec(False),
        "decode shared": decode_spec(True),
        "tiles": tiles_spec(tma=False, partial=False),
        "tiles tma": tiles_spec(tma=True, partial=False),
        "shared tma": tiles_spec(tma=True, partial=True),
        "stream": stream_spec(HEADS, 16),
        "stream beside": stream_spec(HEADS, 16, beside=True),
        "stream, groups of 8": stream_spec(64, 64),
        "stream, groups of 1": stream_spec(8, 128),
        "stream, 8 bits": stream_spec(HEADS, 16, narrow=True, together=2, stages=5),
        "stream, 8 bits beside": stream_spec(HEADS, 16, beside=True, narrow=True, together=2, stages=5),
        "stream, 8 bits by 128": stream_spec(HEADS, 16, narrow=True, keys=128, together=2, stages=3),
        "stream, 8 bits, groups of 8": stream_spec(64, 64, narrow=True, keys=128, stages=3),
        "stream, 8 bits, groups of 1": stream_spec(8, 128, narrow=True, together=8, stages=5),
        "prefill": prefill_spec(HEADS, 16),
        "prefill, groups of 8": prefill_spec(64, 64),
        "prefill, groups of 1": prefill_spec(8, 128),
        "prefill, 8 bits": prefill_spec(HEADS, 16, narrow=True),
        "prefill, 8 bits, groups of 8": prefill_spec(64, 64, narrow=True),
        "prefill, 8 bits, groups of 1": prefill_spec(8, 128, narrow=True),
        "ordered decode": ordered_decode_spec(HEADS, 16),
        "ordered decode of one row": ordered_decode_spec(HEADS, 16, stages=6),
        "ordered decode, groups of 8": ordered_decode_spec(64, 64),
        "ordered decode, groups of 1": ordered_decode_spec(8, 128),
        "ordered blocks": ordered_blocks_spec(HEADS, 16),
        "ordered blocks, groups of 8": ordered_blocks_spec(64, 64),
        "ordered blocks, groups of 1": ordered_blocks_spec(8, 128),
    } | {spec.name: spec for spec in plan_specs()}
    return dict(zip(specs, compile_all_for_hopper(list(specs.values())), strict=True))


def test_nothing_to_speak_of_is_spilled(reports):
    assert {name: report.spilled for name, report in reports.items() if report.spilled > 64} == {}


@pytest.mark.parametrize("name", ["decode", "decode shared"])
def test_decode_copies_wide_and_fits_three_times(reports, name):
    report = reports[name]
    assert report.count(r"LDGSTS.*\.128") == report.count("LDGSTS") > 0
    assert report.count("HMMA") > 0
    assert report.registers <= 168
    assert 3 * (report.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", ["tiles", "tiles tma", "shared tma"])
def test_blocks_of_queries_use_the_matrix_units_of_hopper_and_fit(reports, name):
    report = reports[name]
    assert report.count("HGMMA") > 0
    assert report.count("HMMA") == 0
    assert report.count("UTMALDG") > 0 or name == "tiles"
    assert report.count(r"LDGSTS.*\.128") == report.count("LDGSTS")
    assert report.shared <= 227 * 1024


@pytest.mark.parametrize("group", ["", ", groups of 8", ", groups of 1"])
@pytest.mark.parametrize(
    "name", ["stream", "stream, 8 bits", "prefill", "prefill, 8 bits", "ordered decode", "ordered blocks"]
)
def test_kernels_of_hopper_copy_by_boxes_and_use_its_matrix_units(reports, name, group):
    report = reports[name + group]
    assert report.count("HGMMA") > 0
    assert report.count("HMMA") == report.count("LDGSTS") == 0
    assert report.count("UTMALDG") > 0
    assert report.shared <= 227 * 1024
    assert report.registers <= (168 if name == "prefill" else 128)


@pytest.mark.parametrize("name", ["ordered decode", "ordered blocks"])
def test_two_programs_in_the_fixed_order_share_a_multiprocessor(reports, name):
    assert 2 * (reports[name].shared + 1024) <= 228 * 1024


@pytest.mark.parametrize(("name", "keys"), [("stream, 8 bits", 64), ("stream, 8 bits by 128", 128)])
def test_keys_in_8_bits_are_widened_two_at_a_time_in_registers(reports, name, keys):
    report = reports[name]
    matrices = 3  # the first keys, values, the next keys
    assert report.count(r"F2FP\.F16\.E4M3") == matrices * keys * 128 // 128 // 2
    assert (
        report.count(r"LDSM\.16\.MT88\.4") == keys * 128 // 128 // 16
    )  # the values, transposed as they are loaded
    assert report.count(r"HGMMA") == reports["stream"].count("HGMMA") * keys // 64
    assert report.registers <= 128
    assert 2 * (report.shared + 1024) <= 228 * 1024


def test_blocks_of_queries_leave_the_widening_to_others(reports):
    report, wide = reports["prefill, 8 bits"], reports["prefill"]
    assert report.count("HGMMA") == wide.count("HGMMA")
    assert report.count("UTMALDG") == (wide.count("UTMALDG") - 4) // 2 + 4
    assert report.count(r"F2FP\.F16\.E4M3") <= 2 * 128 * 128 // 128 // 2  # of whole tiles, and of last ones


def test_queries_come_in_few_boxes(reports):
    """Two for a pair in either place of the code; the rest, for a tile of 64 keys, are four to a block."""
    assert reports["stream"].count("UTMALDG") == 2 * (2 + 4 * 64 // 16)
    assert reports["stream beside"].count("UTMALDG") == 2 + 4 * 64 // 16
