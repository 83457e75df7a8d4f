"""The device-planned attention against dense attention in double precision, over random mixed steps."""

from __future__ import annotations

import random

import pytest
import torch

from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION
from oneloop_kernels.registry import prefer
from oneloop_kernels.testing import assert_close

GROUPS = [(2, 2), (4, 2), (8, 2), (7, 1), (8, 1)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, None), (None, 2.0)])
def test_the_reference(cases, inputs, kernel_device, window, soft_cap, sinks):
    shape = cases.make_shape(4, 2, head_dim=32, sliding_window=window, soft_cap=soft_cap)
    logits = inputs.normal(4) if sinks else None
    case = cases.make_case(inputs, shape, [(1, 99), (1, 0), (33, 0), (9, 50)], torch.float32, sinks=logits)
    factory = DEVICE_ATTENTION.resolve(kernel_device, torch.float32, name="reference")
    attention = factory(
        shape, max_rows=8, max_tokens=64, max_blocks_per_row=9, dtype=torch.float32, device=kernel_device
    )
    cases.check(case, attention, torch.float32, logits)


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_mixed_steps(cases, inputs, kernel_device, kernel_dtype, heads, kv_heads):
    shape = cases.make_shape(heads, kv_heads, head_dim=32)
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    case = cases.make_case(
        inputs, shape, cases.mixed_rows(rng, 4, 2, longest_query=20, scale=cases.SCALE), kernel_dtype
    )
    cases.check(case, cases.make_attention(shape, kernel_dtype, kernel_device, max_tokens=1024), kernel_dtype)


@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes_and_storage_orders(cases, inputs, kernel_device, block_size, by_head):
    shape = cases.make_shape(4, 2, head_dim=16, block_size=block_size)
    dtype = torch.float16
    case = cases.make_case(inputs, shape, [(1, 99), (1, 0), (37, 0), (20, 130)], dtype, by_head=by_head)
    cases.check(
        case, cases.make_attention(shape, dtype, kernel_device, decode_block_n=32, tiles_block_n=32), dtype
    )


@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 64), (64, 96), (16, 64)])
def test_boxes_of_the_copy_engine(cases, inputs, kernel_device, block_size, head_dim, by_head):
    shape = cases.make_shape(2, 1, head_dim=head_dim, block_size=block_size)
    dtype = torch.float16
    case = cases.make_case(inputs, shape, [(1, 70), (20, 0), (25, 60), (5, 157)], dtype, by_head=by_head)
    cases.check(
        case, cases.make_attention(shape, dtype, kernel_device, tiles_tma=True, tiles_block_n=32), dtype
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(cases, inputs, kernel_device, head_dim):
    shape = cases.make_shape(2, 1, head_dim=head_dim)
    dtype = torch.float16
    case = cases.make_case(inputs, shape, [(1, 70), (1, 3), (20, 0), (5, 60)], dtype)
    cases.check(case, cases.make_attention(shape, dtype, kernel_device), dtype)


@pytest.mark.parametrize("window", [1, 16, 33, 300])
def test_sliding_windows(cases, inputs, kernel_device, window):
    shape = cases.make_shape(2, 1, head_dim=16, sliding_window=window)
    rows = [(1, 99), (1, 0), (1, 31), (40, 0), (30, 51)]
    case = cases.make_case(inputs, shape, rows, torch.float16)
    attention = cases.make_attention(shape, torch.float16, kernel_device, decode_block_n=16, tiles_block_n=16)
    cases.check(case, attention, torch.float16)


def test_soft_cap(cases, inputs, kernel_device, kernel_dtype):
    shape = cases.make_shape(4, 2, head_dim=16, soft_cap=2.0)
    case = cases.make_case(inputs, shape, [(1, 99), (1, 0), (33, 0), (9, 50)], kernel_dtype, qk_factor=3.0)
    cases.check(case, cases.make_attention(shape, kernel_dtype, kernel_device), kernel_dtype)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(cases, inputs, kernel_device, kernel_dtype, window):
    shape = cases.make_shape(4, 2, head_dim=16, sliding_window=window)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], dtype=kernel_dtype, device=kernel_device)
    case = cases.make_case(inputs, shape, [(1, 199), (1, 0), (33, 0), (9, 50)], kernel_dtype, sinks=sinks)
    cases.check(case, cases.make_attention(shape, kernel_dtype, kernel_device, sms=3), kernel_dtype, sinks)


@pytest.mark.parametrize(("programs", "min_tiles"), [(1, 1), (2, 1), (5, 1), (8, 3), (40, 1)])
def test_rows_cut_among_programs(cases, inputs, kernel_device, programs, min_tiles):
    shape = cases.make_shape(4, 2, head_dim=16)
    case = cases.make_case(
        inputs, shape, [(1, cases.SCALE * n - 1) for n in (100, 1, 16, 17, 70)], torch.float32
    )
    attention = cases.make_attention(
        shape, torch.float32, kernel_device, sms=programs, decode_block_n=16, decode_programs_per_sm=1,
        decode_min_tiles=min_tiles,
    )  # fmt: skip
    cases.check(case, attention, torch.float32, layers=2)


