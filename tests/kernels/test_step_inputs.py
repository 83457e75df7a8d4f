"""The kernels that bring a step onto the device and its results back, against plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from oneloop_kernels.ops.step_inputs import STEP_INPUTS, SampleOutput, SlotTables, StepInputs
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

MAX_ROWS, WIDTH, BLOCK_SIZE, COLUMNS = 100, 40, 16, 21
MAX_TOKENS = 300
HEADER = ("num_rows", "num_tokens", "num_single", "num_samples", "num_block_deltas", "num_forks")
INDEX = {name: index + 3 for index, name in enumerate(HEADER)}


def step_slab(inputs, num_single, multi):
    """A slab's fields by name: num_single rows of one token, then rows of the given numbers of tokens."""
    scheduled = torch.tensor([1] * num_single + multi, dtype=torch.int32)
    num_rows, num_tokens = len(scheduled), int(scheduled.sum())
    slab = {
        name: inputs.integers(-(1 << 30), 1 << 30, MAX_ROWS + 1, dtype=torch.int32)
        for name in ("row_slot", "row_num_scheduled", "row_num_computed", "query_start")
    }
    device = inputs.device
    slab["row_slot"][:num_rows] = inputs.permutation(MAX_ROWS)[:num_rows].int()
    slab["row_num_scheduled"][:num_rows] = scheduled.to(device)
    computed = inputs.integers(0, WIDTH * BLOCK_SIZE - max(multi, default=1), num_rows, dtype=torch.int32)
    slab["row_num_computed"][:num_rows] = computed
    slab["query_start"][: num_rows + 1] = torch.tensor([0, *itertools.accumulate(scheduled.tolist())]).to(
        device
    )
    slab["token_ids"] = inputs.integers(-1, 5, MAX_TOKENS, dtype=torch.int32)
    places = inputs.permutation(MAX_ROWS * WIDTH)[:90]
    slab["delta_slot"], slab["delta_index"] = (places // WIDTH).int(), (places % WIDTH).int()
    slab["delta_block"] = inputs.integers(0, 1 << 29, 90, dtype=torch.int32)
    pairs = inputs.permutation(MAX_ROWS).int()
    slab["fork_src"], slab["fork_dst"] = pairs[:20].contiguous(), pairs[20:40].contiguous()
    slab["fork_num_blocks"] = inputs.integers(0, WIDTH + 1, 20, dtype=torch.int32)
    counts = dict(zip(HEADER, (num_rows, num_tokens, num_single, num_rows, 70, 0), strict=True))
    header = inputs.integers(-9, 0, 32)
    for name, count in counts.items():
        header[INDEX[name]] = count
    slab["header"] = header
    return slab


def tables(inputs):
    return SlotTables(
        inputs.integers(0, 1 << 29, MAX_ROWS, WIDTH, dtype=torch.int32),
        inputs.integers(0, 1000, MAX_ROWS, dtype=torch.int32),
    )


def poisoned_inputs(inputs):
    wide = {"kv_slots": torch.int64}
    sizes = dict.fromkeys(("row_slot", "seq_lens"), MAX_ROWS) | {"query_start": MAX_ROWS + 1}
    sizes |= {"num_rows": 1, "num_single": 1}
    return StepInputs(
        **{
            field.name: inputs.poisoned(
                sizes.get(field.name, MAX_TOKENS), dtype=wide.get(field.name, torch.int32)
            )
            for field in dataclasses.fields(StepInputs)
        }
    )


def clone(value):
    return type(value)(**{f.name: getattr(value, f.name).clone() for f in dataclasses.fields(value)})


@pytest.mark.parametrize(
    ("num_single", "multi", "bucket"),
    [
        (1, [], 1),
        (100, [], 104),
        (0, [1 + 70], 128),
        (37, [2, 64, 5, 3, 2, 90], 256),
        (0, [2] * 100, 300),
        (0, [], 8),
    ],
)
def test_prepare(inputs, num_single, multi, bucket):
    slab, own = step_slab(inputs, num_single, multi), tables(inputs)
    expected_tables, expected = clone(own), poisoned_inputs(inputs)
    actual = clone(expected)
    options = {"num_tokens": bucket, "block_size": BLOCK_SIZE}
    STEP_INPUTS.resolve(inputs.device, torch.float32, name="reference").prepare(
        slab, INDEX, expected_tables, expected, **options
    )
    STEP_INPUTS.resolve(inputs.device, torch.float32, name="triton").prepare(
        slab, INDEX, own, actual, **options
    )
    torch.testing.assert_close(own.block_tables, expected_tables.block_tables, rtol=0, atol=0)
    for field in dataclasses.fields(StepInputs):
        torch.testing.assert_close(
            getattr(actual, field.name), getattr(expected, field.name), rtol=0, atol=0, msg=field.name
        )


def test_fork(inputs):
    slab, own = step_slab(inputs, 3, []), tables(inputs)
    slab["header"][INDEX["num_forks"]] = 20
    expected, expected_slab = clone(own), {name: field.clone() for name, field in slab.items()}
    STEP_INPUTS.resolve(inputs.device, torch.float32, name="reference").fork(expected_slab, INDEX, expected)
    STEP_INPUTS.resolve(inputs.device, torch.float32, name="triton").fork(slab, INDEX, own)
    assert torch.equal(own.block_tables, expected.block_tables)
    assert torch.equal(slab["header"], expected_slab["header"])
    assert slab["header"][INDEX["num_block_deltas"]] == 0


@pytest.mark.parametrize("num_tokens", [70, 33, 4, 1])
def test_select_rows(inputs, num_tokens):
    """Also more samples than tokens: forks share one."""
    slab = step_slab(inputs, 33, [])
    hidden, out = inputs.normal(num_tokens, 1500), inputs.poisoned(MAX_ROWS, 1500, dtype=torch.float32)
    slab["sample_token_index"] = inputs.integers(0, num_tokens, MAX_ROWS, dtype=torch.int32)
    slab["sample_token_index"][33:] = 1 << 30  # left from earlier steps
    STEP_INPUTS.resolve(inputs.device, torch.float32, name="triton").select_rows(slab, INDEX, hidden, out)
    assert torch.equal(out[:33], hidden[slab["sample_token_index"][:33].long()])
    assert out[33:].isnan().all()


@pytest.mark.parametrize("num_bytes", [104, 4096, 40_003, 65_537, 300_001])
def test_fetch(inputs, num_bytes):
    source = inputs.integers(0, 256, 400_000, dtype=torch.uint8).cpu()
    source.view(torch.int64)[12] = num_bytes
    if inputs.device.type == "cuda":
        source = source.pin_memory()
    target = torch.zeros(400_000, dtype=torch.uint8, device=inputs.device)
    STEP_INPUTS.resolve(inputs.device, torch.float32, name="triton").fetch(source, target, 12)
    rounded = -(-num_bytes // 8) * 8
    assert torch.equal(target[:rounded].cpu(), source[:rounded])
    assert not target[rounded:].any()


@pytest.mark.parametrize("logprobs", [False, True])
def test_publish(inputs, logprobs):
    slab = step_slab(inputs, 60, [])
    output = SampleOutput(
        inputs.integers(0, 999, MAX_ROWS, dtype=torch.int32),
        inputs.integers(0, 999, MAX_ROWS, dtype=torch.int32),
        inputs.integers(0, 999, MAX_ROWS * COLUMNS, dtype=torch.int32),
        inputs.normal(MAX_ROWS * COLUMNS),
    )
    target = SampleOutput(*(torch.full_like(t, -7, device="cpu") for t in dataclasses.astuple(output)))
    flag = torch.zeros(1, dtype=torch.int64)
    if inputs.device.type == "cuda":
        flag = flag.pin_memory()
        target = SampleOutput(*(t.pin_memory() for t in dataclasses.astuple(target)))
    ops = STEP_INPUTS.resolve(inputs.device, torch.float32, name="triton")
    counter = torch.full((1,), 1 << 40, dtype=torch.int64, device=inputs.device)
    for number in (1, 2, 3):
        ops.publish(output, target, slab, INDEX, counter, flag, logprobs=logprobs)
        if inputs.device.type == "cuda":
            torch.cuda.synchronize()
        assert int(flag) == int(counter) == (1 << 40) + number
    counts = {"token": 60, "rank": 60, "logprob_token": 60 * COLUMNS, "logprob": 60 * COLUMNS}
    for name, count in counts.items():
        sent, kept = getattr(output, name).cpu(), getattr(target, name)
        written = count if name == "token" or logprobs else 0
        assert torch.equal(kept[:written], sent[:written]), name
        assert (kept[written:] == -7).all(), name


def test_compiles_for_hopper():
    pointers = ("header", "delta_slot", "delta_index", "delta_block", "row_slot", "row_num_scheduled")
    pointers += (
        "row_num_computed",
        "query_start",
        "token_ids",
        "block_tables",
        "last_token",
        "out_token_ids",
    )
    pointers += ("out_positions", "out_kv_slots", "out_row_slot", "out_seq_lens", "out_query_start")
    kinds = dict.fromkeys((*pointers, "out_num_rows", "out_num_single"), "*i32")
    kinds |= {"header": "*i64", "out_kv_slots": "*i64", "WIDTH": "i32", "BUCKET": "i32"}
    counts = {"NUM_ROWS": 1, "NUM_TOKENS": 2, "NUM_SINGLE": 13, "NUM_DELTAS": 5}
    sizes = {
        "MAX_ROWS": 512, "BLOCK_SIZE": 16, "SEARCH_STEPS": 10, "BLOCK": 512, "TOKENS": 256, "USE_PDL": True
    }  # fmt: skip
    results = ("token", "rank", "logprob_token", "logprob")
    publish = {name: "*i32" for stem in results for name in (stem, f"to_{stem}")} | {"header": "*i64"}
    publish |= {"logprob": "*fp32", "to_logprob": "*fp32", "flag": "*i64", "counter": "*i64"}
    switches = {"NUM_SAMPLES": 3, "COLUMNS": 21, "LOGPROBS": True, "INTERPRETED": False, "BLOCK": 1024}
    switches["USE_PDL"] = True
    module = "oneloop_kernels.ops.step_inputs.triton"
    fetch = {"source": "*i64", "target": "*i64", "capacity": "i32"}
    blocks = {"SIZE_AT": 12, "BLOCK": 256, "LATER": 1024, "PROGRAMS": 32}
    select = {"header": "*i64", "hidden": "*bf16", "index": "*i32", "out": "*bf16"}
    select |= {"num_tokens": "i32", "SIZE": "i32"}
    pieces = {"NUM_SAMPLES": 3, "BLOCK": 1024, "USE_PDL": True}
    reports = compile_all_for_hopper(
        [
            KernelSpec(module, "_prepare_kernel", kinds, counts | sizes, {"num_warps": 8}),
            KernelSpec(module, "_publish_kernel", publish, switches, {"num_warps": 16, "launch_pdl": True}),
            KernelSpec(module, "_fetch_kernel", fetch, blocks, {"num_warps": 4}),
            KernelSpec(module, "_select_rows_kernel", select, pieces, {"num_warps": 4, "launch_pdl": True}),
        ]
    )
    assert [report.spilled for report in reports] == [0] * 4
    assert reports[1].count("MEMBAR") >= 1
