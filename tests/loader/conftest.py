"""Tiny checkpoints saved by transformers, and logits of what our loader makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.models.base import Model
from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION, AttentionRows, AttentionShape

CPU = torch.device("cpu")
TOKEN_IDS = torch.tensor([5, 90, 17, 3, 44, 8, 71])
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
}


def tiny_model(family: str, **options: Any) -> Any:
    """transformers' model with random weights that are exact in bfloat16, norms and biases included."""
    config_class, model_class = CLASSES[family]
    extra: dict[str, Any] = {"head_dim": 16} if family == "qwen3" else {}
    if family in EXPERTS:
        extra = EXPERTS[family]
    model = model_class(config_class(**(SIZES | extra | options))).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
            parameter.copy_(parameter.bfloat16())
    return model


def expected_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKEN_IDS[None]).logits[0]


def first_step(model: Model, narrow: bool = False) -> tuple[PagedKVCache, AttentionMetadata]:
    """A cache, and the step that computes TOKEN_IDS. narrow: keys and values are kept in 8 bits."""
    spec, count = model.spec, len(TOKEN_IDS)
    kv = PagedKVCache(spec, 4, 4, dtype=model.dtype, device=CPU, narrow=narrow)
    table = torch.arange(4)
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, 4, spec.head_dim**-0.5)
    rows = AttentionRows(
        num_scheduled=np.array([count], np.int32),
        num_computed=np.array([0], np.int32),
        num_single=0,
        block_tables=table[None],
    )
    plan = PAGED_ATTENTION.resolve(CPU, model.dtype)(shape, rows, model.dtype)
    return kv, AttentionMetadata(num_tokens=count, slots=torch.arange(count), plan=plan)


def our_logits(model: Model, narrow: bool = False) -> torch.Tensor:
    """Logits of TOKEN_IDS in one step. narrow: keys and values are kept in 8 bits."""
    kv, metadata = first_step(model, narrow)
    with torch.inference_mode():
        return model.compute_logits(model.forward(TOKEN_IDS, torch.arange(len(TOKEN_IDS)), kv, metadata))


def layer_errors(model: Model, truth: Any) -> list[float]:
    """Of each layer, given what transformers' one is given: the largest distance of a token's hidden state from its,
    relative to that state's norm. Tokens whose experts hang on a rounding in a type of 16 bits are left out."""
    kv, metadata = first_step(model)
    positions, errors = torch.arange(len(TOKEN_IDS)), []
    with torch.inference_mode():
        rotary, _ = model.rotary.with_embedding(positions, TOKEN_IDS, model.embedding.weight)  # type: ignore[attr-defined]
        state = truth.model.embed_tokens(TOKEN_IDS)
        angles = truth.model.rotary_emb(state[None], positions[None])
        for layer, expected_layer in zip(model.layers, truth.model.layers, strict=True):  # type: ignore[attr-defined]
            seen: list[torch.Tensor] = []
            hook = expected_layer.mlp.gate.register_forward_hook(
                lambda _module, _inputs, outputs, seen=seen: seen.append(outputs[0])
            )
            expected = expected_layer(state[None], attention_mask=None, position_embeddings=angles)[0]
            hook.remove()
            actual = state.to(model.dtype)
            layer(actual, rotary, kv, metadata)
            top_k = model.spec.moe.top_k  # type: ignore[union-attr]
            ordered = seen[0].sort(descending=True).values
            sure = ordered[:, top_k - 1] - ordered[:, top_k] > 0.02 * seen[0].square().mean().sqrt()
            assert sure.float().mean() > 0.5
            distances = (actual.float() - expected).norm(dim=1) / expected.norm(dim=1)
            errors.append(float(distances[sure].max()))
            state = expected
    return errors


def load(path: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    source = resolve_model(str(path), load_format=options.get("load_format", "auto"))
    return load_model(source, dtype=dtype, device=CPU, **options)


def save(model: Any, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """config.json and safetensors as transformers writes them; the model keeps its weights rounded to dtype.

    The model itself stays in float32: converting it would round its rotary frequencies too.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(folder, **options)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Replace or (None) drop keys of a JSON file."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


class Kit:
    """The functions above, for tests that cannot import this file."""

    cpu = CPU
    sizes = SIZES
    tiny_model = staticmethod(tiny_model)
    expected_logits = staticmethod(expected_logits)
    our_logits = staticmethod(our_logits)
    layer_errors = staticmethod(layer_errors)
    token_ids = TOKEN_IDS
    load = staticmethod(load)
    save = staticmethod(save)
    edit_json = staticmethod(edit_json)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


class Looks(TorchFunctionMode):
    """Counts what waits for the device, were it a GPU: looks at numbers, and uploads of some."""

    _ASKED = (
        torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.item,
        torch.Tensor.tolist, torch.Tensor.cpu, torch.equal, torch.allclose, torch.nonzero, torch.tensor,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._ASKED:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def looks() -> type[Looks]:
    return Looks


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Factory: family, options → transformers' model and the folder it was saved in."""

    def build(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Path]:
        shard = options.pop("max_shard_size", None)
        model = tiny_model(family, **options)
        saved = {"max_shard_size": shard} if shard else {}
        return model, save(model, tmp_path / "model", dtype, **saved)

    return build
