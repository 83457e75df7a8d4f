"""How experts' kernels are cut: measured per card, experts and number of tokens (`configs/*.json`); else by a rule.

`python -m oneloop_bench.kernels.moe` measures, and prints what belongs into the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from oneloop_kernels.launch import card_name, of_card
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

FILES: Final[Mapping[str, str]] = {"NVIDIA H200": "nvidia_h200.json"}
"""Beginning of the card's name → file in `configs`."""

MAX_FEW: Final = 32
"""Tokens that all fit a tile of each expert, so that nothing is put in order. Down's kernel may do their sums."""
MAX_SPLIT: Final = 512
"""Up to so many tokens a program has a slice of the hidden size, of more all of it."""
_ROUTE_TOKENS: Final = ((128, 8), (MAX_SPLIT, 16), (2048, 32))
"""(up to that many tokens, those of a program otherwise): the more there are, the fewer read the router."""
_MOST_ROUTE_TOKENS: Final = 64
_ROUTE_SPLITS: Final = 8
_MOST_SPLITS: Final = 32
_SLICE_BYTES: Final = 64 << 10
"""Of the router, for a program that has one slice of it…"""
_STAGE_BYTES: Final = 32 << 10
"""…and in each stage of one that has several."""


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Constants of `triton.experts`, or with the kind "grouped" of `triton.grouped`, which is for Hopper, 16-bit types
    and more than MAX_FEW tokens. kind: else which are the wide side. prefetch: for down. quantizes: of 8-bit weights
    (`triton.fp8`; grouped: `triton.fp8_grouped`): each program quantises x for itself; else that is a kernel before.
    """

    kind: Literal["weights", "tokens", "grouped"]
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    prefetch: int = 0
    quantizes: bool = False


@dataclass(frozen=True, slots=True)
class MoePlan:
    """block_m: pairs of a tile. combined: down's kernel does the sum, of few tokens. together: both products are one
    kernel, of down's number of warps; not of the kind "grouped".
    """

    block_m: int
    gate_up: ProductPlan
    down: ProductPlan
    combined: bool = False
    together: bool = False

    def most_tiles(self, num_pairs: int, num_experts: int) -> int:
        """Each expert with pairs has a tile that may not be full."""
        return min(num_pairs, num_experts + num_pairs // self.block_m)


class RoutePlan(NamedTuple):
    """Constants of `triton.routing`: tokens of a block, slices of the hidden size, columns of a product."""

    tokens: int
    splits: int
    columns: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What plans are found by."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    weights: str = "plain"
    """How gate_up and down are kept, as `weights.kind_of` has it; two names joined by + where they differ."""


MAX_QUANTIZED_INSIDE: Final = 8
"""Tokens that each program quantises for itself, where weights have 8 bits; of more it would take too long."""
MAX_INSIDE: Final = 4096
"""Numbers of a row that a program looks through for itself, to find the largest."""
ONE_PLAN_FROM: Final = 2048
"""More tokens than this all have one plan: only the largest of such steps is run when kernels are compiled."""


def plan_for(
    device: torch.device, dtype: torch.dtype, num_tokens: int, shape: Shape, *, fixed: bool = False
) -> MoePlan:
    """The plan for that many tokens. fixed: in the fixed order, where weights that are not plain have one for all."""
    if fixed and shape.weights != "plain":
        return FIXED_PLAN
    num_tokens = min(num_tokens, ONE_PLAN_FROM + 1)
    return _plan_for(card_name(device), can_stream(device), dtype.itemsize, num_tokens, shape)


@cache
def _plan_for(card: str, hopper: bool, item_bytes: int, num_tokens: int, shape: Shape) -> MoePlan:
    name = of_card(card, FILES)
    if name is not None and item_bytes == 2:
        for most, plan in read_plans(name).get(shape, ()):
            if num_tokens <= most:
                return plan
    if shape.weights == "plain":
        return plan_by_rule(item_bytes, num_tokens, shape, hopper=hopper)
    if has_packed(shape):
        return plan_of_packed(num_tokens, shape)
    return plan_of_8_bits(num_tokens, shape)


@cache
def read_plans(name: str) -> Mapping[Shape, tuple[tuple[int, MoePlan], ...]]:
    """Shape → (up to that many tokens, the plan), ascending."""
    content = json.loads(files(__package__).joinpath("configs", name).read_text())
    return {
        Shape(**entry["shape"]): tuple((plan["tokens"], _plan_of(plan)) for plan in entry["plans"])
        for entry in content
    }


def _plan_of(entry: Mapping[str, object]) -> MoePlan:
    gate_up, down = entry["gate_up"], entry["down"]
    assert isinstance(gate_up, dict)
    assert isinstance(down, dict)
    rest = {key: value for key, value in entry.items() if key not in ("tokens", "gate_up", "down")}
    return MoePlan(gate_up=ProductPlan(**gate_up), down=ProductPlan(**down), **rest)  # type: ignore[arg-type]


def route_plan(
    num_tokens: int, hidden: int, experts_pad: int, item_bytes: int, *, fixed: bool = False
) -> RoutePlan:
    """How routing is cut. fixed: the same for any number of tokens."""
    if fixed:
        num_tokens = MAX_SPLIT + 1
    tokens = next((size for most, size in _ROUTE_TOKENS if num_tokens <= most), _MOST_ROUTE_TOKENS)
    slice_size = max(16, 1 << (-(-hidden // _ROUTE_SPLITS) - 1).bit_length())
    columns = min(slice_size, max(16, _SLICE_BYTES // (item_bytes * experts_pad)))
    splits = -(-hidden // columns)
    if num_tokens <= MAX_SPLIT and splits <= _MOST_SPLITS:
        return RoutePlan(tokens, splits, columns)
    return RoutePlan(tokens, 1, min(columns, max(16, _STAGE_BYTES // (item_bytes * experts_pad))))


def plan_by_rule(item_bytes: int, num_tokens: int, shape: Shape, *, hopper: bool = False) -> MoePlan:
    """Tiles with room for twice the mean tokens of an expert, weights as the wide side, while those are few."""
    mean = num_tokens * shape.top_k / shape.num_experts
    if num_tokens > ONE_PLAN_FROM:
        mean *= 4
    if item_bytes == 4:
        product = ProductPlan("weights", block_n=16, block_k=32, num_stages=3)
        return MoePlan(block_m=16, gate_up=product, down=product)
    if mean <= 32:
        block_m = 16
        while block_m < 64 and block_m < 2 * mean:
            block_m *= 2
        return MoePlan(
            block_m=block_m,
            gate_up=ProductPlan("weights", block_n=32, block_k=128, num_stages=4),
            down=ProductPlan("weights", block_n=64, block_k=128, num_stages=4),
        )
    # A tile of 128 pairs is worth it where the last one of an expert, half empty, is one of several.
    block_m = 64 if mean < 256 else 128
    if hopper and num_tokens > MAX_FEW and shape.hidden % 8 == shape.width % 8 == 0:  # for the copy engine
        return MoePlan(
            block_m=block_m,
            gate_up=ProductPlan("grouped", block_n=128, block_k=64, num_stages=4),
            down=ProductPlan("grouped", block_n=256, block_k=64, num_stages=4),
        )
    return MoePlan(
        block_m=block_m,
        gate_up=ProductPlan("tokens", block_n=128, block_k=64, num_stages=3, num_warps=8),
        down=ProductPlan("tokens", block_n=256, block_k=64, num_stages=3, num_warps=8),
    )


_FIXED: Final = ProductPlan("weights", block_n=32, block_k=128, num_stages=3)
FIXED_PLAN: Final = MoePlan(block_m=64, gate_up=_FIXED, down=_FIXED)
"""Of weights that are not plain, or not all: for any kinds and any number of tokens."""


def plan_of_8_bits(num_tokens: int, shape: Shape) -> MoePlan:
    """As plan_by_rule, where weights are e4m3, or some of them. A block of columns is one that has a scale."""
    if shape.weights not in ("fp8", "fp8-block"):  # gate_up and down are kept in two ways
        return FIXED_PLAN
    mean = num_tokens * shape.top_k / shape.num_experts
    if num_tokens > ONE_PLAN_FROM:
        mean *= 4
    if mean <= 32:
        block_m = 16
        while block_m < 64 and block_m < 2 * mean:
            block_m *= 2
        few = num_tokens <= MAX_QUANTIZED_INSIDE
        gate_up, down = (few and size <= MAX_INSIDE for size in (shape.hidden, shape.width))
        return MoePlan(
            block_m=block_m,
            gate_up=ProductPlan("weights", block_n=32, block_k=128, num_stages=6, quantizes=gate_up),
            down=ProductPlan("weights", block_n=64, block_k=128, num_stages=6, quantizes=down),
        )
    return MoePlan(
        block_m=64 if mean < 256 else 128,
        gate_up=ProductPlan("tokens", block_n=64, block_k=128, num_stages=4, num_warps=8),
        down=ProductPlan("tokens", block_n=128, block_k=128, num_stages=4, num_warps=8),
    )


_LARGEST_PACKED_TILE: Final = 64
"""Pairs: their sums, twice with a gate, have to find room in registers beside the weights that are unpacked."""


def has_packed(shape: Shape) -> bool:
    """Whether gate_up or down is of a few bits."""
    return any(kind.startswith("w") for kind in shape.weights.split("+"))


def plan_of_packed(num_tokens: int, shape: Shape, *, hopper_stages: int = 0) -> MoePlan:
    """As plan_by_rule, where weights are of a few bits, or some of them.

    hopper_stages: if not 0, by Hopper's kernel of that depth, for weights of few bits that `packed.fits_hopper`.
    """
    block_m, mean = 16, num_tokens * shape.top_k / shape.num_experts
    while block_m < _LARGEST_PACKED_TILE and block_m < 2 * mean:
        block_m *= 2
    if hopper_stages:
        product = ProductPlan("grouped", TILE_ROWS, TILE_COLUMNS, num_stages=hopper_stages)
        return MoePlan(block_m, product, product)
    product = ProductPlan("weights", TILE_ROWS, TILE_COLUMNS, num_stages=3)
    return MoePlan(block_m, product, product, combined=num_tokens <= MAX_FEW)
