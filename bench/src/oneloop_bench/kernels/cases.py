"""The cases of the kernel table: what is measured, against which ceiling, and what is to be reached."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch

from oneloop_bench.kernels import attention, kv_cache, linear, moe, norm, rope, sampling, weight_cases
from oneloop_bench.kernels.kernel_case import OURS, KernelCase
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.linear.gpu import linear as linear_by_plan
from oneloop_kernels.ops.linear.plans import plan_for
from oneloop_kernels.ops.moe.gpu import moe as run_experts
from oneloop_kernels.ops.moe.plans import plan_for as plan_for_experts
from oneloop_kernels.ops.rms_norm.triton import rms_norm
from oneloop_kernels.ops.rope.triton import TRITON as ROPE
from oneloop_kernels.ops.scores import Scores
from oneloop_kernels.ops.scores.triton import TRITON as SCORES
from oneloop_kernels.ops.silu_mul.triton import silu_mul
from oneloop_kernels.order import fixed_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oneloop_kernels.ops.moe.plans import MoePlan, Shape

HEADS: Final = {"llama8b": attention.LLAMA_8B, "qwen06b": attention.QWEN_06B}
DECODES: Final = {"32x1k": 0.85, "64x1k": 0.85, "128x1k": 0.85, "256x1k": 0.85, "1x32k": 0.75}
"""Share of the read rate to reach (issue B)."""
PREFILLS: Final = {"1x8k": 0.65, "8x1k": None}
"""Share of the rate of a large bf16 product."""
TOKENS: Final = (4096, 16384)
POINTWISE_SHARE: Final = 0.85
SAMPLED_ROWS: Final = 256
SAMPLING_US: Final = 100.0
GEMM_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZES: Final = {"llama8b": (4096, 14336), "qwen06b": (1024, 3072)}
"""Hidden size, and that of the activation."""
NARROW_DECODES: Final = ("32x1k", "256x1k", "1x32k")
"""Of keys and values in 8 bits, and of the fixed order."""
EXPERTS: Final = (1, 8, 32, 128, 256, 512, 2048, 8192)
PARTS: Final = (1, 32, 128, 2048)
"""Tokens at which a mixture's kernels are measured one by one, too."""
COPIES: Final = (64, 512)
"""Blocks, each in all layers."""
CACHED_BLOCKS: Final = 2048
BEGINNINGS: Final = (256, 8192)
_SMALL_TOKENS: Final = 16
_SMALL_VOCAB: Final = 1500


def all_cases(device: torch.device, *, small: bool) -> Iterator[KernelCase]:
    """In the order in which they are measured: what has a target first. small: sizes that the interpreter can do."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    for model in HEADS:
        yield from _decodes(model, dtype, device, small)
    for model in HEADS:
        yield from _prefills(model, dtype, device, small)
    yield from _narrow_attention(dtype, device, small)
    yield from _fixed_attention(dtype, device, small)
    for num_tokens in (_SMALL_TOKENS,) if small else TOKENS:
        for model in HEADS:
            yield from _pointwise(model, num_tokens, device)
    yield from _samplings(device, small)
    yield from _scores(device, small)
    yield from _experts(device, small)
    yield from weight_cases.all_cases(device, small=small)
    for model, maps in linear.MODELS.items():
        for one in maps:
            for num_tokens in GEMM_ROWS[:2] if small else GEMM_ROWS:
                yield _gemm(model, linear.shrunken(one) if small else one, num_tokens, device)
    yield from _small_ones(device, small)


def _decodes(model: str, dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCase]:
    """A layer's attention; the planning, once per step, is no part of it."""
    for name, share in DECODES.items():
        rows = ((1, 40),) * 2 if small else attention.DECODE[name]
        case = attention.Case(name, rows, HEADS[model])
        yield KernelCase(
            "decode attention",
            f"{model} {name}",
            partial(case.layer, dtype, device),
            {OURS: partial(_planned, case, dtype, device)},
            case.num_bytes,
            "read",
            case.num_flops,
            share=share,
        )


def _prefills(model: str, dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCase]:
    """Ours over the paged cache, and torch's own without one, at the same shape."""
    for name, share in PREFILLS.items():
        rows = ((20, 0),) if small else attention.PREFILL[name]
        case = attention.Case(name, rows, HEADS[model])
        ways: dict[str, Callable[[], Callable[[Any], object]]] = {
            OURS: partial(_planned, case, dtype, device)
        }
        if device.type == "cuda":
            for key, backend in attention.TORCH_BACKENDS.items():
                ways[f"torch {key}"] = partial(_of_queries, attention.torch_attention(case, backend))
        yield KernelCase(
            "prefill attention",
            f"{model} {name}",
            partial(case.layer, dtype, device),
            ways,
            case.num_bytes,
            "read",
            case.num_flops,
            share=share,
        )


def _planned(
    case: attention.Case, dtype: torch.dtype, device: torch.device
) -> Callable[[attention.LAYER], object]:
    plan = case.plan(dtype, device)
    return lambda layer: plan.run(*layer)


