"""Experts in 8-bit floats, of every family and layout: against transformers with the numbers that they mean.

There every map is given what 8-bit activations mean, too. In float32 both sides differ by roundings of 1e-7, of which
one in some 1e5 moves a number to the next one of 8 bits: 1/16 of it, which is less than 1 % of one token's result of a
map of some 100 inputs. So nearly all elements agree to 1e-5, and layers and logits in norm to 3e-3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.engine.offline import LLM
from oneloop.engine.params import SamplingParams
from oneloop.errors import ModelError
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop_kernels.ops.moe.weights import Fp8Stack
from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION, AttentionRows, AttentionShape

E4M3 = torch.float8_e4m3fn
ROWS = 32
"""Of a block, that has 128 columns."""
NEARLY_ALL, IN_NORM = 1e-5, 3e-3
BOTH = 0.4
"""In norm, of what 8-bit weights and activations change in such a model: some tokens are sent to other experts."""
SIZES: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 96, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (
        transformers.MixtralConfig, transformers.MixtralForCausalLM,
        {"num_local_experts": 3, "intermediate_size": 160},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM,
        {
            "num_experts": 4, "moe_intermediate_size": 160, "shared_expert_intermediate_size": 96,
            "intermediate_size": 64,
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
        {
            "num_experts": 5, "moe_intermediate_size": 160, "mlp_only_layers": [0], "norm_topk_prob": True,
            "intermediate_size": 224,
        },
    ),
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def per_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(E4M3), "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def per_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(E4M3), "weight_scale": scale}


def per_block(weight: torch.Tensor, block_rows: int = ROWS) -> Tensors:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block_rows), -(-columns // 128))
    stored = torch.empty(rows, columns, dtype=E4M3)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            first = row * block_rows
            place = slice(first, first + block_rows), slice(column * 128, (column + 1) * 128)
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(E4M3)
    return {"weight": stored, "weight_scale_inv": scales}


def meaning(parts: Tensors, block_rows: int) -> torch.Tensor:
    weight = parts["weight"].float()
    if "weight_scale" in parts:
        return weight * parts["weight_scale"]
    factors = parts["weight_scale_inv"].repeat_interleave(block_rows, 0).repeat_interleave(128, 1)
    return weight * factors[: weight.shape[0], : weight.shape[1]]


def as_given(x: torch.Tensor, by_block: bool) -> torch.Tensor:
    """What a map of 8 bits makes of its input: a scale for each token, or for 128 of its numbers."""
    pieces = x.split(128, -1) if by_block else (x,)
    scales = [piece.abs().amax(-1, keepdim=True).clamp(min=448e-12) / 448 for piece in pieces]
    return torch.cat(
        [(piece / scale).to(E4M3).float() * scale for piece, scale in zip(pieces, scales, strict=True)], -1
    )


ROUTERS = ["re:.*(mlp|block_sparse_moe)\\.gate$", "re:.*shared_expert_gate$"]
CHANNELS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = {
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors", "ignore": ["lm_head", *ROUTERS],
            "config_groups": {"group_0": CHANNELS},
        },
        per_channel,
    ),
    "static": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ROUTERS}, per_tensor),
    "blocks": (
        {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [ROWS, 128],
            "modules_to_not_convert": [
                f"model.layers.{layer}.{name}"
                for layer in range(2)
                for name in ("mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "input_layernorm")
            ],
        },
        per_block,
    ),
}  # fmt: skip


def is_map(name: str) -> bool:
    """Whether a checkpoint's tensor is the weight of a linear map that is quantised."""
    module, _, part = name.rpartition(".")
    kept = ("gate", "shared_expert_gate", "embed_tokens", "lm_head")
    return part == "weight" and "norm" not in module and module.rsplit(".", 1)[-1] not in kept