def test_more_partial_results_than_are_added_at_a_time(cases, inputs, kernel_device):
    shape = cases.make_shape(2, 1, head_dim=256)
    case = cases.make_case(inputs, shape, [(1, 16 * 21)], torch.float16)
    attention = cases.make_attention(
        shape, torch.float16, kernel_device, sms=20, decode_block_n=16, decode_programs_per_sm=1
    )
    cases.check(case, attention, torch.float16)


@pytest.mark.parametrize("programs", [1, 7])
def test_prefill_work_is_drawn_by_any_number_of_programs(cases, inputs, kernel_device, programs):
    shape = cases.make_shape(4, 2, head_dim=16)
    rows = [(1, 5), (30, 0), (2, 40), (23, 31), (50, 3)]
    case = cases.make_case(inputs, shape, rows, torch.float16)
    attention = cases.make_attention(
        shape, torch.float16, kernel_device, sms=programs, tiles_block_m=16, tiles_block_n=32
    )
    cases.check(case, attention, torch.float16, layers=2)


def test_one_planner_serves_steps_of_any_size(cases, inputs, kernel_device):
    """What an earlier, larger step left in the workspaces does no harm."""
    shape = cases.make_shape(4, 2, head_dim=16)
    attention = cases.make_attention(shape, torch.float16, kernel_device, sms=7)
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    for num_single, num_multi in ((7, 3), (1, 0), (0, 2), (9, 0)):
        case = cases.make_case(
            inputs, shape, cases.mixed_rows(rng, num_single, num_multi), torch.float16, max_rows=20
        )
        cases.check(case, attention, torch.float16)


