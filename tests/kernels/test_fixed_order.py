"""In the fixed order a row's bits are the same whatever stands beside it, and however its context was computed.

On the CPU the interpreter runs what cards other than Hopper run; with `-m gpu` on Hopper its own kernels, in bfloat16.
"""

from __future__ import annotations

import random

import pytest
import torch

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.linear import LINEAR, NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear import ordered as linear
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.rms_norm import RMS_NORM
from oneloop_kernels.ops.rope import ROPE, HeadNorms
from oneloop_kernels.order import fixed_order, order_is_fixed
from oneloop_kernels.registry import prefer
from oneloop_kernels.testing import assert_close

pytestmark = pytest.mark.usefixtures("products_of_tensor_cores")

EPS = 1e-5
ON_GPU = torch.cuda.is_available() and not INTERPRETED
ATTENTION_SHAPES = [(4, 2, 64), *([(32, 8, 128), (8, 8, 128), (16, 2, 128)] if ON_GPU else [])]
"""Heads of 128 take the kernels of Hopper."""


@pytest.fixture
def dtype(order_dtype):
    return order_dtype


def resolved(family, device, dtype):
    with prefer("triton"):
        return family.resolve(device, dtype)


def test_it_holds_within_the_context_only():
    assert not order_is_fixed()
    with fixed_order():
        assert order_is_fixed()
        with fixed_order(False):
            assert not order_is_fixed()
        assert order_is_fixed()
    assert not order_is_fixed()


MAPS = {
    "plain": {},
    "bias and norm": {"bias": True, "norm": True},
    "gated": {"gated": True, "norm": True},
    "residual": {"residual": True},
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("cut", [False, True], ids=["one sum", "pieces"])
def test_a_linear_map_knows_no_neighbours(inputs, kernel_device, dtype, same_bits, name, cut):
    """Rows by themselves and among others, at another place each time. cut: the columns are in several pieces."""
    around = MAPS[name]
    big = kernel_device.type == "cuda"
    counts = (1, 2, 7, 8, 9, 16, 33, 64, 65, 128, 200, 513) if big else (1, 5, 70)
    in_size, out_size = ((4096, 1536) if cut else (1024, 10_240)) if big else (96, 136)
    if big:
        assert (linear.num_pieces((out_size, in_size, around.get("gated", False))) > 1) is cut
    most = max(counts)
    weight = inputs.normal(out_size, in_size, dtype=dtype) * in_size**-0.5
    norm = Norm(inputs.normal(in_size, dtype=dtype), EPS) if around.get("norm") else None
    bias = inputs.normal(out_size, dtype=dtype) if around.get("bias") else None
    result_size = out_size // 2 if around.get("gated") else out_size
    x, before = inputs.normal(most, in_size, dtype=dtype), inputs.normal(most, result_size, dtype=dtype)
    compute = resolved(LINEAR, kernel_device, dtype)
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=kernel_device)

    def call(rows):
        residual = before[rows].clone() if around.get("residual") else None
        with fixed_order():
            return compute(
                LinearCall(
                    x[rows].contiguous(),
                    weight,
                    bias,
                    norm=norm,
                    gated=around.get("gated", False),
                    residual=residual,
                    tickets=tickets,
                )
            )

    whole = call(slice(0, most))
    rng = random.Random(1)
    for count in counts:
        first = rng.randrange(most - count + 1)
        same_bits(call(slice(first, first + count)), whole[first : first + count])
    product = x if norm is None else resolved(RMS_NORM, kernel_device, dtype)(x, norm.weight, EPS)
    expected = product.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if around.get("gated"):
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    if around.get("residual"):
        expected += before.double()
    assert_close(whole, expected, dtype, kind="linear")