def save(folder: Path, family: str) -> Path:
    """A plain checkpoint."""
    config_class, model_class, options = FAMILIES[family]
    sizes = SIZES if family == "qwen3_moe" else {k: v for k, v in SIZES.items() if k != "head_dim"}
    torch.manual_seed(5)
    model = model_class(config_class(**sizes, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> Tensors:
    return safetensors.torch.load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: Tensors, source: Path, **config: Any) -> Path:
    """A checkpoint of these tensors, with the config of another folder and some keys more."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def quantise(
    folder: Path,
    plain: Path,
    quantization: dict[str, Any],
    store: Callable[[torch.Tensor], Tensors],
    block_rows: int = ROWS,
) -> tuple[Path, Path]:
    """The quantised checkpoint, and one of the plain numbers that it means."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors_of(plain).items():
        if not is_map(name):
            stored[name] = meant[name] = tensor
            continue
        parts = store(tensor)
        stored |= {f"{name.removesuffix('.weight')}.{part}": one for part, one in parts.items()}
        meant[name] = meaning(parts, block_rows)
    return (
        rewrite(folder / "stored", stored, plain, quantization_config=quantization),
        rewrite(folder / "meant", meant, plain),
    )


def transformers_model(folder: Path, *, by_block: bool | None = None) -> Any:
    """by_block: how its maps' inputs are quantised; None: not at all."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if by_block is None:
        return model
    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.forward = _experts_forward(module, by_block)
        elif isinstance(module, torch.nn.Linear) and is_map(f"{name}.weight"):
            module.register_forward_pre_hook(lambda _module, inputs: (as_given(inputs[0], by_block),))
    return model


def _experts_forward(module: Any, by_block: bool) -> Callable[..., torch.Tensor]:
    def forward(hidden: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for token, (row, chosen) in enumerate(zip(as_given(hidden, by_block), ids.tolist(), strict=True)):
            for place, expert in enumerate(chosen):
                gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
                inner = as_given(torch.nn.functional.silu(gate) * up, by_block)
                out[token] += factors[token, place] * (module.down_proj[expert] @ inner)
        return out

    return forward


def check_distance(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    off = (ours - wanted).abs()
    assert off.quantile(0.8) <= NEARLY_ALL * wanted.abs().max()
    assert off.norm() <= IN_NORM * wanted.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_numbers_in_the_file(
    kit: Any, tmp_path: Path, caplog: Any, family: str, layout: str
) -> None:
    stored, meant = quantise(tmp_path, save(tmp_path / "plain", family), *LAYOUTS[layout])
    model = kit.load(stored)
    assert not caplog.records  # no tensor is called unused
    sparse = model.layers[1].sparse
    assert isinstance(sparse.experts.gate_up, Fp8Stack)
    assert isinstance(sparse.experts.down, Fp8Stack)
    assert sparse.experts.router.dtype == torch.float32
    ours = kit.our_logits(model)
    check_distance(ours, kit.expected_logits(transformers_model(meant, by_block=layout == "blocks")))
    plain = kit.expected_logits(transformers_model(tmp_path / "plain"))
    assert (ours - plain).norm() < BOTH * plain.norm()


def layer_inputs(truth: Any, token_ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer what it is given and what it makes of that."""
    with torch.no_grad():
        state = truth.model.embed_tokens(token_ids)
        angles = truth.model.rotary_emb(state[None], torch.arange(len(token_ids))[None])
        for layer in truth.model.layers:
            result = layer(state[None], attention_mask=None, position_embeddings=angles)[0]
            yield state, result
            state = result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer(kit: Any, tmp_path: Path, family: str, layout: str) -> None:
    """Each on the input that transformers' had, so that errors do not add up."""
    stored, meant = quantise(tmp_path, save(tmp_path / "plain", family), *LAYOUTS[layout])
    model, count = kit.load(stored), 19
    token_ids, positions = torch.arange(count) * 5 % 96, torch.arange(count)
    spec = model.spec
    kv = PagedKVCache(spec, 4, 8, dtype=model.dtype, device=kit.cpu)
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, 8, spec.head_dim**-0.5)
    rows = AttentionRows(
        num_scheduled=torch.tensor([count], dtype=torch.int32).numpy(),
        num_computed=torch.tensor([0], dtype=torch.int32).numpy(),
        num_single=0,
        block_tables=torch.arange(4)[None],
    )
    metadata = AttentionMetadata(
        num_tokens=count,
        slots=positions,
        plan=PAGED_ATTENTION.resolve(kit.cpu, model.dtype)(shape, rows, model.dtype),
    )
    rotary, _ = model.rotary.with_embedding(positions, token_ids, model.embedding.weight)
    truth = transformers_model(meant, by_block=layout == "blocks")
    for layer, (given, wanted) in zip(model.layers, layer_inputs(truth, token_ids), strict=True):
        state = given.clone()
        with torch.inference_mode():
            layer(state, rotary, kv, metadata)
        check_distance(state - given, wanted - given)


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_plain_experts_become_so_while_loading(
    kit: Any, tmp_path: Path, caplog: Any, family: str, way: str
) -> None:
    plain = save(tmp_path / "plain", family)
    loaded = load_model(resolve_model(str(plain), quantization=way), dtype=torch.float32, device=kit.cpu)
    assert not caplog.records
    store = per_channel if way == "fp8" else partial(per_block, block_rows=128)
    _, meant = quantise(tmp_path, plain, {}, store, 128)
    wanted = kit.expected_logits(transformers_model(meant, by_block=way == "fp8-block"))
    check_distance(kit.our_logits(loaded), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dummy_weights(kit: Any, tmp_path: Path, layout: str) -> None:
    stored, _ = quantise(tmp_path, save(tmp_path / "plain", "qwen2_moe"), *LAYOUTS[layout])
    first, second = (kit.load(stored, load_format="dummy") for _ in range(2))
    logits = kit.our_logits(first)
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(logits, kit.our_logits(second))
    values = first.layers[0].sparse.experts.down.values
    assert not torch.equal(values[0].float(), values[1].float())


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
def test_an_engine_serves_them(tiny_sparse_model: Path, way: str) -> None:
    """With their memory planned, on a CPU; the same prompt has the same answer."""
    settings = {"device": "cpu", "load_format": "dummy", "max_model_len": 64, "max_num_seqs": 4}
    with LLM(str(tiny_sparse_model), use_tqdm=False, quantization=way, **settings) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        first, second, again = llm.generate(["abc", "xyz and more", "abc"], greedy)
    assert len(first.outputs[0].token_ids) == len(second.outputs[0].token_ids) == 6
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_experts_may_be_left_alone(kit: Any, tmp_path: Path) -> None:
    """As a whole; attention is quantised all the same."""
    plain = save(tmp_path / "plain", "mixtral")
    quantization, store = LAYOUTS["static"]
    tensors = {
        name: parts if ".experts." in name or not is_map(name) else store(parts)["weight"]
        for name, parts in tensors_of(plain).items()
    }
    scales = {
        name.replace(".weight", ".weight_scale"): store(tensor)["weight_scale"]
        for name, tensor in tensors_of(plain).items()
        if is_map(name) and ".experts." not in name
    }
    left = [*quantization["ignored_layers"], "experts"]
    folder = rewrite(
        tmp_path / "model",
        tensors | scales,
        plain,
        quantization_config=quantization | {"ignored_layers": left},
    )
    model = kit.load(folder)
    assert model.layers[0].sparse.experts.gate_up.dtype == torch.float32
    assert model.layers[0].attention.qkv.stored.matrix.dtype == E4M3


W1, W2 = (f"model.layers.1.block_sparse_moe.experts.2.{name}" for name in ("w1", "w2"))
ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
HOSTILE: dict[str, tuple[str, Callable[[Tensors], Any], str, str]] = {
    "a scale is missing": ("blocks", lambda t: t.pop(f"{W1}.weight_scale_inv"), f"{W1}.weight_scale_inv", "missing"),
    "an expert is missing": ("static", lambda t: t.pop(f"{W2}.weight"), f"{W2}.weight", "missing"),
    "scales of other blocks": (
        "blocks", lambda t: t.update({f"{W2}.weight_scale_inv": torch.ones(6, 3)}), f"{W2}.weight_scale_inv",
        r"has shape \[6, 3\], the model needs \[6, 2\]",
    ),
    "a weight of another width": (
        "static", lambda t: t.update({f"{W1}.weight": torch.zeros(161, 192).to(E4M3)}), f"{W1}.weight", "has shape",
    ),
    "one plain expert among others": (
        "blocks", lambda t: t.update({f"{W1}.weight": torch.zeros(160, 192)}), f"{W1}.weight",
        "is of type F32; supported are F8_E4M3",
    ),
    "a scale that is no number": (
        "blocks", lambda t: t[f"{W2}.weight_scale_inv"][1].fill_(float("nan")), f"{W2}.weight_scale_inv",
        "no finite number",
    ),
    "an infinite scale": (
        "static", lambda t: t[f"{W1}.weight_scale"].fill_(float("inf")), f"{W1}.weight_scale", "no finite number",
    ),
    "a router of 8 bits": ("static", lambda t: t.update({ROUTER: t[ROUTER].to(E4M3)}), ROUTER, "is of type F8_E4M3"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_fit_is_refused_by_tensor(kit: Any, tmp_path: Path, name: str) -> None:
    layout, damage, item, message = HOSTILE[name]
    stored, _ = quantise(tmp_path, save(tmp_path / "plain", "mixtral"), *LAYOUTS[layout])
    tensors = tensors_of(stored)
    damage(tensors)
    rewrite(stored, tensors, stored)
    with pytest.raises(ModelError, match=message) as caught:
        kit.load(stored)
    assert caught.value.item == item
    assert str(stored) in str(caught.value)