def _narrow_attention(dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCase]:
    """Keys and values kept in 8 bits."""
    for name in (*NARROW_DECODES, "1x8k"):
        prompt = name in attention.PREFILL
        rows = attention.PREFILL[name] if prompt else attention.DECODE[name]
        if small:
            rows = ((20, 0),) if prompt else ((1, 40),) * 2
        case = attention.Case(name, rows, HEADS["llama8b"], cache_dtype=FP8)
        yield KernelCase(
            "prefill attention" if prompt else "decode attention",
            f"llama8b FP8 KV {name}",
            partial(case.layer, dtype, device),
            {OURS: partial(_planned, case, dtype, device)},
            case.num_bytes,
            "read",
            case.num_flops,
        )


def _fixed_attention(dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCase]:
    """As the deterministic mode takes it."""
    for name in (*NARROW_DECODES, "1x8k"):
        prompt = name in attention.PREFILL
        rows = attention.PREFILL[name] if prompt else attention.DECODE[name]
        if small:
            rows = ((20, 0),) if prompt else ((1, 40),) * 2
        case = attention.Case(name, rows, HEADS["llama8b"])
        yield KernelCase(
            "prefill attention" if prompt else "decode attention",
            f"llama8b fixed order {name}",
            partial(case.layer, dtype, device),
            {OURS: partial(_planned_fixed, case, dtype, device)},
            case.num_bytes,
            "read",
            case.num_flops,
        )


def _planned_fixed(
    case: attention.Case, dtype: torch.dtype, device: torch.device
) -> Callable[[attention.LAYER], object]:
    with fixed_order():
        plan = case.plan(dtype, device)

    def run(layer: attention.LAYER) -> None:
        with fixed_order():
            plan.run(*layer)

    return run


def _of_queries(attend: Callable[[torch.Tensor], object]) -> Callable[[attention.LAYER], object]:
    return lambda layer: attend(layer[0])


def _pointwise(model: str, num_tokens: int, device: torch.device) -> Iterator[KernelCase]:
    """Norm with the residual's sum, rotation with the cache write, activation: each of one layer."""
    hidden, inner = SIZES[model]
    heads = next(one for one in rope.MODELS if one.name == model)
    element = 2

    def case(
        family: str, make: Callable[[], Any], launch: Callable[[Any], object], num_bytes: int
    ) -> KernelCase:
        name = f"{model} {num_tokens} tokens"
        return KernelCase(
            family, name, make, {OURS: lambda: launch}, num_bytes, "copy", share=POINTWISE_SHARE
        )

    yield case(
        "residual + norm",
        partial(norm.make, device, num_tokens, hidden, residual=True),
        lambda one: rms_norm(one.x, one.weight, norm.EPS, residual=one.residual),
        4 * element * num_tokens * hidden,
    )
    yield case(
        "rope + KV write",
        partial(rope.make_layer, heads, num_tokens, device, by_head=True),
        rope.run,
        heads.num_bytes(num_tokens),
    )
    yield KernelCase(
        "rope + KV write",
        f"{model} FP8 KV {num_tokens} tokens",
        partial(rope.make_layer, heads, num_tokens, device, by_head=True, kv_dtype=FP8),
        {OURS: lambda: rope.run},
        heads.num_bytes(num_tokens, FP8),
        "copy",
    )
    yield case(
        "silu · mul",
        partial(norm.make, device, num_tokens, 2 * inner),
        lambda one: silu_mul(one.x),
        3 * element * num_tokens * inner,
    )


def _samplings(device: torch.device, small: bool) -> Iterator[KernelCase]:
    """Each way to sample, for flat and for steep logits."""
    num_rows, vocab_size = (2, _SMALL_VOCAB) if small else (SAMPLED_ROWS, sampling.VOCAB)
    for options in sampling.CASES:
        for steep in (False, True):
            common = cache(partial(sampling.Sampling.of, options, num_rows, vocab_size, device, steep=steep))
            yield KernelCase(
                "sampling",
                f"{options} {'steep' if steep else 'flat'}",
                partial(_make_logits, common),
                {OURS: partial(_sampler, common)},
                sampling.bytes_of(options, num_rows, vocab_size),
                "read",
                us=SAMPLING_US,
            )


def _make_logits(common: Callable[[], sampling.Sampling]) -> sampling.Inputs:
    return common().make()


def _sampler(common: Callable[[], sampling.Sampling]) -> Callable[[sampling.Inputs], object]:
    return common().launch


