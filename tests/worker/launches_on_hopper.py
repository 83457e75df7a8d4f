"""Run as a program by test_kernels_on_hopper.py: everything that an H200 may be asked to launch, with nothing launched.

Steps of models that differ in what kernels are chosen by; then what a step launches for other models only. Prints what
the launches would compile: a JSON list of lines of oneloop_kernels.compiling.jobs.
"""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace

# The program beside this one: its folder is on the path.
import start_without_gpu as start
import torch

from oneloop.formats.quantization.config import WHILE_LOADING
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop_kernels.ops.fp8_linear import gpu as fp8_gpu
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.plans import DensePlan, FewRowsPlan, StreamPlan
from oneloop_kernels.ops.moe import Experts, MoeCall, num_counters
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.plans import MoePlan, ProductPlan, Shape
from oneloop_kernels.ops.moe.weights import ExpertWeight, Fp8Stack
from oneloop_kernels.ops.packed_linear import PackedCall, PackedWeight
from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION, AttentionShape, AttentionStep
from oneloop_kernels.ops.rope import ROPE, HeadNorms, RotaryStep
from oneloop_kernels.registry import TRITON, prefer
from oneloop_kernels.testing.recorded import H200, record_compilations

LLAMA = {"architecture": "LlamaForCausalLM", "qk_norm": False}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
MODELS = (
    ("bfloat16", 16, {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 1}),  # tuned: Qwen 3 0.6B
    ("bfloat16", 16, LLAMA | {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80}),
    (
        "bfloat16",
        16,
        LLAMA | BIASES | {"hidden_size": 60, "intermediate_size": 100},
    ),  # not for the copy engine
    ("float16", 64, LLAMA | BIASES | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}),
    ("float16", 8, {"num_heads": 4, "num_kv_heads": 4, "head_dim": 256}),
    ("float32", 16, LLAMA | BIASES | {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64}),
    ("bfloat16", 16, LLAMA | {"quantization": QuantizationSpec(method="fp8", scheme=WHILE_LOADING["fp8"])}),
)
"""Type, block size, and in what the model differs from the program's."""
NUM_IN_BOTH_ORDERS = 2
"""Of these models: one by the kernels of Hopper, one by those of any card."""
PACKED_KINDS = (
    (4, "none", 1), (4, "zero", 1), (4, "offset", 1), (4, "offset", 4), (6, "zero", 4), (8, "zero", 4)
)  # fmt: skip
"""Bits, shift, groups of a tile of columns."""
CPU = torch.device("cpu")
VOCAB_SIZE, MAX_NUM_SEQS, STEP_TOKENS = 256, 32, 1024


def tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """It has a shape and no memory."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def launch_models() -> None:
    for number, (dtype, block_size, changes) in enumerate(MODELS):
        spec = replace(start.SPEC, dtype=dtype, **changes)
        orders = (False, True) if number < NUM_IN_BOTH_ORDERS else (False,)
        runner = start.make_runner(
            VOCAB_SIZE, MAX_NUM_SEQS, STEP_TOKENS, spec=spec, block_size=block_size, orders=orders
        )
        runner.warm_up()
        start.launch_everything(runner)
    for head_dim in (64, 128):  # keys and values in 8 bits: by the kernels of any card, and by that of Hopper
        spec = replace(start.SPEC, dtype="bfloat16", **LLAMA | {"head_dim": head_dim})
        runner = start.make_runner(
            VOCAB_SIZE, MAX_NUM_SEQS, STEP_TOKENS, spec=spec, block_size=16, kv_cache_dtype="fp8"
        )
        runner.warm_up()
        start.launch_everything(runner)


def launch_linear_maps() -> None:
    """Every tuned plan, and those that no tuned shape has; with what may stand around the product."""
    from oneloop_kernels.ops.linear.launches import planned
    from oneloop_kernels.ops.linear.plans import TUNED

    plans = {
        (shape, most, plan)
        for shape, choices in TUNED[H200.name].items()
        for most, plan in choices
        if plan is not None
    }
    for gated in (False, True):
        plans.add(((512, 1024, gated), 16, StreamPlan(64, 128, 4)))
        plans.add(((512, 1024, gated), 16, StreamPlan(64, 128, 4, whole=True)))
        plans.add(((512, 1024, gated), 200, DensePlan((32, 16, 8), 4, pieces=2)))
        for use_dot, split in itertools.product((False, True), (1, 4)):
            plans.add(((512, 4096, gated), 4, FewRowsPlan(use_dot, 64, 128, split, prefetch=512 * use_dot)))
    for ((out_size, in_size, gated), num_tokens, plan), bias, norm in itertools.product(
        sorted(plans, key=str), (False, True), (False, True)
    ):
        planned(
            plan,
            LinearCall(
                tensor(num_tokens, in_size),
                tensor(out_size, in_size),
                tensor(out_size) if bias else None,
                norm=Norm(tensor(in_size), 1e-6) if norm else None,
                gated=gated,
                residual=None if gated or norm else tensor(num_tokens, out_size),
                tickets=tensor(NUM_TICKETS, dtype=torch.int32),
            ),
        ).run()


def launch_fp8_linear_maps() -> None:
    """Streams, chunks and tiles with either kind of scales, and the quantisation before them."""
    from oneloop_kernels.ops.fp8_linear.plans import TilesPlan
    from oneloop_kernels.ops.fp8_linear.triton.quantize import quantize

    by_block = (StreamPlan(64, 128, 4), TilesPlan(64))
    by_row = (*by_block, DensePlan((32, 16, 8), 3))
    around = ((False, False, False), (False, True, True), (True, True, True))  # gated, bias, norm
    for (gated, bias, norm), rows in itertools.product(around, (1, 32, 128)):
        shape = (512,) if rows == 1 else (512 // rows, 8)
        for plan in by_row if rows == 1 else by_block:
            call = LinearCall(
                tensor(16, 1024),
                tensor(512, 1024, dtype=torch.float8_e4m3fn),
                tensor(512) if bias else None,
                norm=Norm(tensor(1024), 1e-6) if norm else None,
                gated=gated,
                residual=None if gated or norm else tensor(16, 512),
                tickets=tensor(NUM_TICKETS, dtype=torch.int32),
            )
            fp8_gpu.by_plan(plan, call, tensor(*shape, dtype=torch.float32))
    for by_group in (False, True):
        quantize(tensor(16, 2048), gated=True, by_block=by_group)


def launch_packed_linear_maps() -> None:
    """Every kind of numbers and shifts, of few rows and many, and the tuned plans."""
    from oneloop_kernels.ops.packed_linear.launches import few_rows, prepared, stream, unpacked
    from oneloop_kernels.ops.packed_linear.plans import TUNED, fitting
    from oneloop_kernels.ops.packed_linear.plans import StreamPlan as PackedStreamPlan

    plan = PackedStreamPlan(1, 4, residents=2)
    cases = {
        ((512, 1024, gated), num_tokens, plan, *kind)
        for gated, num_tokens, kind in itertools.product((False, True), (4, 64), PACKED_KINDS)
    }
    slices = replace(plan, slices=True)
    cases |= {
        ((512, 1024, gated), 4, slices, *kind)
        for gated, kind in itertools.product((False, True), PACKED_KINDS)
    }
    for shape, choices in TUNED[H200.name].items():
        cases |= {
            (shape, most, one, 4, shift, 1) for most, one in choices if one for shift in ("none", "zero")
        }
    for (rows, columns, gated), num_tokens, one, *kind in sorted(cases, key=str):
        bias = kind[1] == "zero"
        dtype = torch.float16 if kind[0] == 4 and kind[1] != "none" else torch.bfloat16
        call = PackedCall(
            tensor(num_tokens, columns, dtype=dtype),
            packed_weight(rows, columns, *kind, gated=gated, dtype=dtype),
            tensor(rows, dtype=dtype) if bias else None,
            gated=gated,
            residual=None if gated or bias else tensor(num_tokens, rows, dtype=dtype),
            tickets=tensor(NUM_TICKETS, dtype=torch.int32),
        )
        call = prepared(call)
        stream(fitting(one, call.weight, num_tokens, gated=gated), call).run()
        few_rows(call).run()
        unpacked(call.weight).run()


def packed_weight(
    rows: int, columns: int, bits: int, shift: str, groups: int, *, gated: bool, dtype: torch.dtype
) -> PackedWeight:
    tiles = rows // 64, columns // 128
    high = {4: None, 6: tensor(*tiles, 1024, dtype=torch.int16), 8: tensor(*tiles, 1024, dtype=torch.int32)}
    params = tensor(*tiles, 32 * groups, 1 if shift == "none" else 2, dtype=torch.int32)
    words, halves = tensor(*tiles, 1024, dtype=torch.int32), 2 if gated else 1
    return PackedWeight(words, high[bits], params, bits, shift, rows, columns, halves, dtype)


def launch_heads() -> None:
    """Every tuned plan of queries, keys and values by one kernel, with and without biases."""
    from oneloop_kernels.ops.linear.heads import TUNED

    ops = ROPE.resolve(CPU, torch.bfloat16)
    angles = ops.angles(tensor(64, dtype=torch.float32), 1.0, torch.bfloat16)
    for ((num_heads, num_kv_heads, in_size, norms), choices), bias in itertools.product(
        TUNED[H200.name].items(), (False, True)
    ):
        for num_tokens, plan in choices:
            out_size = (num_heads + 2 * num_kv_heads) * 128
            done = ops.project_and_store(
                LinearCall(
                    tensor(num_tokens, in_size), tensor(out_size, in_size), tensor(out_size) if bias else None
                ),
                angles(tensor(num_tokens, dtype=torch.int64)),
                HeadNorms(tensor(2, 128), 1e-6) if norms else None,
                tensor(9, 2 * num_kv_heads, 16, 128).transpose(1, 2),
                tensor(num_tokens, dtype=torch.int64),
            )
            assert (done is None) == (plan is None)


def launch_packed_heads() -> None:
    """Of few rows, every kind of numbers and shifts, with and without biases."""
    from oneloop_kernels.ops.linear.heads import Surroundings
    from oneloop_kernels.ops.packed_linear.launches import slices
    from oneloop_kernels.ops.packed_linear.plans import StreamPlan as PackedStreamPlan

    plan = PackedStreamPlan(1, 4, residents=2, slices=True)
    angles = tensor(4, 128, dtype=torch.float32)
    around = Surroundings(
        RotaryStep(angles[:, :64], angles[:, 64:]),
        None,
        tensor(9, 4, 16, 128).transpose(1, 2),
        tensor(4, dtype=torch.int64),
    )
    for kind, bias in itertools.product(PACKED_KINDS, (False, True)):
        call = PackedCall(
            tensor(4, 1024),
            packed_weight(1024, 1024, *kind, gated=False, dtype=torch.bfloat16),
            tensor(1024) if bias else None,
        )
        slices(plan, call, around).run()


def launch_attention() -> None:
    """Windows, caps and sinks, which no model has yet."""
    device, num_rows, num_tokens = torch.device("meta"), 16, 64
    shapes = (
        AttentionShape(8, 2, 128, 64, 0.1),
        AttentionShape(8, 2, 128, 64, 0.1, sliding_window=128),
        AttentionShape(8, 2, 128, 16, 0.1, sliding_window=128, soft_cap=30.0),
    )
    rows = tensor(num_rows + 1, dtype=torch.int32)
    step = AttentionStep(rows, rows, rows, rows, rows, tensor(num_rows, 512, dtype=torch.int32))
    for shape, has_sinks in itertools.product(shapes, (False, True)):
        attention = DEVICE_ATTENTION.resolve(CPU, torch.bfloat16)(
            shape, max_rows=num_rows, max_tokens=num_tokens, max_blocks_per_row=512, dtype=torch.bfloat16, device=device
        )  # fmt: skip
        for has_multi, may_share in itertools.product((False, True), (False, True)):
            attention.plan(step, num_rows, num_tokens, has_multi, may_share=may_share).run(
                tensor(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, 128),
                tensor(9, 2 * shape.num_kv_heads, shape.block_size, 128).transpose(1, 2),
                tensor(num_tokens, shape.num_heads * 128),
                tensor(shape.num_heads, dtype=torch.float32) if has_sinks else None,
            )


def launch_experts() -> None:
    """Every tuned plan, those of the rule, and what no tuned one has; with what may stand around them."""
    from oneloop_kernels.ops.moe.gpu import run
    from oneloop_kernels.ops.moe.plans import FILES, plan_by_rule, read_plans

    odd, whole = (Shape(num_experts=4, top_k=2, hidden=size, width=size) for size in (72, 256))
    cases = {(odd, count, plan_by_rule(2, count, odd)) for count in (1, 24, 40, 600, 4096)}
    cases |= {(odd, count, plan_by_rule(2, count, odd, hopper=True)) for count in (40, 600, 4096)}
    ahead = ProductPlan("weights", block_n=64, block_k=64, num_stages=3, prefetch=64)
    cases |= {(whole, count, MoePlan(16, ahead, ahead, combined=True)) for count in (1, 8)}
    cases |= {
        (whole, count, MoePlan(16, ahead, ahead, combined=count < 40, together=True)) for count in (1, 24, 40)
    }
    wide = ProductPlan("tokens", block_n=64, block_k=64, num_stages=3)
    cases |= {
        (whole, count, MoePlan(64, *products, combined=count < 40, together=True))
        for count in (24, 40)
        for products in ((ahead, wide), (wide, wide))
    }
    grouped = ProductPlan("grouped", block_n=64, block_k=64, num_stages=3)
    cases |= {(shape, 100, MoePlan(64, grouped, grouped)) for shape in (odd, whole)}
    for shape, plans in read_plans(FILES[H200.name]).items():
        cases |= {(shape, most, plan) for most, plan in plans}
    for index, (shape, num_tokens, plan) in enumerate(sorted(cases, key=str)):
        run(experts_call(shape, num_tokens, gate=False, full=False, renormalised=index % 2 == 0), plan)
        run(experts_call(shape, num_tokens, gate=index % 2 == 1, full=True, renormalised=True), plan)


def launch_fp8_experts() -> None:
    """Plans of the rule and of the fixed order, and what these have not; scales of rows, of whole tiles, and of
    smaller blocks."""
    from oneloop_kernels.ops.moe.gpu import run
    from oneloop_kernels.ops.moe.plans import FIXED_PLAN, plan_of_8_bits

    ahead = ProductPlan("weights", block_n=64, block_k=128, num_stages=3, prefetch=64)
    inside, wide = replace(ahead, quantizes=True), replace(ahead, kind="tokens", quantizes=True)
    odd, whole = (
        Shape(num_experts=4, top_k=2, hidden=size, width=size, weights="fp8-block") for size in (72, 256)
    )
    cases = [(odd, 1, count, plan_of_8_bits(count, odd)) for count in (1, 4096)]
    cases += [(whole, 128, count, plan_of_8_bits(count, whole)) for count in (1, 40, 4096)]
    cases += [(odd, 8, 40, plan_of_8_bits(40, odd)), (whole, 8, 40, FIXED_PLAN)]
    cases += [
        (whole, 1, 1, MoePlan(16, inside, inside, combined=True)),
        (whole, 1, 24, MoePlan(16, wide, wide)),
    ]
    cases += [
        (whole, 128, 24, MoePlan(16, ahead, ahead, combined=True)),
        (whole, 128, 24, MoePlan(16, wide, wide)),
    ]
    grouped = MoePlan(64, *(replace(ahead, kind="grouped", block_n=size) for size in (64, 128)))
    cases += [
        (whole, 128, 100, grouped),
        (whole, 1, 100, grouped),
        (replace(odd, hidden=80, width=80), 1, 100, grouped),
    ]
    for index, (shape, block_rows, num_tokens, plan) in enumerate(cases):
        full = index % 2 == 1 or plan.combined
        call = experts_call(shape, num_tokens, gate=full, full=full, renormalised=True, block_rows=block_rows)
        run(call, plan)


def experts_call(
    shape: Shape, num_tokens: int, *, gate: bool, full: bool, renormalised: bool, block_rows: int = 0
) -> MoeCall:
    """full: with padding, a shared expert, and statistics. block_rows: of weights in 8 bits; 1: a scale per row."""

    def weight(*sizes: int) -> ExpertWeight:
        if not block_rows:
            return tensor(*sizes)
        count, rows, columns = sizes
        scales = (count, rows) if block_rows == 1 else (count, rows // block_rows, -(-columns // 128))
        return Fp8Stack(tensor(*sizes, dtype=torch.float8_e4m3fn), tensor(*scales, dtype=torch.float32))

    experts = Experts(
        tensor(shape.num_experts + gate, shape.hidden),
        weight(shape.num_experts, 2 * shape.width, shape.hidden),
        weight(shape.num_experts, shape.hidden, shape.width),
        shape.top_k,
        renormalised,
    )
    return MoeCall(
        tensor(num_tokens, shape.hidden),
        experts,
        Norm(tensor(shape.hidden), 1e-6),
        tensor(num_counters(shape.num_experts), dtype=torch.int32),
        tensor(num_tokens, dtype=torch.int64) if full else None,
        tensor(num_tokens, shape.hidden) if full else None,
        tensor(shape.num_experts, dtype=torch.int64) if full else None,
    )


def launch_packed_experts() -> None:
    """Every kind of numbers and shifts by both kernels, of one token, few and many."""
    from oneloop_kernels.ops.moe.gpu import run
    from oneloop_kernels.ops.moe.launches import shape_of
    from oneloop_kernels.ops.moe.plans import plan_of_packed

    odd, whole = (Shape(num_experts=4, top_k=2, hidden=size, width=size) for size in (72, 256))
    kinds = (
        (4, "none", 1),
        (4, "zero", 1),
        (4, "offset", 1),
        (4, "offset", 4),
        (6, "zero", 8),
        (8, "zero", 4),
    )
    for (bits, shift, groups), num_tokens in itertools.product(kinds, (1, 24, 300)):
        for shape, stages, ordered in ((odd, 0, shift == "zero"), (whole, 5, False)):
            call = experts_call(shape, num_tokens, gate=True, full=bits == 4, renormalised=True)
            gate_up, down = (
                PackedStack.empty(
                    shape.num_experts, rows, shape.hidden, halves=halves, bits=bits, shift=shift,
                    group_size=128 // groups, ordered=ordered, dtype=torch.bfloat16, device=torch.device("meta"),
                )
                for rows, halves in ((2 * shape.width, 2), (shape.hidden, 1))
            )  # fmt: skip
            call = call._replace(experts=call.experts._replace(gate_up=gate_up, down=down))
            run(call, plan_of_packed(num_tokens, shape_of(call), hopper_stages=stages))


def launch_norms() -> None:
    """With the residual, which a step on a GPU leaves to the linear map before it."""
    from oneloop_kernels.ops.rms_norm.triton import rms_norm

    for num_tokens, size in itertools.product((1, 8192), (1024, 4096)):
        rms_norm(tensor(num_tokens, size), tensor(size), 1e-6, residual=tensor(num_tokens, size))


def main() -> None:
    recorded = record_compilations()
    # On a CPU torch has no such product; it launches nothing of ours.
    vars(fp8_gpu)["product"] = lambda x, weight, scales, _bias: x.new_empty(
        x.shape[0], weight.shape[0], dtype=scales.dtype
    )
    start.gpu_runner.compiling_ahead = lambda *_arguments: nullcontext()
    with prefer(TRITON):
        launch_models()
        launch_linear_maps()
        launch_fp8_linear_maps()
        launch_packed_linear_maps()
        launch_heads()
        launch_packed_heads()
        launch_attention()
        launch_experts()
        launch_fp8_experts()
        launch_packed_experts()
        launch_norms()
    print(json.dumps(sorted(set(recorded))))


if __name__ == "__main__":
    main()
