"""The attention kernels of Hopper, in which a warp copies ahead, and which steps they serve."""

from __future__ import annotations

import random

import pytest
import torch

from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales
from oneloop_kernels.testing import assert_close


@pytest.fixture
def hopper(kernel_device):
    """For tests marked `gpu`: the interpreter knows nothing of the copy engine."""
    assert torch.cuda.get_device_capability(kernel_device) == (9, 0), "the GPU tests need a Hopper GPU"
    return kernel_device


def streams(stages=6, programs_per_sm=1, keys=64, together=1):
    from oneloop_kernels.ops.paged_attention.triton.configs import MANY_ROWS, streaming

    return ((MANY_ROWS, streaming(stages, programs_per_sm, keys=keys, together=together)),)


SHAPES = [(32, 8, 16), (16, 8, 16), (4, 4, 32), (16, 2, 64), (8, 1, 128), (8, 2, 8)]
"""Query heads, key heads, block size."""
STREAMS = {
    "wide_1x6": (None, 1, 6, 64, 1),
    "wide_2x3": (None, 2, 3, 64, 1),
    "narrow_1x6x128": (FP8, 1, 6, 128, 1),
    "narrow_2x5": (FP8, 2, 5, 64, 1),
    "narrow_2x5t": (FP8, 2, 5, 64, 8),
    "narrow_2x3x128t": (FP8, 2, 3, 128, 8),
}
"""Type of the cache, programs per multiprocessor, stages, keys at once, heads together."""


def in_both_types(ways):
    """Parameters: a 16-bit type, a shape and a way, of which there are at most as many as shapes.

    In bfloat16 all pairs. The type changes nothing but what is loaded, so float16 has each way and each shape once.
    """
    pairs = [(torch.bfloat16, shape, way) for shape in SHAPES for way in ways]
    pairs += [(torch.float16, shape, tuple(ways)[i % len(ways)]) for i, shape in enumerate(SHAPES)]
    return [pytest.param(*pair, id="-".join(map(str, (pair[0], *pair[1], pair[2])))) for pair in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "form", "way"), in_both_types(STREAMS))
def test_streams_of_keys(cases, inputs, hopper, dtype, form, way):
    (heads, kv_heads, block_size), (cache_dtype, programs_per_sm, stages, keys, together) = form, STREAMS[way]
    shape = cases.make_shape(heads, kv_heads, head_dim=128, block_size=block_size)
    attention = cases.make_attention(
        shape, dtype, hopper, max_tokens=64, cache_dtype=cache_dtype,
        **{("narrow_" if cache_dtype else "") + "streamed": streams(stages, programs_per_sm, keys, together)},
    )  # fmt: skip
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    some = [(1, rng.randint(0, 900)) for _ in range(30)]
    for rows in (some, [(1, 63)], [(1, n) for n in (64, 0, 127, 62, 15, 16)], [(1, 4100), (1, 0)]):
        case = cases.make_case(
            inputs, shape, rows, dtype, by_head=True, cache_dtype=cache_dtype,
            scales=KvScales(0.37, 3.0) if cache_dtype else UNSCALED,
        )  # fmt: skip
        cases.check(case, attention, dtype, layers=3, may_share=False)


RINGS = {
    "stream": ("stream", None, 1),
    "decode": ("decode", None, 1),
    "narrow": ("stream", FP8, 1),
    "narrow_t": ("stream", FP8, 8),
}
"""What serves rows with one query beside, the type of the cache, heads together."""


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "form", "way"), in_both_types(RINGS))
def test_rings_of_tiles(cases, inputs, hopper, dtype, form, way):
    (heads, kv_heads, block_size), (decode, cache_dtype, together) = form, RINGS[way]
    shape = cases.make_shape(heads, kv_heads, head_dim=128, block_size=block_size)
    attention = cases.make_attention(
        shape, dtype, hopper, tiles_block_m=128, tiles_ring=5, max_tokens=4096, cache_dtype=cache_dtype,
        **{("narrow_" if cache_dtype else "") + "streamed": streams(together=together) if decode == "stream" else ()},
    )  # fmt: skip
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))
    edges = [(2, 126), (3, 254), (64, 64), (128, 0), (1100, 0), (20, 1500)]
    for rows in (
        cases.mixed_rows(rng, 5, 4, scale=9),
        cases.mixed_rows(rng, 0, 3, scale=9),
        [(1, 77)],
        edges,
    ):
        case = cases.make_case(
            inputs, shape, rows, dtype, by_head=True, cache_dtype=cache_dtype,
            scales=KvScales(0.37, 3.0) if cache_dtype else UNSCALED,
        )  # fmt: skip
        cases.check(case, attention, dtype, layers=3, may_share=False, has_multi=True)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [name for name, (cache_dtype, *_) in STREAMS.items() if cache_dtype])