def _scores(device: torch.device, small: bool) -> Iterator[KernelCase]:
    """Log-probabilities of given tokens, as of a prompt's; alone and beside the 20 likeliest."""
    num_rows, vocab_size = (2, _SMALL_VOCAB) if small else (SAMPLED_ROWS, sampling.VOCAB)

    def make() -> tuple[torch.Tensor, torch.Tensor, Scores]:
        logits = sampling.make_logits(num_rows, vocab_size, device, steep=False)
        token_ids = torch.randint(vocab_size, (num_rows,), device=device)
        return logits, token_ids, Scores.allocate(num_rows, sampling.COLUMNS, device)

    for num_top in (0, sampling.COLUMNS - 1):
        yield KernelCase(
            "scores of tokens",
            f"beside {num_top} of the likeliest {num_rows} rows",
            make,
            {OURS: partial(_scorer, num_top)},
            num_rows * vocab_size * (2 if device.type == "cuda" else 4),
            "read",
        )


def _scorer(num_top: int) -> Callable[[tuple[torch.Tensor, torch.Tensor, Scores]], object]:
    return lambda one: SCORES.score(one[0], one[1], num_top, one[2])


def _experts(device: torch.device, small: bool) -> Iterator[KernelCase]:
    """A layer's mixture: all of it, then its kernels one by one."""
    shape = moe.SMOKE_SHAPE if small else moe.SHAPES["qwen30ba3b"]
    for num_tokens in moe.SMOKE_TOKENS if small else EXPERTS:
        num_bytes, num_flops = moe.floors(shape, num_tokens, moe.expected_active(shape, num_tokens))["whole"]
        yield KernelCase(
            "experts",
            f"qwen30ba3b {num_tokens} tokens",
            partial(moe.make_inputs, shape, num_tokens, device),
            {OURS: lambda: lambda one: run_experts(one.call)},
            round(num_bytes),
            "read",
            num_flops,
        )
    for num_tokens in moe.SMOKE_TOKENS[:1] if small else PARTS:
        plan = plan_for_experts(device, linear.dtype_on(device), num_tokens, shape)
        floors = moe.floors(shape, num_tokens, moe.expected_active(shape, num_tokens))
        for part, launch in moe.parts_of(plan).items():
            if part == "whole" or (part == "combine" and plan.combined):
                continue
            yield KernelCase(
                "experts",
                f"qwen30ba3b {part} {num_tokens} tokens",
                partial(_prepared, shape, num_tokens, device, plan),
                {OURS: partial(_itself, launch)},
                round(floors[part][0]),
                "copy" if part == "combine" else "read",
                floors[part][1],
            )


def _prepared(shape: Shape, num_tokens: int, device: torch.device, plan: MoePlan) -> moe.Prepared:
    return moe.prepare(moe.make_inputs(shape, num_tokens, device), plan)


def _itself(launch: Callable[[Any], object]) -> Callable[[Any], object]:
    return launch


def _small_ones(device: torch.device, small: bool) -> Iterator[KernelCase]:
    """Blocks copied in all layers; a step's angles and rows of the embedding table."""
    num_layers, num_blocks = (2, 16) if small else (kv_cache.NUM_LAYERS, CACHED_BLOCKS)
    caches = cache(partial(kv_cache.make_cache, num_layers, num_blocks, device))
    for num_pairs in (2,) if small else COPIES:
        yield KernelCase(
            "block copies",
            f"{num_layers} layers {num_pairs} blocks",
            partial(kv_cache.make_pairs, num_pairs, num_blocks, device),
            {OURS: lambda: partial(kv_cache.copy, caches())},
            2 * num_pairs * num_layers * kv_cache.BLOCK_BYTES,
            "copy",
        )
    vocab_size = _SMALL_VOCAB if small else kv_cache.VOCAB_SIZE
    tables = cache(partial(kv_cache.make_table, vocab_size, device))
    for num_tokens in (_SMALL_TOKENS,) if small else BEGINNINGS:
        yield KernelCase(
            "embedding + angles",
            f"llama8b {num_tokens} tokens",
            partial(kv_cache.make_token_ids, num_tokens, vocab_size, device),
            {OURS: lambda: partial(kv_cache.begin, kv_cache.angles_of(ROPE, device), tables())},
            kv_cache.beginning_bytes(num_tokens),
            "copy",
        )


def _gemm(model: str, one: linear.Map, num_tokens: int, device: torch.device) -> KernelCase:
    """The map with what is around it (norm, activation, residual): by its plan; and by cuBLAS and kernels beside it.

    Where the plan is cuBLAS, there is one way.
    """
    ways: dict[str, Callable[[], Callable[[Any], object]]] = {"cuBLAS": lambda: lambda inputs: inputs.apart()}
    shape = (one.out_size, one.in_size, one.gated)
    dtype = linear.dtype_on(device)
    if plan_for(device, dtype, num_tokens, shape, may_split=True, may_stream=True) is not None:
        ways = {OURS: lambda: lambda inputs: linear_by_plan(inputs.call()), **ways}
    return KernelCase(
        "GEMM",
        f"{model} {one.name} {num_tokens} rows",
        partial(linear.make_inputs, one, num_tokens, device),
        ways,
        one.num_bytes(num_tokens),
        "read",
        2.0 * num_tokens * one.in_size * one.out_size,
    )
