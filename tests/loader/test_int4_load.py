"""Checkpoints of 4 bits in every layout, written here by the letter of the formats: logits of what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from oneloop.errors import ModelError
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.resolve import resolve_model
from oneloop.models.decoder import Decoder
from oneloop.models.registry import build_model
from oneloop.quant.int4 import Int4Weight
from oneloop.quant.packed import Packed, WrittenOut
from oneloop.worker.memory.sizes import weight_bytes
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
    out_size: int, in_size: int, size: int, *, symmetric: bool, shuffled: bool, seed: int
) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-in_size // size)
    groups = torch.arange(in_size) // size
    if shuffled:
        groups = groups[torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size))]
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


def stored(model: Decoder) -> list[Int4Weight]:
    """Of all quantised maps."""
    found = [
        one.stored
        for layer in model.layers
        for one in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
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
