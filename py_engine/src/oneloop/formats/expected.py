"""The tensors that a checkpoint must have, from its ModelSpec alone. No torch: headers are checked before its import.

The models' weight_targets() name the stored tensors with the same shapes; a test holds the two together.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from oneloop.formats.quantization.gguf import GgufQuantization
from oneloop.formats.quantization.spec import StoredTensor
from oneloop.formats.safetensors import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oneloop.formats.model_spec import ModelSpec, MoeSpec

Shape = tuple[int, ...]


class LinearMap(NamedTuple):
    """One whose weight may be stored in another way than as plain numbers."""

    names: tuple[str, ...]
    """Of the modules that are computed together, their weights one below the other."""
    out_sizes: tuple[int, ...]
    in_size: int
    bias: bool
    experts: int = 0
    """How many experts a map of experts has: one stands for all of a layer, which are stacked, and stored alike. Names
    are those of the first expert's modules, then the second's, and so on. 0: a map of no experts."""

    @property
    def stacked(self) -> int:
        """How often there is what `of_one` says."""
        return max(self.experts, 1)

    @property
    def of_one(self) -> tuple[int, ...]:
        """Of out_sizes those of one expert's modules; all where there are no experts."""
        return self.out_sizes[: len(self.out_sizes) // self.stacked]


class ExpertNames(NamedTuple):
    """What a checkpoint calls the sparse block, and in it the three maps of an expert."""

    block: str
    gate: str
    up: str
    down: str


EXPERT_NAMES: Final[Mapping[str, ExpertNames]] = {
    "qwen": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}
"""By MoeSpec.layout."""


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Hugging Face tensor name → shape of every parameter, [out, in] for matrices, as a model that is not quantised has
    them. A tied head has no tensor of its own."""
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    for index in range(spec.num_layers):
        tensors |= {
            f"model.layers.{index}.{name}": shape for name, shape in layer_tensors(spec, index).items()
        }
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return tensors


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    """Those of one layer, named from the layer on."""
    hidden, head = spec.hidden_size, spec.head_dim
    tensors: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for one in layer_maps(spec, index):
        for name, out_size in zip(one.names, one.out_sizes, strict=True):
            tensors[f"{name}.weight"] = (out_size, one.in_size)
            if one.bias:
                tensors[f"{name}.bias"] = (out_size,)
    if spec.moe is not None and spec.moe.is_sparse(index):
        block = EXPERT_NAMES[spec.moe.layout].block
        tensors[f"{block}.gate.weight"] = (spec.moe.num_experts, hidden)
        if spec.moe.shared_gate:
            tensors[f"{block}.shared_expert_gate.weight"] = (1, hidden)
    if spec.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return tensors


def layer_maps(spec: ModelSpec, index: int) -> tuple[LinearMap, ...]:
    """Those of one layer, named from the layer on. The router is none, nor is a shared expert's gate."""
    hidden, head = spec.hidden_size, spec.head_dim
    queries, keys = spec.num_heads * head, spec.num_kv_heads * head
    attention = (
        LinearMap(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (queries, keys, keys),
            hidden,
            spec.qkv_bias,
        ),
        LinearMap(("self_attn.o_proj",), (hidden,), queries, spec.output_bias),
    )
    name, wide, bias = "mlp", spec.intermediate_size, spec.mlp_bias
    experts: tuple[LinearMap, ...] = ()
    if spec.moe is not None and spec.moe.is_sparse(index):
        experts = _expert_maps(spec.moe, hidden)
        wide, bias = spec.moe.shared_intermediate_size, False
        name = f"{EXPERT_NAMES[spec.moe.layout].block}.shared_expert"
        if not wide:
            return (*attention, *experts)
    return (
        *attention,
        *experts,
        LinearMap((f"{name}.gate_proj", f"{name}.up_proj"), (wide, wide), hidden, bias),
        LinearMap((f"{name}.down_proj",), (hidden,), wide, bias),
    )


def _expert_maps(moe: MoeSpec, hidden: int) -> tuple[LinearMap, LinearMap]:
    """Gate and up of all experts, and down."""
    names, wide, count = EXPERT_NAMES[moe.layout], moe.intermediate_size, moe.num_experts
    experts = [f"{names.block}.experts.{expert}" for expert in range(count)]
    halves = tuple(f"{name}.{half}" for name in experts for half in (names.gate, names.up))
    return (
        LinearMap(halves, (wide,) * (2 * count), hidden, bias=False, experts=count),
        LinearMap(
            tuple(f"{name}.{names.down}" for name in experts),
            (hidden,) * count,
            wide,
            bias=False,
            experts=count,
        ),
    )


def linear_maps(spec: ModelSpec) -> Iterator[LinearMap]:
    """All of the model, but for a tied head, which is the embedding."""
    for index in range(spec.num_layers):
        for one in layer_maps(spec, index):
            yield one._replace(names=tuple(f"model.layers.{index}.{name}" for name in one.names))
    if not spec.tie_word_embeddings:
        yield LinearMap(("lm_head",), (spec.vocab_size,), spec.hidden_size, bias=False)


def stored_tensors(spec: ModelSpec) -> dict[str, StoredTensor]:
    """Hugging Face tensor name → what a folder's files have under it: as expected_tensors, but that the weights of
    quantised maps are stored in the scheme's own tensors. ModelError where the scheme does not fit the model."""
    tensors = {name: StoredTensor((shape,), FLOATS) for name, shape in expected_tensors(spec).items()}
    if spec.quantization is None or isinstance(spec.quantization, GgufQuantization):
        return tensors
    for one in linear_maps(spec):
        scheme = spec.quantization.scheme_of(one.names)
        if scheme is None:
            continue
        for name, out_size in zip(one.names, one.out_sizes, strict=True):
            del tensors[f"{name}.weight"]
            for part, tensor in scheme.tensors(out_size, one.in_size).items():
                tensors[f"{name}.{part}"] = tensor
    return tensors


def num_parameters(spec: ModelSpec) -> int:
    """Numbers in all tensors together."""
    return sum(map(prod, expected_tensors(spec).values()))


def num_sparse_layers(spec: ModelSpec) -> int:
    """Layers with experts."""
    return sum(map(spec.is_sparse, range(spec.num_layers)))


def num_expert_parameters(spec: ModelSpec) -> int:
    """Numbers of one expert that is chosen from others, in one layer. 0 without such."""
    return 0 if spec.moe is None else 3 * spec.hidden_size * spec.moe.intermediate_size