def test_queries_that_are_no_numbers_stay_so_on_a_cache_of_8_bits(cases, inputs, hopper, way):
    """Of a row with one query and of a prompt's token; their neighbours' results are what they would be."""
    dtype, (cache_dtype, programs_per_sm, stages, keys, together) = torch.bfloat16, STREAMS[way]
    shape = cases.make_shape(16, 8, head_dim=128)
    attention = cases.make_attention(
        shape, dtype, hopper, tiles_block_m=128, tiles_ring=5, cache_dtype=cache_dtype,
        narrow_streamed=streams(stages, programs_per_sm, keys, together),
    )  # fmt: skip
    rows = [(1, 77), (1, 300), (1, 5), (40, 90)]
    case = cases.make_case(inputs, shape, rows, dtype, by_head=True, cache_dtype=cache_dtype)
    lost = torch.zeros(case.num_tokens, dtype=torch.bool, device=hopper)
    lost[[1, 10]] = True
    case.qkv[: case.num_tokens, : shape.num_heads][lost] = torch.nan
    plan = attention.plan(case.step, case.step.row_slot.shape[0], len(case.qkv), True, may_share=False)
    out = torch.zeros(len(case.qkv), case.expected.shape[1], dtype=dtype, device=hopper)
    plan.run(case.qkv, case.cache, out, None, scales=case.scales)
    computed = out[: case.num_tokens]
    assert bool(computed[lost].isnan().all())
    assert_close(computed[~lost], case.expected[~lost], dtype, kind="attention")


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["sinks", "by_token", "window"])
def test_what_the_kernels_of_hopper_cannot_do(cases, inputs, hopper, why):
    """The same plan then serves the other kernels."""
    shape = cases.make_shape(32, 8, head_dim=128, sliding_window=100 if why == "window" else None)
    sinks = inputs.normal(32) if why == "sinks" else None
    attention = cases.make_attention(
        shape, torch.bfloat16, hopper, tiles_block_m=128, tiles_ring=5, max_tokens=512, streamed=streams()
    )
    rows = [(1, 700), (1, 3), (90, 40), (33, 0)]
    case = cases.make_case(inputs, shape, rows, torch.bfloat16, by_head=why != "by_token", sinks=sinks)
    cases.check(case, attention, torch.bfloat16, sinks, layers=2, may_share=False)


@pytest.mark.parametrize("why", ["sinks", "by_token"])
def test_a_plan_of_heads_together_is_made_anew_for_others(
    cases, inputs, kernel_device, kernel_dtype, monkeypatch, why
):
    """Of a cache of 8 bits the plan is stream.py's; without it decode.py needs one of single heads, layer by layer."""
    from oneloop_kernels.ops.paged_attention.triton import attention as module

    monkeypatch.setattr(module.hopper, "fits", lambda *_: True)
    monkeypatch.setattr(module, "INTERPRETED", False)
    shape = cases.make_shape(8, 4, head_dim=128)
    sinks = inputs.normal(8) if why == "sinks" else None
    attention = cases.make_attention(
        shape, kernel_dtype, kernel_device, sms=5, cache_dtype=FP8, narrow_streamed=streams(2, 2, together=8)
    )
    rows = [(1, 77), (1, 0), (1, 200)]
    case = cases.make_case(
        inputs, shape, rows, kernel_dtype, by_head=why != "by_token", sinks=sinks, cache_dtype=FP8
    )
    cases.check(case, attention, kernel_dtype, sinks, layers=2, may_share=False)


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
        ({"cache_dtype": FP8}, ["prefill", "stream 1 True"]),
    ],
    ids=str,
)
def test_which_steps_the_kernels_of_hopper_serve(cases, inputs, monkeypatch, kernel_device, change, launched):
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
    cache_dtype = step.pop("cache_dtype", None)
    shape = cases.make_shape(2, 1, **{"head_dim": 128} | more)
    streamed = ((8, streaming(6, 1)), (MANY_ROWS, streaming(3, 2)))
    attention = cases.make_attention(
        shape, torch.float16, kernel_device, sms=3, tiles_block_m=128, tiles_ring=5, cache_dtype=cache_dtype,
        **{"narrow_streamed" if cache_dtype else "streamed": streamed},
    )  # fmt: skip
    rows = [(1, 20)] * step["num_rows"] + [(5, 3)] * step["has_multi"]
    case = cases.make_case(
        inputs, shape, rows, torch.float16, by_head=step["by_head"], cache_dtype=cache_dtype
    )
    plan = attention.plan(case.step, len(rows), 40, step["has_multi"], may_share=step["may_share"])
    out = inputs.poisoned(len(case.qkv), 2 * shape.head_dim, dtype=torch.float16)
    plan.run(case.qkv, case.cache, out, inputs.normal(2) if step["sinks"] else None)
    assert calls == launched


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True])
def test_blocks_beyond_two_to_the_31(cases, inputs, hopper, by_head):
    dtype, size = torch.bfloat16, 600_000
    shape = cases.make_shape(2, 1, head_dim=128)
    case = cases.make_case(inputs, shape, [(1, 500), (1, 0), (40, 90)], dtype, by_head=by_head)
    wide = torch.empty((size, 2, 16, 128) if by_head else (size, 16, 2, 128), dtype=dtype, device=hopper)
    wide = wide.transpose(1, 2) if by_head else wide
    wide[-len(case.cache) :] = case.cache
    tables = case.step.block_tables
    tables[tables != cases.GARBAGE] += size - len(case.cache)
    case.cache = wide
    cases.check(case, cases.make_attention(shape, dtype, hopper), dtype)
    attention = cases.make_attention(
        shape, dtype, hopper, streamed=streams(), tiles_block_m=128, tiles_ring=5
    )
    cases.check(case, attention, dtype, may_share=False)
