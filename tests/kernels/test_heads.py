"""Queries, keys and values by one kernel, against product, norm, rotation and write one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.heads import TUNED, HeadsPlan, Surroundings, fits, heads, plan_for
from oneloop_kernels.ops.linear.plans import MAX_PLANNED_ROWS, can_stream
from oneloop_kernels.ops.packed_linear import PackedCall
from oneloop_kernels.ops.packed_linear.packing import Numbers, dequantize, pack
from oneloop_kernels.ops.packed_linear.plans import StreamPlan
from oneloop_kernels.ops.rope import ROPE, HeadNorms, RotaryStep
from oneloop_kernels.testing import assert_close
from oneloop_kernels.testing.hopper import compile_all_for_hopper, spec_of_launch

EPS = 1e-6
DIM = 128
PLANS = {
    "64 rows": HeadsPlan(64, 64, 4),
    "128 rows": HeadsPlan(128, 64, 3),
    "64 rows, half of a half": HeadsPlan(64, 32, 6),
    "128 rows, a quarter": HeadsPlan(128, 16, 3),
}


def surroundings(inputs, dtype, num_tokens, num_kv_heads, *, norms, block_size=16, num_slots=None):
    angles = torch.cat(
        [function(inputs.normal(num_tokens, DIM // 2) * 3) for function in (torch.cos, torch.sin)], 1
    )
    num_blocks = num_tokens // block_size + 3
    cache = inputs.poisoned(num_blocks, 2 * num_kv_heads, block_size, DIM, dtype=dtype).transpose(1, 2)
    slots = inputs.permutation(num_blocks * block_size)[: num_slots or num_tokens]
    if len(slots) > 2:
        slots[1] = -1
    weights = HeadNorms(inputs.normal(2, DIM, dtype=dtype), EPS) if norms else None
    return Surroundings(RotaryStep(angles[:, : DIM // 2], angles[:, DIM // 2 :]), weights, cache, slots)


def make_call(inputs, dtype, num_tokens, num_all_heads, in_size, *, bias=False, norm=False):
    weight = inputs.normal(num_all_heads * DIM, in_size, dtype=dtype) * in_size**-0.5
    return LinearCall(
        inputs.normal(num_tokens, in_size, dtype=dtype),
        weight,
        inputs.normal(num_all_heads * DIM, dtype=dtype) if bias else None,
        norm=Norm(inputs.normal(in_size, dtype=dtype), EPS) if norm else None,
    )


def one_by_one(call, around):
    """→ queries, keys and values; the cache."""
    x = call.x.float()
    if call.norm is not None:
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).to(call.x.dtype) * call.norm.weight
    product = x.float() @ call.weight.float().t()
    if call.bias is not None:
        product += call.bias.float()
    qkv = product.to(call.x.dtype).view(len(call.x), -1, DIM)
    cache = around.cache.clone(memory_format=torch.preserve_format)
    ops = ROPE.resolve(call.x.device, call.x.dtype, name="triton")
    ops.rotate_and_store(qkv, around.rotary, around.norms, cache, around.slots)
    return qkv, cache


@pytest.fixture
def hopper(kernel_device):
    """For tests marked `gpu`: the interpreter knows nothing of the copy engine."""
    assert can_stream(kernel_device), "the GPU tests need a Hopper GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 200])
@pytest.mark.parametrize(
    ("plan", "norms"),
    # A norm wants whole heads.
    [
        (name, norms)
        for name, plan in PLANS.items()
        for norms in (False, True)
        if not norms or plan.width >= DIM // 2
    ],
)
def test_as_one_by_one(inputs, kernel_dtype, hopper, plan, norms, num_tokens):
    call = make_call(inputs, kernel_dtype, num_tokens, 6, 520, bias=num_tokens == 64, norm=num_tokens == 200)
    around = surroundings(
        inputs, kernel_dtype, num_tokens, 1, norms=norms, num_slots=max(1, num_tokens - 2),
        block_size=64 if norms else 16,
    )  # fmt: skip
    expected, expected_cache = one_by_one(call, around)
    qkv = heads(PLANS[plan], call, around).run()
    assert_close(qkv[:, :4], expected[:, :4], kind="layer")
    assert torch.equal(around.cache.isnan(), expected_cache.isnan()), "other places were written, or not all"
    assert_close(around.cache.nan_to_num(), expected_cache.nan_to_num(), kind="layer")


PACKED = {
    "symmetric": (4, 128, "none"),
    "zeros": (4, 128, "zero"),
    "offsets": (4, 128, "offset"),
    "zeros of 32": (4, 32, "zero"),
    "q4_1": (4, 32, "offset"),
    "q6_k": (6, 16, "none"),
    "q8_0": (8, 32, "none"),
}
"""Bits, columns of a group, shift."""


def packed(inputs, call, kind):
    """The call with its weight in few bits, and the call with what those mean."""
    (rows, columns), (bits, group_size, shift) = call.weight.shape, PACKED[kind]
    values = inputs.integers(0, 1 << bits, rows, columns, dtype=torch.uint8)
    groups = rows, columns // group_size
    scales = (inputs.normal(*groups).abs() + 0.1) / (columns**0.5 * (1 << (bits - 1)))
    shifts = {
        "none": lambda: None,
        "zero": lambda: inputs.integers(0, 1 << bits, *groups, dtype=torch.uint8),
        "offset": lambda: inputs.normal(*groups) / columns**0.5,
    }[shift]()
    weight = pack(Numbers(values, scales, bits, group_size, shift, shifts), call.x.dtype)
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=call.x.device)
    packed_call = PackedCall(call.x, weight, call.bias, norm=call.norm, tickets=tickets)
    return packed_call, call._replace(weight=dequantize(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
@pytest.mark.parametrize(("programs", "kind"), [(0, "symmetric"), *((5, kind) for kind in PACKED)], ids=str)
def test_packed_as_one_by_one(inputs, half_dtype, hopper, monkeypatch, num_tokens, programs, kind):
    plan = StreamPlan(1, 4, residents=2, programs=programs, slices=True)
    monkeypatch.setattr("oneloop_kernels.ops.packed_linear.plans._by_rule", lambda *_: plan)
    plain = make_call(inputs, half_dtype, num_tokens, 6, 640, bias=num_tokens == 7, norm=num_tokens > 1)
    call, plain = packed(inputs, plain, kind)
    around = surroundings(
        inputs, half_dtype, num_tokens, 1, norms=False, num_slots=max(1, num_tokens - 2), block_size=64
    )
    expected, expected_cache = one_by_one(plain, around)
    qkv = ROPE.resolve(inputs.device, half_dtype, name="triton").project_and_store(call, *around)
    assert_close(qkv[:, :4], expected[:, :4], kind="layer")
    assert torch.equal(around.cache.isnan(), expected_cache.isnan()), "other places were written, or not all"
    written = ~expected_cache.isnan()
    assert_close(around.cache[written], expected_cache[written], kind="layer")


@pytest.mark.gpu
def test_the_family_takes_the_tuned_plan(inputs, hopper, kernel_device):
    for shape, choices in TUNED["NVIDIA H200"].items():
        num_heads, num_kv_heads, in_size, norms = shape
        for num_tokens, plan in choices:
            call = make_call(
                inputs, torch.bfloat16, num_tokens, num_heads + 2 * num_kv_heads, in_size, norm=True
            )
            around = surroundings(inputs, torch.bfloat16, num_tokens, num_kv_heads, norms=norms)
            expected, expected_cache = one_by_one(call, around)
            ops = ROPE.resolve(kernel_device, torch.bfloat16, name="triton")
            qkv = ops.project_and_store(call, *around)
            assert (qkv is None) == (plan is None)
            if qkv is not None:
                assert_close(qkv[:, :num_heads], expected[:, :num_heads], kind="layer")
                assert_close(around.cache.nan_to_num(), expected_cache.nan_to_num(), kind="layer")


def test_only_hopper_does_it_at_once(inputs, kernel_device, kernel_dtype, monkeypatch):
    monkeypatch.setattr("oneloop_kernels.ops.linear.heads.can_stream", lambda _: False)
    call = make_call(inputs, kernel_dtype, 3, 6, 64)
    around = surroundings(inputs, kernel_dtype, 3, 1, norms=False)
    for name in ("triton", "reference"):
        ops = ROPE.resolve(kernel_device, kernel_dtype, name=name)
        assert ops.project_and_store(call, *around) is None
    assert around.cache.isnan().all()


def test_what_the_kernel_cannot_read_or_write_is_done_one_by_one(inputs):
    around = surroundings(inputs, torch.float16, 3, 1, norms=False)
    assert fits(around)
    cos, sin = around.rotary
    assert not fits(around._replace(rotary=RotaryStep(cos.clone(), sin)))
    assert not fits(around._replace(rotary=RotaryStep(cos[:, None], sin[:, None])))
    assert not fits(around._replace(rotary=RotaryStep(cos[:, :32], sin[:, :32])))
    assert not fits(around._replace(cache=around.cache.float()))
    assert not fits(around._replace(cache=around.cache[..., :64]))
    assert not fits(around._replace(cache=torch.empty(2, 16, 2, 129, dtype=torch.float16)[..., 1:]))
    call = make_call(inputs, torch.float16, 3, 6, 64)
    assert plan_for(call._replace(gated=True), around) is None


def test_tuned_plans_are_plans():
    for card in TUNED.values():
        for (_, _, in_size, norms), choices in card.items():
            rows = [most for most, _ in choices]
            assert rows == sorted(set(rows))
            assert rows[-1] <= MAX_PLANNED_ROWS
            for _, plan in choices:
                assert plan is None or plan.num_stages <= in_size // 64
                assert plan is None or plan.width == DIM // 2 or not norms


def specs():
    """Each tuned kernel once, and those of the tests. Tensors of the meta device have shapes and no memory."""
    found = {}
    tried = [((4, 1, 512, plan.width == DIM // 2), plan) for plan in PLANS.values()]
    tried += [
        (shape, plan)
        for card in TUNED.values()
        for shape, choices in card.items()
        for _, plan in choices
        if plan
    ]
    for (num_heads, num_kv_heads, in_size, norms), plan in tried:

        def tensor(*sizes, dtype=torch.bfloat16):
            return torch.empty(sizes, dtype=dtype, device="meta")

        angles = tensor(40, DIM, dtype=torch.float32)
        around = Surroundings(
            RotaryStep(angles[:, :64], angles[:, 64:]),
            HeadNorms(tensor(2, DIM), EPS) if norms else None,
            tensor(9, 2 * num_kv_heads, 16, DIM).transpose(1, 2),
            tensor(40, dtype=torch.int32),
        )
        weight = tensor((num_heads + 2 * num_kv_heads) * DIM, in_size)
        launch = heads(plan, LinearCall(tensor(40, in_size), weight), around)
        spec = spec_of_launch(launch.kernel, launch.arguments, launch.constants, ("num_tokens", "num_slots"))
        found[f"{num_heads}+{num_kv_heads}, {plan}"] = replace(
            spec, signature=spec.signature | {"slots_ptr": "*i64"}
        )
    return found


def test_compiled_for_hopper():
    """Nothing spilled; weights and rows come by copies; what is written goes 16 bytes at a time."""
    reports = compile_all_for_hopper(list(specs().values()))
    for report, spec in zip(reports, specs().values(), strict=True):
        assert report.spilled == 0
        assert report.count("ACQBULK"), "no wait for the kernel before"
        assert report.count("PREEXIT"), "the attention is not let in"
        assert report.count(r"UTMALDG\.2D") >= 4
        assert report.count(rf"HGMMA\.64x{2 * spec.constants['WIDTH']}x16\.F32\.BF16")
        assert report.count(r"STG\.E\.128")
        assert report.shared <= 227 * 1024
