"""Random steps for paged attention, and what dense attention in double precision makes of them."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales
from oneloop_kernels.ops.kv_cache.reference import as_copyable, narrowed
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
    scales: KvScales = UNSCALED
    """With which the cache was written."""


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
    inputs, shape, rows, dtype, *, by_head=False, shared=0, sinks=None, max_rows=None, qk_factor=1.0,
    cache_dtype=None, scales=UNSCALED,
):  # fmt: skip
    """rows: (scheduled, computed) each, single ones first. The first `shared` blocks are the same in all rows whose
    computed tokens fill them. cache_dtype: what the cache keeps of keys and values is what is expected to be used.

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
    cache = inputs.poisoned(*storage, dtype=torch.float32).to(cache_dtype or dtype)
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
        kv = narrowed(torch.cat((past, own[:, heads:])), cache.dtype, scales)
        positions = torch.arange(computed + scheduled)
        blocks = torch.tensor(table)[positions // size].to(cache.device)
        as_copyable(cache)[blocks, (positions % size).to(cache.device)] = as_copyable(kv)
        keys, values = kv.to(dtype).double().chunk(2, 1)
        keys, values = keys * scales.key, values * scales.value
        expected.append(dense(own[:, :heads].double(), keys, values, computed, shape, sinks))
        first += scheduled
    step = make_step(rows, slots, tables, max_rows, cache.device)
    return Case(step, qkv, cache, num_tokens, torch.cat(expected).flatten(1), scales)


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


def make_attention(
    shape,
    dtype,
    device,
    *,
    max_rows=40,
    max_tokens=512,
    max_blocks=1 << 10,
    cache_dtype=None,
    ordered=False,
    **config,
):
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
        cache_dtype=cache_dtype, ordered=ordered, config=dataclasses.replace(tuned, **parts, **config), sms=sms,
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
        plan.run(case.qkv, case.cache, out, sinks, scales=case.scales)
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


SCALE = 1 if INTERPRETED else 9
"""Contexts are so many times longer on a GPU."""