def test_few_rows_have_a_configuration_of_their_own(cases, inputs, kernel_device):
    from oneloop_kernels.ops.paged_attention.triton.configs import DecodeConfig

    shape = cases.make_shape(4, 2, head_dim=16)
    few = DecodeConfig(16, 2, 2, programs_per_sm=5)
    attention = cases.make_attention(
        shape,
        torch.float16,
        kernel_device,
        sms=3,
        few_rows=((4, few),),
        decode_block_n=32,
        decode_programs_per_sm=2,
    )
    for lengths in ((cases.SCALE * 90,), (70, 33, 1, 150), (40,)):
        case = cases.make_case(
            inputs, shape, [(1, n) for n in lengths], torch.float16, max_rows=len(lengths) + 3
        )
        cases.check(case, attention, torch.float16, layers=2)
        chosen = attention.config.decode_for(case.step.row_slot.shape[0])
        assert chosen is (few if len(lengths) == 1 else attention.config.decode)
        programs = 3 * chosen.programs_per_sm
        tiles = sum(-(-(n + 1) // chosen.block_n) for n in lengths)
        assert int((attention._space.programs[:programs, 2] > 0).sum()) == min(programs, 2 * tiles)


def test_an_empty_step_writes_nothing(cases, inputs, kernel_device):
    shape = cases.make_shape(4, 2, head_dim=16)
    case = cases.make_case(inputs, shape, [(1, 5), (4, 4)], torch.float16)
    case.step.num_rows.zero_()
    case.step.num_single.zero_()
    plan = cases.make_attention(shape, torch.float16, kernel_device).plan(case.step, 5, 10, True)
    out = inputs.poisoned(10, 4 * 16, dtype=torch.float16)
    plan.run(case.qkv, case.cache, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_configuration_of_the_card(cases, inputs, kernel_device, kernel_dtype, head_dim):
    shape = cases.make_shape(8, 2, head_dim=head_dim, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, kernel_dtype)
    attention = factory(
        shape, max_rows=8, max_tokens=4096, max_blocks_per_row=400, dtype=kernel_dtype, device=kernel_device
    )
    rows = [
        (1, 64 * cases.SCALE * cases.SCALE),
        (1, 7),
        (20 * cases.SCALE, 0),
        (3 * cases.SCALE, 70 * cases.SCALE),
    ]
    cases.check(cases.make_case(inputs, shape, rows, kernel_dtype, by_head=True), attention, kernel_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 8)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_contexts(cases, device_inputs, kernel_device, kernel_dtype, heads, kv_heads, head_dim):
    shape = cases.make_shape(heads, kv_heads, head_dim=head_dim, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, kernel_dtype)
    attention = factory(
        shape, max_rows=64, max_tokens=4096, max_blocks_per_row=700, dtype=kernel_dtype, device=kernel_device
    )
    rows = [(1, 32767), (1, 0), *((1, 900 + 37 * i) for i in range(30)), (1000, 0), (257, 9000), (2, 20000)]
    cases.check(
        cases.make_case(device_inputs, shape, rows, kernel_dtype, by_head=True),
        attention,
        kernel_dtype,
        layers=5,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "shared"), [(9, 4096), (64, 1024), (200, 1472)])
@pytest.mark.parametrize("num_multi", [0, 2])
def test_large_shared_prefixes(
    cases, device_inputs, kernel_device, kernel_dtype, num_rows, shared, num_multi
):
    shape = cases.make_shape(32, 8, head_dim=128, block_size=64)
    with prefer("triton"):
        factory = DEVICE_ATTENTION.resolve(kernel_device, kernel_dtype)
    attention = factory(
        shape, max_rows=256, max_tokens=2048, max_blocks_per_row=100, dtype=kernel_dtype, device=kernel_device
    )
    rows = [(1, shared + 7 * i) for i in range(num_rows)] + [(100, 0), (33, shared + 50)][:num_multi]
    case = cases.make_case(device_inputs, shape, rows, kernel_dtype, by_head=True, shared=shared // 64)
    cases.check(case, attention, kernel_dtype, layers=5)
    assert attention._space.shared_lens[:num_rows].tolist() == [shared // 128 * 128] * num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("has_multi", [False, True])
def test_one_graph_serves_steps_of_all_lengths(cases, device_inputs, kernel_device, has_multi):
    """Captured on one step, replayed on others that are copied into its buffers."""
    dtype, max_rows, max_tokens = torch.bfloat16, 40, 620
    shape = cases.make_shape(32, 8, head_dim=128, block_size=64)
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
    rng = random.Random(int(device_inputs.integers(0, 1 << 30, 1)))
    qkv = device_inputs.poisoned(max_tokens, 48, 128, dtype=dtype)
    cache = device_inputs.poisoned(5300, 16, 64, 128, dtype=dtype).transpose(1, 2)
    out = device_inputs.poisoned(max_tokens, 32 * 128, dtype=dtype)
    step = cases.make_step(
        [(1, 0)], [0], torch.zeros(max_rows, 200, dtype=torch.int32), max_rows, kernel_device
    )
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
        case = cases.make_case(device_inputs, shape, rows, dtype, by_head=True, max_rows=max_rows)
        for name in ("row_slot", "seq_lens", "query_start", "num_rows", "num_single"):
            getattr(step, name).copy_(getattr(case.step, name))
        step.block_tables.fill_(cases.GARBAGE)
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
def test_shared_prefixes_are_read_once(cases, inputs, kernel_device, kv_heads, block_size, num_multi):
    shape = cases.make_shape(4, kv_heads, head_dim=16, block_size=block_size)
    rows = [(1, n) for n in (400, 385, 480, 384, 399)]
    rows += [(20, 0), (3, 70)][:num_multi]
    case = cases.make_case(inputs, shape, rows, torch.float16, shared=384 // block_size)
    attention = cases.make_attention(
        shape, torch.float16, kernel_device, sms=5, min_shared=128, min_sharers=3, chunk=128, max_chunks=2,
        shared_block_m=16, decode_block_n=64,
    )  # fmt: skip
    cases.check(case, attention, torch.float16)
    assert attention._space.shared_lens[:5].tolist() == [384] * 5
    assert int(attention._space.num_shared_items) == -(-5 // (16 // (4 // kv_heads))) * 2


def test_sharing_can_be_left_out(cases, inputs, kernel_device):
    shape = cases.make_shape(4, 2, head_dim=16)
    case = cases.make_case(inputs, shape, [(1, 300)] * 4, torch.float16, shared=16)
    attention = cases.make_attention(shape, torch.float16, kernel_device, min_shared=128, min_sharers=2)
    assert attention.plan(case.step, 4, 9, False).shares
    assert not attention.plan(case.step, 1, 9, False).shares
    plan = attention.plan(case.step, 4, 9, False, may_share=False)
    assert not plan.shares
    out = inputs.poisoned(len(case.qkv), 4 * 16, dtype=torch.float16)
    plan.run(case.qkv, case.cache, out)
    assert_close(out[: case.num_tokens], case.expected, torch.float16, kind="attention")


def test_runs_of_sharers(cases, inputs, kernel_device):
    """Two runs, a row in between, and one run that is too short; what is shared ends with the shortest row."""
    shape = cases.make_shape(2, 1, head_dim=16)
    case = cases.make_case(inputs, shape, [(1, 639)] * 12, torch.float16)
    attention = cases.make_attention(
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
        expected.append(
            cases.dense(case.qkv[row : row + 1, :2].double(), keys, values, length - 1, shape, None)
        )
    case.expected = torch.cat(expected).flatten(1)
    cases.check(case, attention, torch.float16)
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
def test_shapes_that_are_refused(cases, kernel_device, change, message):
    with pytest.raises(ValueError, match=message):
        cases.make_attention(cases.make_shape(**change), torch.float16, kernel_device)
