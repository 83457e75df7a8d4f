"""The device-planned attention against dense attention in double precision, over random mixed steps."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION, AttentionShape, AttentionStep
from oneloop_kernels.registry import prefer
from oneloop_kernels.testing import assert_close

GARBAGE = 1 << 30
"""In every int32 that no kernel may use: as an index it would be far outside."""


@dataclass
class Case:
    step: AttentionStep
    qkv: torch.Tensor
    cache: torch.Tensor
    num_tokens: int
    expected: torch.Tensor
    """[num_tokens, heads · head_dim], double."""


def make_shape(heads=4, kv_heads=2, head_dim=64, block_size=16, **more):
    return AttentionShape(heads, kv_heads, head_dim, block_size, head_dim**-0.5, **more)


def dense(queries, keys, values, first_position, shape, sinks):
    """queries: [n, heads, d]; keys, values: [context, kv_heads, d], all double; sinks: [heads] or None."""
    group = shape.num_heads // shape.num_kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    at = first_position + torch.arange(len(queries), device=keys.device)[:, None]
    positions = torch.arange(len(keys), device=keys.device)[None]
    hidden = positions > at
    if shape.sliding_window is not None:
        hidden |= positions <= at - shape.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(queries), 1)
        scores = torch.cat((scores, column), 2)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def make_case(
    inputs, shape, rows, dtype, *, by_head=False, shared=0, sinks=None, max_rows=None, qk_factor=1.0
):
    """rows: (scheduled, computed) each, single ones first. The first `shared` blocks are the same in all rows whose
    computed tokens fill them.

    Nobody may look at: cache slots that no row has written (NaN), padding tokens and rows, unused table entries.
    """
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    size, heads, dim = shape.block_size, shape.num_heads, shape.head_dim
    num_rows, num_tokens = len(rows), sum(scheduled for scheduled, _ in rows)
    max_rows = max_rows or num_rows + 3
    widths = [-(-(scheduled + computed) // size) for scheduled, computed in rows]
    ids = list(range(shared + sum(widths) + 2))
    rng.shuffle(ids)
    slots = rng.sample(range(max_rows), num_rows)
    tables = torch.full((max_rows, max(widths) + 2), GARBAGE, dtype=torch.int32)
    storage = (
        (len(ids), 2 * shape.num_kv_heads, size, dim)
        if by_head
        else (len(ids), size, 2 * shape.num_kv_heads, dim)
    )
    cache = inputs.poisoned(*storage, dtype=dtype)
    cache = cache.transpose(1, 2) if by_head else cache
    qkv = inputs.poisoned(num_tokens + 5, heads + 2 * shape.num_kv_heads, dim, dtype=dtype)
    qkv[:num_tokens] = inputs.normal(num_tokens, heads + 2 * shape.num_kv_heads, dim, dtype=dtype)
    qkv[:num_tokens, :heads] *= qk_factor
    common, ids = ids[:shared], ids[shared:]
    common_kv = inputs.normal(shared * size, 2 * shape.num_kv_heads, dim, dtype=dtype)
    expected, first = [], 0
    for (scheduled, computed), width, slot in zip(rows, widths, slots, strict=True):
        sharer = computed >= len(common_kv)
        own_blocks = width - shared if sharer else width
        table = (common if sharer else []) + ids[:own_blocks]
        ids = ids[own_blocks:]
        tables[slot, :width] = torch.tensor(table)
        own = qkv[first : first + scheduled]
        past = inputs.normal(computed, 2 * shape.num_kv_heads, dim, dtype=dtype)
        if sharer:
            past[: len(common_kv)] = common_kv
        kv = torch.cat((past, own[:, heads:]))
        positions = torch.arange(computed + scheduled)
        blocks = torch.tensor(table)[positions // size].to(cache.device)
        cache[blocks, (positions % size).to(cache.device)] = kv
        keys, values = kv.double().chunk(2, 1)
        expected.append(dense(own[:, :heads].double(), keys, values, computed, shape, sinks))
        first += scheduled
    step = make_step(rows, slots, tables, max_rows, cache.device)
    return Case(step, qkv, cache, num_tokens, torch.cat(expected).flatten(1))


def make_step(rows, slots, tables, max_rows, device):
    def ints(values, size):
        filled = torch.full((size,), GARBAGE, dtype=torch.int32)
        filled[: len(values)] = torch.tensor(values, dtype=torch.int32)
        return filled.to(device)

    starts = [0]
    for scheduled, _ in rows:
        starts.append(starts[-1] + scheduled)
    return AttentionStep(
        row_slot=ints(slots, max_rows),
        seq_lens=ints([scheduled + computed for scheduled, computed in rows], max_rows),
        query_start=ints(starts, max_rows + 1),
        num_rows=ints([len(rows)], 1),
        num_single=ints([sum(scheduled == 1 for scheduled, _ in rows)], 1),
        block_tables=tables.to(device),
    )


def make_attention(shape, dtype, device, *, max_rows=40, max_tokens=512, max_blocks=1 << 10, **config):
    """config: fields of DecodeConfig and TilesConfig as decode_…, tiles_… and shared_…, of AttentionConfig; sms."""
    from oneloop_kernels.ops.paged_attention.triton.configs import default_config

    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(device, dtype)
    tuned = default_config(dtype.itemsize, shape.head_dim)
    parts = {}
    for part in ("decode", "tiles", "shared"):
        names = {name: config.pop(name) for name in tuple(config) if name.startswith(f"{part}_")}
        changes = {name.removeprefix(f"{part}_"): value for name, value in names.items()}
        parts[part] = dataclasses.replace(getattr(tuned, part), **changes)
    sms = config.pop("sms", None)
    return factory(
        shape, max_rows=max_rows, max_tokens=max_tokens, max_blocks_per_row=max_blocks, dtype=dtype, device=device,
        config=dataclasses.replace(tuned, **parts, **config), sms=sms,
    )  # fmt: skip


def check(case, attention, dtype, sinks=None, layers=1, may_share=True, has_multi=False):
    """layers: runs of one plan; tickets and counters must be back at zero after each. has_multi: as if it had."""
    has_multi |= case.num_tokens > int(case.step.num_single)
    num_rows, num_tokens = case.step.row_slot.shape[0], case.qkv.shape[0]
    plan = attention.plan(case.step, num_rows, num_tokens, has_multi, may_share=may_share)
    for _ in range(layers):
        out = torch.full(
            (case.qkv.shape[0], case.expected.shape[1]), torch.nan, dtype=dtype, device=case.qkv.device
        )
        plan.run(case.qkv, case.cache, out, sinks)
        assert_close(out[: case.num_tokens], case.expected, dtype, kind="attention")
        assert bool(out[case.num_tokens :].isnan().all())


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 70, 100)


def mixed_rows(rng, num_single, num_multi, longest_query=40, scale=1):
    singles = [(1, scale * rng.choice(LENGTHS) - 1) for _ in range(num_single)]
    multi = [
        (scale * rng.randint(2, longest_query), rng.choice((0, scale * rng.choice(LENGTHS))))
        for _ in range(num_multi)
    ]
    return singles + multi


GROUPS = [(2, 2), (4, 2), (8, 2), (7, 1), (8, 1)]
SCALE = 1 if INTERPRETED else 9
"""Contexts are so many times longer on a GPU."""


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, None), (None, 2.0)])
def test_the_reference(inputs, kernel_device, window, soft_cap, sinks):
    shape = make_shape(4, 2, head_dim=32, sliding_window=window, soft_cap=soft_cap)
    logits = inputs.normal(4) if sinks else None
    case = make_case(inputs, shape, [(1, 99), (1, 0), (33, 0), (9, 50)], torch.float32, sinks=logits)
    factory = DEVICE_ATTENTION.resolve(kernel_device, torch.float32, name="reference")
    attention = factory(
        shape, max_rows=8, max_tokens=64, max_blocks_per_row=9, dtype=torch.float32, device=kernel_device
    )
    check(case, attention, torch.float32, logits)


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_mixed_steps(inputs, kernel_device, kernel_dtype, heads, kv_heads):
    shape = make_shape(heads, kv_heads, head_dim=32)
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    case = make_case(inputs, shape, mixed_rows(rng, 4, 2, longest_query=20, scale=SCALE), kernel_dtype)
    check(case, make_attention(shape, kernel_dtype, kernel_device, max_tokens=1024), kernel_dtype)


@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes_and_storage_orders(inputs, kernel_device, block_size, by_head):
    shape = make_shape(4, 2, head_dim=16, block_size=block_size)
    dtype = torch.float16
    case = make_case(inputs, shape, [(1, 99), (1, 0), (37, 0), (20, 130)], dtype, by_head=by_head)
    check(case, make_attention(shape, dtype, kernel_device, decode_block_n=32, tiles_block_n=32), dtype)


@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 64), (64, 96), (16, 64)])
def test_boxes_of_the_copy_engine(inputs, kernel_device, block_size, head_dim, by_head):
    shape = make_shape(2, 1, head_dim=head_dim, block_size=block_size)
    dtype = torch.float16
    case = make_case(inputs, shape, [(1, 70), (20, 0), (25, 60), (5, 157)], dtype, by_head=by_head)
    check(case, make_attention(shape, dtype, kernel_device, tiles_tma=True, tiles_block_n=32), dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(inputs, kernel_device, head_dim):
    shape = make_shape(2, 1, head_dim=head_dim)
    dtype = torch.float16
    case = make_case(inputs, shape, [(1, 70), (1, 3), (20, 0), (5, 60)], dtype)
    check(case, make_attention(shape, dtype, kernel_device), dtype)


@pytest.mark.parametrize("window", [1, 16, 33, 300])
def test_sliding_windows(inputs, kernel_device, window):
    shape = make_shape(2, 1, head_dim=16, sliding_window=window)
    rows = [(1, 99), (1, 0), (1, 31), (40, 0), (30, 51)]
    case = make_case(inputs, shape, rows, torch.float16)
    attention = make_attention(shape, torch.float16, kernel_device, decode_block_n=16, tiles_block_n=16)
    check(case, attention, torch.float16)


def test_soft_cap(inputs, kernel_device, kernel_dtype):
    shape = make_shape(4, 2, head_dim=16, soft_cap=2.0)
    case = make_case(inputs, shape, [(1, 99), (1, 0), (33, 0), (9, 50)], kernel_dtype, qk_factor=3.0)
    check(case, make_attention(shape, kernel_dtype, kernel_device), kernel_dtype)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(inputs, kernel_device, kernel_dtype, window):
    shape = make_shape(4, 2, head_dim=16, sliding_window=window)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], dtype=kernel_dtype, device=kernel_device)
    case = make_case(inputs, shape, [(1, 199), (1, 0), (33, 0), (9, 50)], kernel_dtype, sinks=sinks)
    check(case, make_attention(shape, kernel_dtype, kernel_device, sms=3), kernel_dtype, sinks)


@pytest.mark.parametrize(("programs", "min_tiles"), [(1, 1), (2, 1), (5, 1), (8, 3), (40, 1)])
def test_rows_cut_among_programs(inputs, kernel_device, programs, min_tiles):
    shape = make_shape(4, 2, head_dim=16)
    case = make_case(inputs, shape, [(1, SCALE * n - 1) for n in (100, 1, 16, 17, 70)], torch.float32)
    attention = make_attention(
        shape, torch.float32, kernel_device, sms=programs, decode_block_n=16, decode_programs_per_sm=1,
        decode_min_tiles=min_tiles,
    )  # fmt: skip
    check(case, attention, torch.float32, layers=2)


def test_more_partial_results_than_are_added_at_a_time(inputs, kernel_device):
    shape = make_shape(2, 1, head_dim=256)
    case = make_case(inputs, shape, [(1, 16 * 21)], torch.float16)
    attention = make_attention(
        shape, torch.float16, kernel_device, sms=20, decode_block_n=16, decode_programs_per_sm=1
    )
    check(case, attention, torch.float16)


@pytest.mark.parametrize("programs", [1, 7])
def test_prefill_work_is_drawn_by_any_number_of_programs(inputs, kernel_device, programs):
    shape = make_shape(4, 2, head_dim=16)
    rows = [(1, 5), (30, 0), (2, 40), (23, 31), (50, 3)]
    case = make_case(inputs, shape, rows, torch.float16)
    attention = make_attention(
        shape, torch.float16, kernel_device, sms=programs, tiles_block_m=16, tiles_block_n=32
    )
    check(case, attention, torch.float16, layers=2)


def test_one_planner_serves_steps_of_any_size(inputs, kernel_device):
    """What an earlier, larger step left in the workspaces does no harm."""
    shape = make_shape(4, 2, head_dim=16)
    attention = make_attention(shape, torch.float16, kernel_device, sms=7)
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    for num_single, num_multi in ((7, 3), (1, 0), (0, 2), (9, 0)):
        case = make_case(inputs, shape, mixed_rows(rng, num_single, num_multi), torch.float16, max_rows=20)
        check(case, attention, torch.float16)


def test_few_rows_have_a_configuration_of_their_own(inputs, kernel_device):
    from oneloop_kernels.ops.paged_attention.triton.configs import DecodeConfig

    shape = make_shape(4, 2, head_dim=16)
    few = DecodeConfig(16, 2, 2, programs_per_sm=5)
    attention = make_attention(
        shape,
        torch.float16,
        kernel_device,
        sms=3,
        few_rows=((4, few),),
        decode_block_n=32,
        decode_programs_per_sm=2,
    )
    for lengths in ((SCALE * 90,), (70, 33, 1, 150), (40,)):
        case = make_case(inputs, shape, [(1, n) for n in lengths], torch.float16, max_rows=len(lengths) + 3)
        check(case, attention, torch.float16, layers=2)
        chosen = attention.config.decode_for(case.step.row_slot.shape[0])
        assert chosen is (few if len(lengths) == 1 else attention.config.decode)
        programs = 3 * chosen.programs_per_sm
        tiles = sum(-(-(n + 1) // chosen.block_n) for n in lengths)
        assert int((attention._space.programs[:programs, 2] > 0).sum()) == min(programs, 2 * tiles)


def test_an_empty_step_writes_nothing(inputs, kernel_device):
    shape = make_shape(4, 2, head_dim=16)
    case = make_case(inputs, shape, [(1, 5), (4, 4)], torch.float16)
    case.step.num_rows.zero_()
    case.step.num_single.zero_()
    plan = make_attention(shape, torch.float16, kernel_device).plan(case.step, 5, 10, True)
    out = inputs.poisoned(10, 4 * 16, dtype=torch.float16)
    plan.run(case.qkv, case.cache, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_configuration_of_the_card(inputs, kernel_device, kernel_dtype, head_dim):
    shape = make_shape(8, 2, head_dim=head_dim, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, kernel_dtype)
    attention = factory(
        shape, max_rows=8, max_tokens=4096, max_blocks_per_row=400, dtype=kernel_dtype, device=kernel_device
    )
    rows = [(1, 64 * SCALE * SCALE), (1, 7), (20 * SCALE, 0), (3 * SCALE, 70 * SCALE)]
    check(make_case(inputs, shape, rows, kernel_dtype, by_head=True), attention, kernel_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 8)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_contexts(inputs, kernel_device, kernel_dtype, heads, kv_heads, head_dim):
    shape = make_shape(heads, kv_heads, head_dim=head_dim, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, kernel_dtype)
    attention = factory(
        shape, max_rows=64, max_tokens=4096, max_blocks_per_row=700, dtype=kernel_dtype, device=kernel_device
    )
    rows = [(1, 32767), (1, 0), *((1, 900 + 37 * i) for i in range(30)), (1000, 0), (257, 9000), (2, 20000)]
    check(make_case(inputs, shape, rows, kernel_dtype, by_head=True), attention, kernel_dtype, layers=5)


@pytest.fixture
def hopper(kernel_device):
    """For tests marked `gpu`: the interpreter knows nothing of the copy engine."""
    assert torch.cuda.get_device_capability(kernel_device) == (9, 0), "the GPU tests need a Hopper GPU"
    return kernel_device


def streams(stages=6, programs_per_sm=1):
    from oneloop_kernels.ops.paged_attention.triton.configs import MANY_ROWS, streaming

    return ((MANY_ROWS, streaming(stages, programs_per_sm)),)


@pytest.mark.gpu
@pytest.mark.parametrize(("programs_per_sm", "stages"), [(1, 6), (2, 3)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"),
    [(32, 8, 16), (16, 8, 16), (4, 4, 32), (16, 2, 64), (8, 1, 128), (8, 2, 8)],
)
def test_streams_of_keys(inputs, hopper, kernel_dtype, heads, kv_heads, block_size, programs_per_sm, stages):
    shape = make_shape(heads, kv_heads, head_dim=128, block_size=block_size)
    attention = make_attention(
        shape, kernel_dtype, hopper, streamed=streams(stages, programs_per_sm), max_tokens=64
    )
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    some = [(1, rng.randint(0, 900)) for _ in range(30)]
    for rows in (some, [(1, 63)], [(1, n) for n in (64, 0, 127, 62, 15, 16)], [(1, 4100), (1, 0)]):
        case = make_case(inputs, shape, rows, kernel_dtype, by_head=True)
        check(case, attention, kernel_dtype, layers=3, may_share=False)


@pytest.mark.gpu
@pytest.mark.parametrize("decode", ["stream", "decode"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"),
    [(32, 8, 16), (16, 8, 16), (4, 4, 32), (16, 2, 64), (8, 1, 128), (8, 2, 8)],
)
def test_rings_of_tiles(inputs, hopper, kernel_dtype, heads, kv_heads, block_size, decode):
    shape = make_shape(heads, kv_heads, head_dim=128, block_size=block_size)
    attention = make_attention(
        shape, kernel_dtype, hopper, tiles_block_m=128, tiles_ring=5, max_tokens=4096,
        streamed=streams() if decode == "stream" else (),
    )  # fmt: skip
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    edges = [(2, 126), (3, 254), (64, 64), (128, 0), (1100, 0), (20, 1500)]
    for rows in (mixed_rows(rng, 5, 4, scale=9), mixed_rows(rng, 0, 3, scale=9), [(1, 77)], edges):
        case = make_case(inputs, shape, rows, kernel_dtype, by_head=True)
        check(case, attention, kernel_dtype, layers=3, may_share=False, has_multi=True)


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["sinks", "by_token", "window"])
def test_what_the_kernels_of_hopper_cannot_do(inputs, hopper, why):
    """The same plan then serves the other kernels."""
    shape = make_shape(32, 8, head_dim=128, sliding_window=100 if why == "window" else None)
    sinks = inputs.normal(32) if why == "sinks" else None
    attention = make_attention(
        shape, torch.bfloat16, hopper, tiles_block_m=128, tiles_ring=5, max_tokens=512, streamed=streams()
    )
    rows = [(1, 700), (1, 3), (90, 40), (33, 0)]
    case = make_case(inputs, shape, rows, torch.bfloat16, by_head=why != "by_token", sinks=sinks)
    check(case, attention, torch.bfloat16, sinks, layers=2, may_share=False)


@pytest.mark.parametrize(
    ("change", "launched"),
    [
        ({}, ["prefill", "stream 1 True"]),
        ({"has_multi": False}, ["stream 1 False"]),
        ({"has_multi": False, "num_rows": 30}, ["stream 2 False"]),
        ({"has_multi": False, "num_rows": 30, "may_share": True}, []),
        ({"by_head": False}, []),
        ({"sinks": True}, []),
        ({"head_dim": 64}, []),
        ({"sliding_window": 9}, []),
        ({"block_size": 48}, []),
    ],
    ids=str,
)
def test_which_steps_the_kernels_of_hopper_serve(inputs, monkeypatch, kernel_device, change, launched):
    """Launches are only recorded: what runs instead computes the same."""
    from oneloop_kernels.ops.paged_attention.triton import attention as module
    from oneloop_kernels.ops.paged_attention.triton.configs import MANY_ROWS, streaming

    calls = []
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module.hopper, "launch_prefill", lambda *_, **__: calls.append("prefill"))
    monkeypatch.setattr(
        module.hopper,
        "launch_stream",
        lambda *_, programs, beside, **__: calls.append(f"stream {programs // 3} {beside}"),
    )
    step = {"has_multi": True, "num_rows": 1, "may_share": False, "by_head": True, "sinks": False} | change
    more = {key: step.pop(key) for key in ("sliding_window", "block_size", "head_dim") if key in step}
    shape = make_shape(2, 1, **{"head_dim": 128} | more)
    attention = make_attention(
        shape, torch.float16, kernel_device, sms=3, tiles_block_m=128, tiles_ring=5,
        streamed=((8, streaming(6, 1)), (MANY_ROWS, streaming(3, 2))),
    )  # fmt: skip
    rows = [(1, 20)] * step["num_rows"] + [(5, 3)] * step["has_multi"]
    case = make_case(inputs, shape, rows, torch.float16, by_head=step["by_head"])
    plan = attention.plan(case.step, len(rows), 40, step["has_multi"], may_share=step["may_share"])
    out = inputs.poisoned(len(case.qkv), 2 * shape.head_dim, dtype=torch.float16)
    plan.run(case.qkv, case.cache, out, inputs.normal(2) if step["sinks"] else None)
    assert calls == launched


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True])
def test_blocks_beyond_two_to_the_31(inputs, hopper, by_head):
    dtype, size = torch.bfloat16, 600_000
    shape = make_shape(2, 1, head_dim=128)
    case = make_case(inputs, shape, [(1, 500), (1, 0), (40, 90)], dtype, by_head=by_head)
    wide = torch.empty((size, 2, 16, 128) if by_head else (size, 16, 2, 128), dtype=dtype, device=hopper)
    wide = wide.transpose(1, 2) if by_head else wide
    wide[-len(case.cache) :] = case.cache
    tables = case.step.block_tables
    tables[tables != GARBAGE] += size - len(case.cache)
    case.cache = wide
    check(case, make_attention(shape, dtype, hopper), dtype)
    attention = make_attention(shape, dtype, hopper, streamed=streams(), tiles_block_m=128, tiles_ring=5)
    check(case, attention, dtype, may_share=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "shared"), [(9, 4096), (64, 1024), (200, 1472)])
@pytest.mark.parametrize("num_multi", [0, 2])
def test_large_shared_prefixes(inputs, kernel_device, kernel_dtype, num_rows, shared, num_multi):
    shape = make_shape(32, 8, head_dim=128, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, kernel_dtype)
    attention = factory(
        shape, max_rows=256, max_tokens=2048, max_blocks_per_row=100, dtype=kernel_dtype, device=kernel_device
    )
    rows = [(1, shared + 7 * i) for i in range(num_rows)] + [(100, 0), (33, shared + 50)][:num_multi]
    case = make_case(inputs, shape, rows, kernel_dtype, by_head=True, shared=shared // 64)
    check(case, attention, kernel_dtype, layers=5)
    assert attention._space.shared_lens[:num_rows].tolist() == [shared // 128 * 128] * num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("has_multi", [False, True])
def test_one_graph_serves_steps_of_all_lengths(inputs, kernel_device, has_multi):
    """Captured on one step, replayed on others that are copied into its buffers."""
    dtype, max_rows, max_tokens = torch.bfloat16, 40, 620
    shape = make_shape(32, 8, head_dim=128, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, dtype)
    attention = factory(
        shape,
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_blocks_per_row=200,
        dtype=dtype,
        device=kernel_device,
    )
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    qkv = inputs.poisoned(max_tokens, 48, 128, dtype=dtype)
    cache = inputs.poisoned(5300, 16, 64, 128, dtype=dtype).transpose(1, 2)
    out = inputs.poisoned(max_tokens, 32 * 128, dtype=dtype)
    step = make_step([(1, 0)], [0], torch.zeros(max_rows, 200, dtype=torch.int32), max_rows, kernel_device)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attention.plan(step, max_rows, max_tokens, has_multi).run(qkv, cache, out)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            plan = attention.plan(step, max_rows, max_tokens, has_multi)
            for _ in range(3):
                plan.run(qkv, cache, out)
    for _ in range(10):
        rows = [(1, rng.choice((0, 60, 700, 3000, 9000))) for _ in range(rng.randint(1, 35))]
        if has_multi:
            rows += [(rng.randint(2, 190), rng.choice((0, 64, 500))) for _ in range(rng.randint(0, 3))]
        case = make_case(inputs, shape, rows, dtype, by_head=True, max_rows=max_rows)
        for name in ("row_slot", "seq_lens", "query_start", "num_rows", "num_single"):
            getattr(step, name).copy_(getattr(case.step, name))
        step.block_tables.fill_(GARBAGE)
        step.block_tables[:, : case.step.block_tables.shape[1]] = case.step.block_tables
        qkv.fill_(torch.nan)[: len(case.qkv)] = case.qkv
        cache.fill_(torch.nan)[: len(case.cache)] = case.cache
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out[: case.num_tokens], case.expected, dtype, kind="attention")
        assert bool(out[case.num_tokens :].isnan().all())


@pytest.mark.parametrize("num_multi", [0, 2])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_prefixes_are_read_once(inputs, kernel_device, kv_heads, block_size, num_multi):
    shape = make_shape(4, kv_heads, head_dim=16, block_size=block_size)
    rows = [(1, n) for n in (400, 385, 480, 384, 399)]
    rows += [(20, 0), (3, 70)][:num_multi]
    case = make_case(inputs, shape, rows, torch.float16, shared=384 // block_size)
    attention = make_attention(
        shape, torch.float16, kernel_device, sms=5, min_shared=128, min_sharers=3, chunk=128, max_chunks=2,
        shared_block_m=16, decode_block_n=64,
    )  # fmt: skip
    check(case, attention, torch.float16)
    assert attention._space.shared_lens[:5].tolist() == [384] * 5
    assert int(attention._space.num_shared_items) == -(-5 // (16 // (4 // kv_heads))) * 2


def test_sharing_can_be_left_out(inputs, kernel_device):
    shape = make_shape(4, 2, head_dim=16)
    case = make_case(inputs, shape, [(1, 300)] * 4, torch.float16, shared=16)
    attention = make_attention(shape, torch.float16, kernel_device, min_shared=128, min_sharers=2)
    assert attention.plan(case.step, 4, 9, False).shares
    assert not attention.plan(case.step, 1, 9, False).shares
    plan = attention.plan(case.step, 4, 9, False, may_share=False)
    assert not plan.shares
    out = inputs.poisoned(len(case.qkv), 4 * 16, dtype=torch.float16)
    plan.run(case.qkv, case.cache, out)
    assert_close(out[: case.num_tokens], case.expected, torch.float16, kind="attention")


def test_runs_of_sharers(inputs, kernel_device):
    """Two runs, a row in between, and one run that is too short; what is shared ends with the shortest row."""
    shape = make_shape(2, 1, head_dim=16)
    case = make_case(inputs, shape, [(1, 639)] * 12, torch.float16)
    attention = make_attention(
        shape, torch.float16, kernel_device, sms=5, min_shared=128, min_sharers=3, chunk=128,
        shared_block_m=16, decode_block_n=32,
    )  # fmt: skip
    tables, slots = case.step.block_tables, case.step.row_slot[:12].tolist()
    cache_lines = {}
    for first, last, blocks in ((0, 4, 40), (5, 9, 17), (10, 12, 40)):
        for row in range(first + 1, last):
            tables[slots[row], :blocks] = tables[slots[first], :blocks]
            cache_lines[row] = (first, blocks * 16)
    case.step.seq_lens[2] = 385
    lengths = case.step.seq_lens[:12].tolist()
    expected = []
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        blocks = tables[slots[row]].cpu()[positions // 16].to(kernel_device)
        kv = case.cache[blocks, (positions % 16).to(kernel_device)].double()
        keys, values = kv.chunk(2, 1)
        expected.append(dense(case.qkv[row : row + 1, :2].double(), keys, values, length - 1, shape, None))
    case.expected = torch.cat(expected).flatten(1)
    check(case, attention, torch.float16)
    assert attention._space.shared_lens[:12].tolist() == [384] * 4 + [0] + [256] * 4 + [0] * 3
    assert attention._space.shared_chunks[:12].tolist() == [3] * 4 + [0] + [2] * 4 + [0] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "num_heads 5"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_shapes_that_are_refused(kernel_device, change, message):
    with pytest.raises(ValueError, match=message):
        make_attention(make_shape(**change), torch.float16, kernel_device)
