"""Experts in GGUF files: what the file means by transformers' model of the same numbers; what is missing, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from oneloop.errors import ModelError
from oneloop.formats.gguf import read_gguf
from oneloop.formats.gguf_spec import gguf_model_spec
from oneloop.loader import load
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.quant.plain import PlainWeight
from oneloop.worker.memory.sizes import weight_bytes
from oneloop_kernels.ops.fp8_linear.quantize import quantize_rows
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.weights import Fp8Stack
from oneloop_kernels.registry import prefer

FAMILIES = {"llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""GGUF's architecture → the tiny model's family."""
PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
"""transformers' name of a layer's tensor in memory → the file's."""
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PLAIN = ("norm", "gate_inp", ".bias")
"""What is in float32 in every file."""


def tiny_moe(kit: Any, arch: str, **options: Any) -> Any:
    dense = {"mlp_only_layers": []} if arch == "qwen3moe" else {}
    return kit.tiny_model(FAMILIES[arch], **(dense | options))


def in_file(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The file's name → the tensor, as llama.cpp's converter writes them."""
    found: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if name in OUTER:
            found[OUTER[name]] = array
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        if part == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"], found[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
        elif part == "mlp.shared_expert_gate.weight":
            found[f"blk.{layer}.{PARTS[part]}"] = array[0]
        else:
            if arch == "llama" and part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
                heads = (
                    model.config.num_attention_heads if ".q_" in part else model.config.num_key_value_heads
                )
                halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
                array = halves.swapaxes(1, 2).reshape(array.shape)
            found[f"blk.{layer}.{PARTS[part]}"] = array
    return found


def write(
    path: Path, model: Any, arch: str, kinds: dict[str, str] | None = None, *,
    keys: dict[str, Any] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """kinds: part of a tensor's name → its type, else F32. changes: tensor → array, or None; keys: of the metadata."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch != "llama":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch == "qwen3moe":
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (keys or {}).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"{arch}.{key}", value)
    for name, array in (in_file(model, arch) | changes).items():
        if array is None:
            continue
        kind = next((kind for part, kind in (kinds or {}).items() if f".{part}." in name), "F32")
        if any(part in name for part in _PLAIN):
            kind = "F32"
        stored = GGMLQuantizationType[kind]
        data = array if array.dtype == np.uint8 else gguf.quants.quantize(np.ascontiguousarray(array), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_logits_equal_transformers(kit: Any, tmp_path: Path, arch: str, kind: str) -> None:
    """Its weights are exact in bfloat16, and as good as that in float16."""
    model = tiny_moe(kit, arch)
    path = write(tmp_path / "m.gguf", model, arch, dict.fromkeys(EXPERT_PARTS, kind))
    torch.testing.assert_close(
        kit.our_logits(kit.load(path)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


EXPERT_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
MIXES = {
    "q4_0": dict.fromkeys(EXPERT_PARTS, "Q4_0"),
    "q8_0": dict.fromkeys(EXPERT_PARTS, "Q8_0"),
    "down in more bits": {"ffn_gate_exps": "Q4_1", "ffn_up_exps": "Q4_1", "ffn_down_exps": "Q8_0"},
    "down in plain numbers": {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "F16"},
    "gate and up differ": {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q5_0"},
    "a type that is never kept": dict.fromkeys(EXPERT_PARTS, "MXFP4"),
}


def round_experts(model: Any, mix: dict[str, str]) -> None:
    """transformers' experts become what the file says."""
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            gate, up = experts.gate_up_proj.chunk(2, 1)
            for part, weights in zip(EXPERT_PARTS, (gate, up, experts.down_proj), strict=True):
                stored = GGMLQuantizationType[mix[part]]
                data = gguf.quants.quantize(np.ascontiguousarray(weights.numpy()), stored)
                weights.copy_(torch.from_numpy(gguf.quants.dequantize(data, stored).reshape(weights.shape)))


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("mix", MIXES)
def test_quantised_experts(kit: Any, tmp_path: Path, arch: str, mix: str) -> None:
    model = tiny_moe(kit, arch)
    path = write(tmp_path / "m.gguf", model, arch, MIXES[mix])
    round_experts(model, MIXES[mix])
    torch.testing.assert_close(
        kit.our_logits(kit.load(path)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


def packed_maps(model: Any) -> list[PackedStack]:
    """Of experts, those that stay packed."""
    maps = (one for layer in model.layers for one in layer.sparse.experts[1:3])
    return [one for one in maps if isinstance(one, PackedStack)]


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize(
    ("mix", "kept"),
    [
        ("q4_0", 4),
        ("q8_0", 4),
        ("down in more bits", 4),
        ("down in plain numbers", 2),
        ("gate and up differ", 2),
    ],
)
def test_types_stay_as_they_are_where_there_are_kernels(
    kit: Any, tmp_path: Path, arch: str, mix: str, kept: int
) -> None:
    """As on a GPU, by kernels in the interpreter: layer by layer what the file means, and as much memory as planned."""
    model = tiny_moe(kit, arch)
    path = write(tmp_path / "m.gguf", model, arch, MIXES[mix])
    round_experts(model, MIXES[mix])
    with prefer("triton"):
        ours = kit.load(path, torch.float16)
        errors = kit.layer_errors(ours, model)
        logits = kit.our_logits(ours).float()
    assert max(errors) < 2e-3
    wanted = kit.expected_logits(model)
    assert float((logits - wanted).norm() / wanted.norm()) < 5e-3
    assert torch.equal(logits.argmax(1), wanted.argmax(1))
    stacks = packed_maps(ours)
    assert len(stacks) == kept
    spec = resolve_model(str(path)).spec
    plain = sum(
        target.nbytes for target in ours.weight_targets().values() if isinstance(target, torch.Tensor)
    )
    shared = [one for layer in ours.layers if (one := layer.sparse.shared) is not None]
    assert all(isinstance(one.gate_up.stored, PlainWeight) for one in shared)
    assert plain + sum(one.num_bytes for one in stacks) == weight_bytes(spec, 2, on_gpu=True)


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q5_K", "Q5_K"), ("Q4_K", "Q6_K", "Q4_K")]
)
def test_types_with_k(kit: Any, tmp_path: Path, kinds: tuple[str, str, str]) -> None:
    """Blocks of random numbers, which the gguf package dequantises for transformers' model."""
    model = tiny_moe(
        kit, "qwen3moe", hidden_size=256, moe_intermediate_size=256, num_hidden_layers=1, mlp_only_layers=[]
    )
    blocks = {}
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        targets = (*experts.gate_up_proj.chunk(2, 1), experts.down_proj)
        for seed, (part, kind, target) in enumerate(zip(EXPERT_PARTS, kinds, targets, strict=True)):
            stored = random_blocks(kind, target.shape, seed)
            blocks[f"blk.0.{part}.weight"] = stored
            meant = gguf.quants.dequantize(stored.reshape(-1, stored.shape[-1]), GGMLQuantizationType[kind])
            target.copy_(torch.from_numpy(meant.reshape(target.shape)))
    path = write(
        tmp_path / "m.gguf", model, "qwen3moe", dict(zip(EXPERT_PARTS, kinds, strict=True)), **blocks
    )
    torch.testing.assert_close(
        kit.our_logits(kit.load(path)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )
    with prefer("triton"):
        ours = kit.load(path, torch.float16)
        assert max(kit.layer_errors(ours, model)) < 2e-3
    assert len(packed_maps(ours)) == (2 if kinds[0] == kinds[1] else 1)


def random_blocks(kind: str, shape: torch.Size, seed: int) -> np.ndarray:
    """Any numbers, and small scales."""
    size, num_bytes = gguf.constants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape.numel() // size, num_bytes), dtype=np.uint8)
    for place in (208,) if kind == "Q6_K" else (0, 2):
        factor = 2e-5 if kind == "Q6_K" else 2e-4
        scales = generator.uniform(factor / 2, factor, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_a_file_that_is_quantised_to_8_bits_while_it_is_loaded(kit: Any, tmp_path: Path, kind: str) -> None:
    model = tiny_moe(kit, "qwen3moe")
    mix = dict.fromkeys(EXPERT_PARTS, kind)
    path = write(tmp_path / "m.gguf", model, "qwen3moe", mix)
    round_experts(model, mix)
    ours, plain = (
        load_model(
            resolve_model(str(path), quantization=way), dtype=torch.float32, device=torch.device("cpu")
        )
        for way in ("fp8", None)
    )
    num_stacks = 0
    for layer, plain_layer in zip(ours.layers, plain.layers, strict=True):
        for stack, wide in zip(layer.sparse.experts[1:3], plain_layer.sparse.experts[1:3], strict=True):
            assert isinstance(stack, Fp8Stack)
            for values, scales, expert in zip(*stack, wide, strict=True):
                wanted, wanted_scales = quantize_rows(expert)
                assert torch.equal(values.float(), wanted.float())
                assert torch.equal(scales, wanted_scales)
            num_stacks += 1
    assert num_stacks == 2 * len(ours.layers)
    assert max(kit.layer_errors(ours, model)) > 1e-3


def test_dummy_weights(kit: Any, tmp_path: Path) -> None:
    """Of every kind that is kept; finite, and the same twice."""
    model = tiny_moe(kit, "qwen2moe")
    path = write(tmp_path / "m.gguf", model, "qwen2moe", MIXES["down in more bits"])
    with prefer("triton"):
        logits = [kit.our_logits(kit.load(path, torch.float16, load_format="dummy")) for _ in range(2)]
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


def test_what_the_keys_mean(kit: Any, tmp_path: Path) -> None:
    """Where a file does not tell widths or the norm of the weights, they are what llama.cpp takes them for."""
    model = tiny_moe(kit, "qwen2moe", intermediate_size=64)
    moe = resolve_model(str(write(tmp_path / "a.gguf", model, "qwen2moe"))).spec.moe
    assert (moe.num_experts, moe.top_k, moe.intermediate_size, moe.renormalised) == (5, 2, 32, False)
    assert (moe.shared_intermediate_size, moe.shared_gate, moe.layout) == (48, True, "qwen")
    path = write(tmp_path / "b.gguf", model, "qwen2moe", keys={"expert_weights_norm": True})
    assert resolve_model(str(path)).spec.moe.renormalised
    mixtral = resolve_model(str(write(tmp_path / "c.gguf", tiny_moe(kit, "llama"), "llama"))).spec
    assert mixtral.architecture == "MixtralForCausalLM"
    assert (mixtral.moe.intermediate_size, mixtral.moe.renormalised, mixtral.moe.layout) == (
        96,
        True,
        "mixtral",
    )
    assert resolve_model(
        str(write(tmp_path / "d.gguf", tiny_moe(kit, "qwen3moe"), "qwen3moe"))
    ).spec.moe.renormalised


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("Q4_0", "bfloat16"), ("F32", "float32")])
def test_the_type_of_a_model_is_not_its_routers(kit: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    """Those are in float32, and the first matrices in files that Hugging Face's order was kept for."""
    model = tiny_moe(kit, "qwen3moe")
    kinds = dict.fromkeys((*EXPERT_PARTS, "attn_q", "attn_k", "attn_v", "attn_output"), kind)
    file = read_gguf(write(tmp_path / "m.gguf", model, "qwen3moe", kinds))
    first = sorted(file.tensors, key=lambda name: "ffn_gate_inp" not in name)
    assert gguf_model_spec(replace(file, tensors={name: file.tensors[name] for name in first})).dtype == dtype


UP = "blk.1.ffn_up_exps.weight"
DAMAGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a map missing": ({UP: None}, UP, "missing"),
    "no router": ({"blk.0.ffn_gate_inp.weight": None}, "blk.0.ffn_gate_inp.weight", "missing"),
    "an expert missing": ({UP: np.zeros((5, 32, 64), np.float32)}, UP, r"\[5, 32, 64\], the model needs \[6, 32, 64\]"),
    "an expert too many": ({UP: np.zeros((7, 32, 64), np.float32)}, UP, r"needs \[6, 32, 64\]"),
    "another width": ({UP: np.zeros((6, 48, 64), np.float32)}, UP, r"needs \[6, 32, 64\]"),
    "one expert's matrix": ({UP: np.zeros((32, 64), np.float32)}, UP, r"needs \[6, 32, 64\]"),
    "experts in tensors of their own": (
        {UP: None, "blk.1.ffn_up.0.weight": np.zeros((32, 64), np.float32)}, UP, "convert the model again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused(kit: Any, tmp_path: Path, name: str) -> None:
    changes, item, message = DAMAGES[name]
    path = write(tmp_path / "m.gguf", tiny_moe(kit, "qwen3moe"), "qwen3moe", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(str(path))
    assert caught.value.item == item


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen3moe"])
def test_an_architecture_of_experts_needs_some(kit: Any, tmp_path: Path, arch: str) -> None:
    path = write(tmp_path / "m.gguf", tiny_moe(kit, arch), arch, keys={"expert_count": 0})
    with pytest.raises(ModelError, match="missing") as caught:
        resolve_model(str(path))
    assert caught.value.item == f"{arch}.expert_count"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("packed", [False, True])
def test_scales_that_are_no_numbers(
    kit: Any, tmp_path: Path, monkeypatch: Any, kind: str, value: float, packed: bool
) -> None:
    """Of one block of one expert; where blocks stay as they are, and where they are dequantised."""
    monkeypatch.setattr(load, "loading_threads", lambda _device: 3)
    options = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "mlp_only_layers": [],
    }
    model, shape = kit.tiny_model("qwen3_moe", **options), torch.Size((6, 256, 256))
    names = (f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in EXPERT_PARTS)
    blocks = {name: random_blocks(kind, shape, seed) for seed, name in enumerate(names)}
    size, num_bytes = gguf.constants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    place = {"Q6_K": 208, "Q4_1": 2}.get(kind, 0)
    damaged = blocks[UP].reshape(6, 256, 256 // size, num_bytes)[4, 7, -1]
    damaged[place : place + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    path = write(tmp_path / "m.gguf", model, "qwen3moe", dict.fromkeys(EXPERT_PARTS, kind), **blocks)
    with prefer("triton" if packed else "reference"), pytest.raises(ModelError) as caught:
        kit.load(path, torch.float16 if packed else torch.float32)
    assert (caught.value.file, caught.value.item) == (str(path), UP)
    number = "float16" if packed else "float32"
    assert f"expert 4 holds what is no finite number as {number}" in str(caught.value)
