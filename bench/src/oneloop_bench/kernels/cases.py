"""The cases of the kernel table: what is measured, against which ceiling, and what is to be reached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from oneloop_bench.kernels import attention, linear, norm, rope, sampling
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.linear.gpu import linear as linear_by_plan
from oneloop_kernels.ops.linear.plans import plan_for
from oneloop_kernels.ops.rms_norm.triton import rms_norm
from oneloop_kernels.ops.silu_mul.triton import silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Memory = Literal["read", "copy"]

OURS: Final = "oneloop"
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
_SMALL_TOKENS: Final = 16
_SMALL_VOCAB: Final = 1500


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One line or, with several ways to the same result, several.

    make: one set of random inputs. ways: each begins with a call that gives the launch, which takes a set; ours is the
    first. num_bytes, num_flops: the fewest that a launch moves and computes. memory: the ceiling of num_bytes, how fast
    memory is read, or read and written. share, us: to be reached by ours; None: not asked for.
    """

    family: str
    name: str
    make: Callable[[], Any]
    ways: Mapping[str, Callable[[], Callable[[Any], object]]]
    num_bytes: int
    memory: Memory
    num_flops: float = 0.0
    share: float | None = None
    us: float | None = None


def all_cases(device: torch.device, *, small: bool) -> Iterator[KernelCase]:
    """In the order in which they are measured: what has a target first. small: sizes that the interpreter can do."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    for model in HEADS:
        yield from _decodes(model, dtype, device, small)
    for model in HEADS:
        yield from _prefills(model, dtype, device, small)
    for num_tokens in (_SMALL_TOKENS,) if small else TOKENS:
        for model in HEADS:
            yield from _pointwise(model, num_tokens, device)
    yield from _samplings(device, small)
    for model, maps in linear.MODELS.items():
        for one in maps:
            for num_tokens in GEMM_ROWS[:2] if small else GEMM_ROWS:
                yield _gemm(model, linear.shrunken(one) if small else one, num_tokens, device)


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
