"""Paged attention against dense attention in double precision, over random mixed steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION, AttentionRows, AttentionShape, reference
from oneloop_kernels.testing import assert_close

CPU = torch.device("cpu")


def dense(queries, keys, values, num_computed, scale):
    """queries: [n, heads, d]; keys, values: [context, kv_heads, d], all double."""
    shared = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    positions = torch.arange(keys.shape[0])
    hidden = positions[None] > num_computed + torch.arange(queries.shape[0])[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def make_step(rng, rows, shape, dtype, num_padding=0):
    """A cache that is NaN wherever no row has written, and the step's inputs. rows: (scheduled, computed) each."""
    contexts = [scheduled + computed for scheduled, computed in rows]
    widths = [-(-context // shape.block_size) for context in contexts]
    num_blocks = sum(widths) + 3
    ids = rng.permutation(num_blocks)
    tables = np.zeros((len(rows), max(widths)), np.int32)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    num_tokens = sum(scheduled for scheduled, _ in rows)
    qkv = torch.full((num_tokens + num_padding, heads, shape.head_dim), torch.nan, dtype=dtype)
    qkv[:num_tokens] = torch.from_numpy(rng.standard_normal((num_tokens, heads, shape.head_dim))).to(dtype)
    cache = torch.full(
        (num_blocks, shape.block_size, 2 * shape.num_kv_heads, shape.head_dim), torch.nan, dtype=dtype
    )
    expected = []
    taken = first = 0
    for index, ((scheduled, computed), width) in enumerate(zip(rows, widths, strict=True)):
        table = ids[taken : taken + width]
        tables[index, :width] = table
        taken += width
        past = torch.from_numpy(rng.standard_normal((computed, 2 * shape.num_kv_heads, shape.head_dim))).to(
            dtype
        )
        own = qkv[first : first + scheduled]
        kv = torch.cat((past, own[:, shape.num_heads :]))
        positions = np.arange(computed + scheduled)
        slots = table[positions // shape.block_size] * shape.block_size + positions % shape.block_size
        cache.flatten(0, 1)[torch.from_numpy(slots)] = kv
        keys, values = kv.double().chunk(2, 1)
        expected.append(dense(own[:, : shape.num_heads].double(), keys, values, computed, shape.scale))
        first += scheduled
    step = AttentionRows(
        num_scheduled=np.array([s for s, _ in rows], np.int32),
        num_computed=np.array([c for _, c in rows], np.int32),
        num_single=sum(s == 1 for s, _ in rows),
        block_tables=torch.from_numpy(tables),
    )
    return step, qkv, cache, torch.cat(expected).flatten(1)


def check(rng, rows, shape, dtype=torch.float32, num_padding=0):
    step, qkv, cache, expected = make_step(rng, rows, shape, dtype, num_padding)
    qkv[:, shape.num_heads :] = torch.nan  # keys and values are the cache's
    out = torch.full((qkv.shape[0], shape.num_heads * shape.head_dim), 7.0, dtype=dtype)
    plan = PAGED_ATTENTION.resolve(CPU, dtype)(shape, step, dtype)
    plan.run(qkv, cache, out)
    assert_close(out[: len(expected)], expected, dtype, kind="attention")
    assert torch.equal(out[len(expected) :], torch.full_like(out[len(expected) :], 7.0))


@pytest.mark.parametrize("seed", range(30))
def test_random_mixed_steps(seed):
    rng = np.random.default_rng(seed)
    num_kv_heads = int(rng.choice([1, 2, 3]))
    shape = AttentionShape(
        num_heads=num_kv_heads * int(rng.choice([1, 3, 4])),
        num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([8, 24])),
        block_size=int(rng.choice([1, 4, 16, 32])),
        scale=0.3,
    )
    singles = [(1, int(rng.integers(0, 200))) for _ in range(rng.integers(0, 12))]
    others = [
        (int(rng.integers(2, 60)), int(rng.choice([0, rng.integers(1, 90)])))
        for _ in range(rng.integers(0, 5))
    ]
    check(rng, (singles + others) or [(1, 0)], shape, num_padding=int(rng.integers(0, 4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_types(dtype):
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, scale=0.25)
    check(np.random.default_rng(0), [(1, 40), (1, 3), (9, 0), (5, 17)], shape, dtype)


def test_contexts_of_very_different_length_are_grouped_and_still_right():
    contexts = [2000, 3, 1990, 40, 700, 5, 690, 1, 33, 45]
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=8, block_size=16, scale=0.4)
    assert reference._group_bounds(np.sort(np.array(contexts, np.int32))[::-1], 1 << 20) == [0, 2, 4, 10]
    check(np.random.default_rng(3), [(1, context - 1) for context in contexts], shape)


@pytest.mark.parametrize(
    ("descending", "max_positions", "bounds"),
    [
        ([100, 90, 80, 40], 1 << 20, [0, 4]),
        ([100] * 7, 250, [0, 2, 4, 6, 7]),
        ([900, 100], 250, [0, 1, 2]),
        ([1], 1, [0, 1]),
        ([4000, 2900, 2800, 2700], 1 << 20, [0, 1, 4]),
    ],
)
def test_group_bounds(descending, max_positions, bounds):
    assert reference._group_bounds(np.array(descending, np.int32), max_positions) == bounds


def test_groups_that_share_the_buffer(monkeypatch):
    monkeypatch.setattr(reference, "_GROUP_MAX_BYTES", 6000)
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, scale=0.4)
    check(np.random.default_rng(6), [(1, n) for n in (30, 8, 31, 30, 2, 17, 90, 40)] + [(4, 3)], shape)


def test_long_rows_with_a_prefix():
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, scale=0.4)
    check(np.random.default_rng(4), [(1, 7), (50, 61), (3, 900), (600, 700)], shape)


def test_the_mask_of_a_long_row_takes_one_line_of_memory():
    mask = reference._reversed_causal_mask(3, 5, torch.float32, CPU)
    assert mask.untyped_storage().nbytes() == 7 * 4
    visible = mask.flip(1) == 0
    assert torch.equal(visible, torch.arange(5)[None] <= 2 + torch.arange(3)[:, None])


def test_a_row_reads_what_another_row_of_the_step_writes():
    """Two rows share a prefix block that only one of them has computed in this step."""
    rng = np.random.default_rng(5)
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=8, block_size=4, scale=0.4)
    qkv = torch.from_numpy(rng.standard_normal((6, 4, 8)))
    cache = torch.full((3, 4, 2, 8), torch.nan, dtype=torch.float64)
    cache.flatten(0, 1)[torch.tensor([4, 5, 6, 7, 0, 8])] = qkv[
        :, 2:
    ]  # the writer's five tokens, the reader's one
    step = AttentionRows(
        num_scheduled=np.array([5, 1], np.int32)[::-1].copy(),
        num_computed=np.array([0, 4], np.int32)[::-1].copy(),
        num_single=1,
        block_tables=torch.tensor([[1, 2], [1, 0]]),
    )
    order = torch.tensor([5, 0, 1, 2, 3, 4])  # the reader comes first in the step
    out = torch.empty(6, 16, dtype=torch.float64)
    reference.plan(shape, step, torch.float64).run(qkv[order], cache, out)
    keys, values = qkv[:4, 2:3], qkv[:4, 3:4]
    expected = dense(
        qkv[5:, :2], torch.cat((keys, qkv[5:, 2:3])), torch.cat((values, qkv[5:, 3:4])), 4, shape.scale
    )
    assert_close(out[:1], expected.flatten(1), torch.float32, kind="attention")