def test_the_order_of_a_linear_map_follows_from_its_shape():
    """As programs of plans for Hopper hold it: whole tiles, or a piece each."""
    shapes = (
        (4096, 4096, False),
        (28672, 4096, True),
        (128256, 4096, False),
        (512, 256, False),
        (1024, 3072, False),
    )
    assert [linear.num_pieces(shape) for shape in shapes] == [2, 1, 1, 1, 4]
    for shape in shapes:
        pieces, tiles = linear.num_pieces(shape), -(-shape[0] // (128 if shape[2] else 64))
        assert shape[1] % (128 * pieces) == 0
        for rows in (1, 8, 16, 17, 64):
            plan = linear._streaming(rows, shape, pieces)
            assert plan.whole is (pieces == 1)
            assert plan.whole or plan.programs == tiles * pieces
            assert plan.block_m(rows) >= rows
            assert plan.num_stages >= 2
        for rows in (65, 256, 2048, 16384):
            plan = linear._dense(132, rows, shape, pieces)
            assert plan.pieces == pieces
            assert plan.num_stages >= 2


def test_norms_know_no_neighbours(inputs, kernel_device, dtype, same_bits):
    compute = resolved(RMS_NORM, kernel_device, dtype)
    most = 600 if ON_GPU else 60
    for size in (64, 576, 1024, 4096):
        x, weight = inputs.normal(most, size, dtype=dtype), inputs.normal(size, dtype=dtype)
        with fixed_order():
            whole = compute(x, weight, EPS)
            for first, count in ((0, 1), (most - 1, 1), (17, 8), (most // 6, most // 5)):
                same_bits(compute(x[first : first + count], weight, EPS), whole[first : first + count])


def test_heads_know_no_neighbours(inputs, kernel_device, dtype, same_bits):
    """Norms of heads and the rotation: queries, and what is written to the cache."""
    num_heads, kv_heads, dim, block_size, most = 4, 2, 64, 16, 600 if ON_GPU else 60
    ops = resolved(ROPE, kernel_device, dtype)
    angles = ops.angles((10_000.0 ** -(torch.arange(0, dim, 2) / dim)).to(kernel_device), 1.0, dtype)
    norms = HeadNorms(inputs.normal(2, dim, dtype=dtype), EPS)
    qkv = inputs.normal(most, num_heads + 2 * kv_heads, dim, dtype=dtype)
    positions = inputs.integers(0, 5000, most)

    def rotated(first, count):
        own = qkv[first : first + count].clone()
        cache = torch.zeros(
            -(-most // block_size), block_size, 2 * kv_heads, dim, dtype=dtype, device=kernel_device
        )
        slots = torch.arange(first, first + count, device=kernel_device)
        with fixed_order():
            ops.rotate_and_store(own, angles(positions[first : first + count]), norms, cache, slots)
        return own[:, :num_heads], cache.flatten(0, 1)[first : first + count]

    whole = rotated(0, most)
    for first, count in ((0, 1), (most - 1, 1), (3, 20), (most // 12, most // 2)):
        for part, all_of_it in zip(rotated(first, count), whole, strict=True):
            same_bits(part, all_of_it[first : first + count])


class Sequence:
    """One sequence in a cache full of others: its queries, and its place in the block tables."""

    def __init__(self, cases, inputs, shape, length, dtype, *, narrow=False):
        self.shape, self.length, self.dtype, self.cases, self.inputs = shape, length, dtype, cases, inputs
        self.size = shape.block_size
        self.width = -(-length // self.size) + 1
        self.num_blocks = 40 * self.width
        storage = (self.num_blocks, 2 * shape.num_kv_heads, self.size, shape.head_dim)
        self.cache = inputs.normal(*storage, dtype=dtype).to(FP8 if narrow else dtype).transpose(1, 2)
        self.heads = shape.num_heads + 2 * shape.num_kv_heads
        self.queries = inputs.normal(length, self.heads, shape.head_dim, dtype=dtype)
        self.table = inputs.permutation(self.num_blocks)[: self.width].to(torch.int32)

    def attended(self, attention, first, count, before=(), after=()):
        """Attention of its queries [first, first + count) in a step with other rows (scheduled, computed)."""
        rows = [*before, (count, first), *after]
        num_tokens = sum(scheduled for scheduled, _ in rows)
        start = sum(scheduled for scheduled, _ in before)
        qkv = self.inputs.normal(num_tokens, self.heads, self.shape.head_dim, dtype=self.dtype)
        qkv[start : start + count] = self.queries[first : first + count]
        others = self.inputs.integers(0, self.num_blocks, len(rows) + 2, self.width, dtype=torch.int32)
        slots = random.Random(len(rows)).sample(range(len(rows) + 2), len(rows))
        others[slots[len(before)]] = self.table
        step = self.cases.make_step(rows, slots, others, len(rows) + 2, self.cache.device)
        out = torch.full(
            (num_tokens, self.shape.num_heads * self.shape.head_dim),
            torch.nan,
            dtype=self.dtype,
            device=self.cache.device,
        )
        with fixed_order():
            plan = attention.plan(step, len(rows), num_tokens, any(scheduled > 1 for scheduled, _ in rows))
            plan.run(qkv, self.cache, out)
        assert not out.isnan().any()
        return out[start : start + count]

    def expected(self):
        positions = torch.arange(self.length, device=self.cache.device)
        kv = self.cache.to(self.dtype)[
            self.table.long()[positions // self.size], positions % self.size
        ].double()
        keys, values = kv.chunk(2, 1)
        queries = self.queries[:, : self.shape.num_heads].double()
        return self.cases.dense(queries, keys, values, 0, self.shape, None).flatten(1)


@pytest.fixture
def attention_of(cases, kernel_device, dtype):
    def make(shape, **more):
        return cases.make_attention(
            shape, dtype, kernel_device, ordered=True, max_rows=300, max_tokens=4096, **more
        )

    return make


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), ATTENTION_SHAPES)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_attention_knows_no_neighbours_and_no_chunks(
    cases, inputs, kernel_device, attention_of, dtype, same_bits, heads, kv_heads, head_dim, narrow
):
    """Prompt at once, in chunks, token by token; alone, beside short and long rows, with contexts cut and uncut."""
    big = kernel_device.type == "cuda"
    length = 1100 if big else 75
    shape = cases.make_shape(heads, kv_heads, head_dim=head_dim)
    attention = attention_of(shape, cache_dtype=FP8 if narrow else None)
    sequence = Sequence(cases, inputs, shape, length, dtype, narrow=narrow)
    whole = sequence.attended(attention, 0, length)
    assert_close(whole, sequence.expected(), dtype, kind="attention")
    rng = random.Random(int(inputs.integers(0, 1 << 30, 1)))

    def row(most):
        return 1, rng.randrange(most)

    for _ in range(12 if big else 4):  # chunks
        first = rng.randrange(length - 2)
        count = rng.randrange(2, length - first + 1)
        singles = [row(length) for _ in range(rng.randrange(40 if big else 3))]
        multis = [
            (rng.randrange(2, 60), rng.randrange(length - 60)) for _ in range(rng.randrange(3 if big else 2))
        ]
        same_bits(sequence.attended(attention, first, count, singles, multis), whole[first : first + count])
    for number in range(60 if big else 6):  # one token, as a decode step has it
        first = (0, length - 1)[number] if number < 2 else rng.randrange(length)
        before = [row(length) for _ in range(rng.choice((0, 0, 1, 5, 31, 200) if big else (0, 2)))]
        after = [row(length) for _ in range(rng.choice((0, 3, 56) if big else (0, 1)))]
        after += [(40, 100)] if big and number % 3 == 0 else []
        same_bits(sequence.attended(attention, first, 1, before, after), whole[first : first + 1])


@pytest.mark.gpu
def test_contexts_are_cut_or_not_as_there_is_room(cases, inputs, kernel_device, dtype, same_bits):
    """Where a step has more splits than results of them can be kept, each context is one program's."""
    from oneloop_kernels.ops.paged_attention.triton.ordered_attention import OrderedAttention

    assert can_stream(kernel_device), "the GPU tests need a Hopper GPU"
    shape = cases.make_shape(32, 8, head_dim=128)
    sequence = Sequence(cases, inputs, shape, 3000, dtype)
    results = []
    for max_parts in (16, 96, 16_384):
        attention = OrderedAttention(
            shape, scale_log2=shape.scale * 1.4426950408889634, max_rows=300, max_tokens=4096, device=kernel_device,
            max_parts=max_parts,
        )  # fmt: skip

        class Plans:
            """With the arguments of DeviceAttention."""

            @staticmethod
            def plan(step, num_rows, num_tokens, has_multi, made=attention):
                return made.plan(step, num_rows, has_multi)

        mixes: list[list[tuple[int, int]]] = [[], [(1, 2000)] * 3, [(1, 700)] * 100]
        results += [sequence.attended(Plans, 2999, 1, before) for before in mixes]
    for other in results[1:]:
        same_bits(other, results[0])


def test_logits_do_not_change_the_choice_of_division(inputs, kernel_device):
    """The tile in which a group's exponentials are added up is one for all numbers of samples."""
    from oneloop_kernels.ops.sampling.triton.configs import SCAN_TOKENS_PER_THREAD, divide

    for vocab_size in (500, 49_152, 151_936):
        divisions = [
            divide(bucket, vocab_size, 132, SCAN_TOKENS_PER_THREAD, largest_tile=True)
            for bucket in (1, 8, 64, 256, 512)
        ]
        assert len({(one.tile, one.num_warps) for one in divisions}) == 1
        assert all(one.splits * one.num_tiles * one.tile >= vocab_size for one in divisions)
