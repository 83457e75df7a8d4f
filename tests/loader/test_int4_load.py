"""Checkpoints of 4 bits in every layout, written here by the letter of the formats: logits of what they mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from oneloop.engine.offline import LLM
from oneloop.engine.params import SamplingParams
from oneloop.errors import ModelError
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.models.decoder import Decoder
from oneloop.models.registry import build_model
from oneloop.quant.int4 import Int4Weight
from oneloop.quant.packed import Packed, WrittenOut
from oneloop.worker.memory.sizes import weight_bytes
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.registry import prefer

CPU = torch.device("cpu")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that lies in bits 0–3, 4–7, … of a word."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Quantized:
    """A weight of so many outputs and inputs: numbers [out, in], scales and zeros [out, groups], a group per input."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def meaning(self) -> torch.Tensor:
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return (self.numbers - zeros).float() * scales.float()


def quantized(
    out_size: int, in_size: int, size: int, *, symmetric: bool, shuffled: bool, seed: int, order: int = 0
) -> Quantized:
    """order: another one for shuffled inputs of that many."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-in_size // size)
    groups = torch.arange(in_size) // size
    if shuffled:
        groups = groups[torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size + order))]
    zeros = torch.randint(4, 12, (out_size, num_groups), generator=generator)
    return Quantized(
        torch.randint(0, 16, (out_size, in_size), generator=generator),
        (torch.rand(out_size, num_groups, generator=generator) * 0.02 + 0.01).half(),
        torch.full_like(zeros, 8) if symmetric else zeros,
        groups,
    )


def packed(
    numbers: torch.Tensor, dim: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
) -> torch.Tensor:
    """Eight neighbours of a dimension in an int32, the first of `order` in its lowest bits."""
    moved = numbers.movedim(dim, -1)
    missing = -moved.shape[-1] % 8
    eights = torch.nn.functional.pad(moved, (0, missing)).unflatten(-1, (-1, 8))
    words = sum(eights[..., column].long() << (4 * place) for place, column in enumerate(order))
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def awq(q: Quantized) -> Tensors:
    return {
        "qweight": packed(q.numbers.T, 1, AWQ_ORDER),
        "qzeros": packed(q.zeros.T, 1, AWQ_ORDER),
        "scales": q.scales.T.contiguous(),
    }


def gptq(q: Quantized, *, less: int) -> Tensors:
    return {
        "qweight": packed(q.numbers.T, 0),
        "qzeros": packed(q.zeros.T - less, 1),
        "scales": q.scales.T.contiguous(),
        "g_idx": q.groups.to(torch.int32),
    }


def compressed(q: Quantized, *, zeros: bool, ordered: bool) -> Tensors:
    tensors = {
        "weight_packed": packed(q.numbers, 1),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor(q.numbers.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = packed(q.zeros, 0)
    if ordered:
        tensors["weight_g_idx"] = q.groups.to(torch.int32)
    return tensors


@dataclass(frozen=True)
class Layout:
    """quantization_config, the writer, and how its numbers are."""

    config: dict[str, Any]
    write: Callable[[Quantized], Tensors]
    group_size: int = 32
    symmetric: bool = False
    shuffled: bool = False


def awq_config(size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}


def gptq_config(size: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": False, "desc_act": False, **changes}


def group_config(**weights: Any) -> dict[str, Any]:
    kind = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    entry = {"targets": ["Linear"], "weights": kind, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": entry},
    }  # fmt: skip


LAYOUTS = {
    "awq": Layout(awq_config(32), awq),
    "awq, whole rows": Layout(awq_config(-1), awq, -1),
    "gptq": Layout(gptq_config(32), lambda q: gptq(q, less=1)),
    "gptq, symmetric": Layout(gptq_config(32, sym=True), lambda q: gptq(q, less=1), symmetric=True),
    "gptq, groups of 16": Layout(gptq_config(16), lambda q: gptq(q, less=1), 16),
    "gptq, second format": Layout(gptq_config(32, checkpoint_format="gptq_v2"), lambda q: gptq(q, less=0)),
    "gptq, by activation": Layout(gptq_config(32, desc_act=True), lambda q: gptq(q, less=1), shuffled=True),
    "compressed": Layout(group_config(), lambda q: compressed(q, zeros=False, ordered=False), symmetric=True),
    "compressed, zeros": Layout(
        group_config(symmetric=False), lambda q: compressed(q, zeros=True, ordered=False)
    ),
    "compressed, by activation": Layout(
        group_config(actorder="group"), lambda q: compressed(q, zeros=False, ordered=True), symmetric=True,
        shuffled=True,
    ),
    "compressed, per channel": Layout(
        group_config(strategy="channel", group_size=None), lambda q: compressed(q, zeros=False, ordered=False), -1,
        symmetric=True,
    ),
}  # fmt: skip


def write(folder: Path, model: Any, layout: Layout, **changes: Any) -> Path:
    """A checkpoint whose weights become the model's. changes: name → another tensor."""
    tensors = dict(model.state_dict())
    for index, (name, module) in enumerate(model.model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        out_size, in_size = module.weight.shape
        size = in_size if layout.group_size == -1 else layout.group_size
        q = quantized(
            out_size, in_size, size, symmetric=layout.symmetric, shuffled=layout.shuffled, seed=index
        )
        del tensors[f"model.{name}.weight"]
        tensors |= {f"model.{name}.{part}": tensor for part, tensor in layout.write(q).items()}
        with torch.no_grad():
            module.weight.copy_(q.meaning())
    folder.mkdir()
    tensors |= changes
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {
        "architectures": ["LlamaForCausalLM"], "quantization_config": layout.config
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored(model: Decoder, *, shared: bool = False) -> list[Int4Weight]:
    """Of all quantised maps. shared: of a model whose layers all have a shared expert."""
    found = []
    for layer in model.layers:
        mlp = layer.sparse.shared if shared else layer.mlp  # type: ignore[union-attr]
        found += [
            one.stored
            for one in (layer.attention.qkv, layer.attention.output, mlp.gate_up, mlp.down)  # type: ignore[union-attr]
        ]
    assert all(isinstance(one, Int4Weight) for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", LAYOUTS)
def test_on_a_cpu_weights_are_what_they_mean(kit: Any, tmp_path: Path, name: str) -> None:
    model = kit.tiny_model("llama", attention_bias=True)
    ours = kit.load(write(tmp_path / "model", model, LAYOUTS[name]))
    assert all(isinstance(one.kept, WrittenOut) for one in stored(ours))
    torch.testing.assert_close(kit.our_logits(ours), kit.expected_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights(kit: Any, tmp_path: Path, caplog: Any, name: str) -> None:
    """As on a GPU, by kernels in the interpreter; scales are float16's, and so is the model."""
    model = kit.tiny_model("llama", attention_bias=True)
    folder = write(tmp_path / "model", model, LAYOUTS[name])
    with prefer("triton"):
        ours = kit.load(folder, torch.float16)
        logits = kit.our_logits(ours).float()
    wanted = kit.expected_logits(model)
    assert float((logits - wanted).norm() / wanted.norm()) < 3e-3
    kept = [one.kept for one in stored(ours)]
    assert all(isinstance(one, Packed) for one in kept)
    spec = resolve_model(str(folder)).spec
    plain = sum(t.nbytes for t in ours.weight_targets().values() if isinstance(t, torch.Tensor))
    assert weight_bytes(spec, 2, on_gpu=True) == plain + sum(one.num_bytes for one in kept)  # type: ignore[attr-defined]
    assert not [
        record for record in caplog.records if "not used" in record.message and "shape" not in record.message
    ]


def test_groups_without_a_kernel_are_written_out(kit: Any, tmp_path: Path) -> None:
    layout = Layout(gptq_config(48), lambda q: gptq(q, less=1), 48)
    model = kit.tiny_model("llama")
    folder = write(tmp_path / "model", model, layout)
    with prefer("triton"):
        ours = kit.load(folder, torch.float16)
    kinds = {type(one.kept) for one in stored(ours)}
    assert kinds == {WrittenOut}


def test_parts_in_orders_of_their_own(kit: Any, tmp_path: Path) -> None:
    """Queries' columns are ordered otherwise than keys' and values': they are computed one after the other."""
    layout = LAYOUTS["gptq, by activation"]
    model = kit.tiny_model("llama", attention_bias=True)
    q = quantized(64, 64, 32, symmetric=False, shuffled=False, seed=77)
    name = "model.layers.0.self_attn.q_proj"
    folder = write(
        tmp_path / "model",
        model,
        layout,
        **{f"{name}.{part}": tensor for part, tensor in layout.write(q).items()},
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.copy_(q.meaning())
    with prefer("triton"):
        ours = kit.load(folder, torch.float16)
        logits = kit.our_logits(ours).float()
    wanted = kit.expected_logits(model)
    assert float((logits - wanted).norm() / wanted.norm()) < 3e-3


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_load_looks_at_its_numbers_once(
    kit: Any, looks: Any, tmp_path: Path, name: str, packed: bool
) -> None:
    """However many tensors there are: each look waits for the device. Only columns of an order of their own are looked
    at where parts are packed, as those that are in the same one are packed together: q, k and v, gate and up.
    """
    folder = write(tmp_path / "model", kit.tiny_model("llama", attention_bias=True), LAYOUTS[name])
    joined = 3 * 2 if packed and LAYOUTS[name].shuffled else 0
    with prefer("triton" if packed else "reference"), looks() as seen:
        kit.load(folder, torch.float16 if packed else torch.float32)
    assert seen.seen == ["equal"] * joined + ["tolist"]
    with looks() as seen:
        kit.load(folder, load_format="dummy")
    assert seen.seen == ["tolist"]


def test_groups_of_unequal_sizes_are_refused(kit: Any, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.g_idx"
    model = kit.tiny_model("llama")
    groups = torch.zeros(96, dtype=torch.int32)
    folder = write(tmp_path / "model", model, LAYOUTS["gptq, by activation"], **{name: groups})
    with pytest.raises(ModelError, match="groups must have 32 inputs each") as caught:
        kit.load(folder)
    assert caught.value.item == name


@pytest.mark.parametrize("name", LAYOUTS)
def test_dummy_weights_of_every_layout(kit: Any, tmp_path: Path, name: str) -> None:
    spec = resolve_model(str(write(tmp_path / "model", kit.tiny_model("llama"), LAYOUTS[name]))).spec
    first, second = (build_model(spec, torch.float32, CPU) for _ in range(2))
    for model in (first, second):
        fill_dummy_weights(model.weight_targets(), seed=1)
    logits = kit.our_logits(first)
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(logits, kit.our_logits(second))


EXPERT_PARTS = {"qwen": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
PLAIN = ("mlp.gate", "shared_expert_gate", "lm_head")
"""Modules of a model with experts that no checkpoint quantises."""


def write_experts(folder: Path, family: str, model: Any, layout: Layout, **changes: Any) -> Path:
    """As write, of a model with experts. changes: name → another tensor, or None; "ignored": modules left alone."""
    ignored = changes.pop("ignored", ())
    size_of = {-1: None}.get(layout.group_size, layout.group_size)
    tensors: Tensors = {}
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    for index, (name, parameter) in enumerate(model.named_parameters()):
        name = name.replace(".mlp.gate.", f".{block}.gate.")
        module = name.removesuffix(".weight")
        if ".experts." in name:
            stacks = parameter.detach().chunk(2, 1) if "gate_up" in name else (parameter.detach(),)
            parts = EXPERT_PARTS["mixtral" if family == "mixtral" else "qwen"]
            for stack, part in zip(stacks, parts[:2] if "gate_up" in name else parts[2:], strict=True):
                for expert, weight in enumerate(stack):
                    one = f"{name.split('.mlp.')[0]}.{block}.experts.{expert}.{part}"
                    tensors |= quantized_module(
                        one, weight, layout, size_of, seed=1000 * index + expert, order=expert
                    )
        elif parameter.dim() == 2 and "embed" not in name and not module.endswith((*PLAIN, f"{block}.gate")):
            tensors |= quantized_module(module, parameter, layout, size_of, seed=index, order=0)
        else:
            tensors[name] = parameter.detach()
    folder.mkdir()
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = layout.config | {"modules_to_not_convert": ["gate", "shared_expert_gate", *ignored]}
    if layout.config["quant_method"] == "compressed-tensors":
        quantization = layout.config | {"ignore": ["lm_head", r"re:.*\.(gate|shared_expert_gate)$", *ignored]}
    architecture = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}[family]
    config = json.loads(model.config.to_json_string()) | {
        "architectures": [f"{architecture}ForCausalLM"], "quantization_config": quantization
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized_module(
    name: str, weight: torch.Tensor, layout: Layout, size: int | None, *, seed: int, order: int
) -> Tensors:
    """Tensors of a module; the weight becomes what they mean."""
    size = size or weight.shape[1]
    kind = {"symmetric": layout.symmetric, "shuffled": layout.shuffled}
    q = quantized(*weight.shape, size, **kind, seed=seed, order=order)
    with torch.no_grad():
        weight.copy_(q.meaning())
    return {f"{name}.{part}": tensor for part, tensor in layout.write(q).items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_on_a_cpu(kit: Any, tmp_path: Path, family: str, name: str) -> None:
    model = kit.tiny_model(family)
    ours = kit.load(write_experts(tmp_path / "model", family, model, LAYOUTS[name]))
    torch.testing.assert_close(kit.our_logits(ours), kit.expected_logits(model), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_that_stay_packed(kit: Any, tmp_path: Path, name: str) -> None:
    """As on a GPU, by kernels in the interpreter: layer by layer what the checkpoint means, and as much memory as
    planned."""
    model = kit.tiny_model("qwen2_moe")
    folder = write_experts(tmp_path / "model", "qwen2_moe", model, LAYOUTS[name])
    with prefer("triton"):
        ours = kit.load(folder, torch.float16)
        errors = kit.layer_errors(ours, model)
        logits = kit.our_logits(ours).float()
    assert max(errors) < 2e-3
    assert torch.equal(logits.argmax(1), kit.expected_logits(model).argmax(1))
    stacks = [one for layer in ours.layers for one in layer.sparse.experts[1:3]]
    assert all(isinstance(one, PackedStack) for one in stacks)
    kept = stored(ours, shared=True)
    plain = sum(t.nbytes for t in ours.weight_targets().values() if isinstance(t, torch.Tensor))
    total = plain + sum(one.num_bytes for one in stacks) + sum(one.kept.num_bytes for one in kept)  # type: ignore[union-attr]
    assert total == weight_bytes(resolve_model(str(folder)).spec, 2, on_gpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["awq", "gptq", "gptq, by activation", "compressed, zeros"])
def test_experts_on_a_gpu(kit: Any, tmp_path: Path, name: str) -> None:
    """Packed there as here, and what transformers computes of the same numbers, but for experts that hang on a bit."""
    model = kit.tiny_model("qwen2_moe")
    folder = write_experts(tmp_path / "model", "qwen2_moe", model, LAYOUTS[name])
    device = torch.device("cuda")
    on_gpu = load_model(resolve_model(str(folder)), dtype=torch.float16, device=device)
    on_cpu = kit.load(folder, torch.float16)
    for one, other, truth in zip(on_gpu.layers, on_cpu.layers, model.model.layers, strict=True):  # type: ignore[attr-defined]
        for there, here in zip(one.sparse.experts[1:3], other.sparse.experts[1:3], strict=True):
            assert isinstance(there, PackedStack)
            assert all(torch.equal(there.plain(expert).cpu(), plain) for expert, plain in enumerate(here))
        for num_tokens in (1, 20, 100):
            x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(num_tokens))
            actual = x.to(device, torch.float16)
            with torch.inference_mode():
                one.sparse(actual, norm=one.mlp_norm, slots=torch.arange(num_tokens, device=device))
                wanted = x + truth.mlp(truth.post_attention_layernorm(x)[None])[0].view_as(x)
            errors = (actual.float().cpu() - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert errors.quantile(0.8) < 3e-3


def test_experts_in_groups_without_a_kernel_are_written_out(kit: Any, tmp_path: Path) -> None:
    layout = Layout(gptq_config(48), lambda q: gptq(q, less=1), 48)
    model = kit.tiny_model("mixtral", hidden_size=96)
    folder = write_experts(tmp_path / "model", "mixtral", model, layout)
    with prefer("triton"):
        ours = kit.load(folder, torch.float16)
        assert max(kit.layer_errors(ours, model)) < 2e-3
    assert all(isinstance(one, torch.Tensor) for layer in ours.layers for one in layer.sparse.experts[1:3])


def test_an_engine_generates_what_transformers_does(
    kit: Any, tmp_path: Path, tiny_sparse_model: Path
) -> None:
    """Greedily, of several prompts together, on a CPU in float32."""
    vocabulary = json.loads((tiny_sparse_model / "config.json").read_text())["vocab_size"]
    model = kit.tiny_model("qwen3_moe", vocab_size=vocabulary)
    folder = write_experts(tmp_path / "model", "qwen3_moe", model, LAYOUTS["gptq, by activation"])
    for file in tiny_sparse_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    prompts = [[5, 17, 3, 44], [8, 71, 9, 12, 30, 2, 64]]
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
    with LLM(str(folder), use_tqdm=False, **settings) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]


NAME = "model.layers.1.mlp.experts.4.up_proj"
PLAIN_EXPERT = dict.fromkeys(f"{NAME}.{part}" for part in ("qweight", "qzeros", "scales")) | {
    f"{NAME}.weight": torch.zeros(32, 64)
}
INTS: Any = {"dtype": torch.int32}
HOSTILE: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "an expert missing": ("gptq", {f"{NAME}.qweight": None}, f"{NAME}.qweight", "missing"),
    "an expert in plain numbers": (
        "awq", PLAIN_EXPERT,
        f"{NAME}.qweight", "missing",
    ),
    "an expert of another width": (
        "gptq", {f"{NAME}.qweight": torch.zeros(8, 40, **INTS)}, f"{NAME}.qweight", r"shape \[8, 40\]",
    ),
    "scales of another type": ("gptq", {f"{NAME}.scales": torch.zeros(2, 32, **INTS)}, f"{NAME}.scales", "I32"),
    "scales that are no numbers": (
        "gptq", {f"{NAME}.scales": torch.full((2, 32), float("nan")).half()}, f"{NAME}.scales", "no finite number",
    ),
    "another zero than the middle": (
        "gptq, symmetric", {f"{NAME}.qzeros": torch.zeros(2, 4, **INTS)}, f"{NAME}.qzeros", "not all zeros are 8",
    ),
    "an order of its own": (
        "gptq, by activation", {f"{NAME}.g_idx": torch.arange(64, dtype=torch.int32) // 32}, f"{NAME}.g_idx",
        r"than what is computed together with it: model.layers.1.mlp.experts.4.gate_proj; take a checkpoint without",
    ),
    "an order of its own, as compressed-tensors names it": (
        "compressed, by activation", {f"{NAME}.weight_g_idx": torch.arange(64, dtype=torch.int32) // 32},
        f"{NAME}.weight_g_idx", "than what is computed together with it",
    ),
    "groups of unequal sizes": (
        "gptq, by activation", {f"{NAME}.g_idx": torch.zeros(64, dtype=torch.int32)}, f"{NAME}.g_idx", "32 inputs each",
    ),
    "one expert left alone": (
        "compressed", {"ignored": ["model.layers.1.mlp.experts.4.down_proj"]}, "quantization_config",
        r"leaves model.layers.1.mlp.experts.4.down_proj alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_experts_are_refused_by_name(kit: Any, tmp_path: Path, case: str) -> None:
    layout, changes, item, message = HOSTILE[case]
    folder = write_experts(
        tmp_path / "model", "qwen3_moe", kit.tiny_model("qwen3_moe"), LAYOUTS[layout], **changes
    )
    with prefer("triton"), pytest.raises(ModelError, match=message) as caught:
        kit.load(folder, torch.float16)
    assert caught.value.item == item


@pytest.mark.parametrize("name", ["awq", "gptq, by activation", "compressed, zeros"])
def test_dummy_weights_of_experts(kit: Any, tmp_path: Path, name: str) -> None:
    folder = write_experts(tmp_path / "model", "qwen3_moe", kit.tiny_model("qwen3_moe"), LAYOUTS[name])
    with prefer("triton"):
        logits = [kit.our_logits(kit.load(folder, torch.float16, load_format="dummy")) for _ in range(2)]
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)
