"""GGUF weights: every tensor type, the order of rotary rows, tied heads; incomplete files are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from oneloop.errors import ModelError
from oneloop.formats.ggml_types import DEQUANTIZABLE
from oneloop.formats.gguf import read_gguf
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.gguf import load_gguf_weights
from oneloop.loader.gguf_tensors import check_gguf, gguf_place
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.models.registry import build_model
from oneloop.quant.gguf import GgufWeight
from oneloop.worker.memory.sizes import weight_bytes
from oneloop_kernels.registry import prefer

PLAIN = ("F32", "F16", "BF16")


def dequantizable() -> list[str]:
    """Names of the types that the gguf package turns into numbers."""
    found = []
    for kind, (_, block_bytes) in GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys: the two halves of each head row by row."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_model(
    path: Path, model: Any, arch: str, kind: str = "F32", kinds: dict[str, str] | None = None, **changes: Any
) -> Path:
    """transformers' tiny model as GGUF, its matrices stored as `kind`, but those by `kinds` whose names have its key.

    changes: tensor name → array or None.
    """
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
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    tensors = {gguf_place(name).name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    if arch == "llama":
        for name, array in tensors.items():
            for part, heads in (
                ("attn_q.", config.num_attention_heads),
                ("attn_k.", config.num_key_value_heads),
            ):
                if part in name:
                    tensors[name] = interleave(array, heads)
    tensors |= changes
    for name, array in tensors.items():
        if array is not None:
            own = next((other for part, other in (kinds or {}).items() if f".{part}." in name), kind)
            add_tensor(writer, name, array, own if array.ndim == 2 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    stored = GGMLQuantizationType[kind]
    data = gguf.quants.quantize(np.ascontiguousarray(array), stored)
    writer.add_tensor(name, data, raw_dtype=stored)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_equal_transformers(kit: Any, tmp_path: Path, arch: str, tied: bool) -> None:
    model = kit.tiny_model(arch, tie_word_embeddings=tied)
    loaded = kit.load(write_model(tmp_path / "m.gguf", model, arch))
    torch.testing.assert_close(kit.our_logits(loaded), kit.expected_logits(model), atol=1e-4, rtol=1e-4)


def test_biases_of_a_llama(kit: Any, tmp_path: Path) -> None:
    model = kit.tiny_model("llama", attention_bias=True, mlp_bias=True)
    loaded = kit.load(write_model(tmp_path / "m.gguf", model, "llama"))
    torch.testing.assert_close(kit.our_logits(loaded), kit.expected_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_plain_types(kit: Any, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = kit.tiny_model("llama")
    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    loaded = kit.load(write_model(tmp_path / "m.gguf", model, "llama", kind), dtype)
    source = model.state_dict()
    for name, target in loaded.weight_targets().items():
        stored = source[name].to(types[kind]) if source[name].ndim == 2 else source[name]
        assert torch.equal(target, stored.to(dtype)), name


MIXES: dict[str, dict[str, str]] = {
    "one type": {},
    "values in more bits": {"attn_v": "Q8_0", "ffn_down": "Q5_1"},
    "values in plain numbers": {"attn_v": "F16"},
    "all parts differ": {"attn_q": "Q4_1", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_up": "Q8_0"},
    "some maps in plain numbers": {"attn_q": "F16", "attn_k": "BF16", "attn_v": "F32", "ffn_down": "F16"},
}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("mix", MIXES)
def test_types_stay_as_they_are_where_there_are_kernels(
    kit: Any, tmp_path: Path, arch: str, mix: str
) -> None:
    """As on a GPU, by kernels in the interpreter. Logits of the file dequantised, as much memory as planned."""
    model = kit.tiny_model(arch, tie_word_embeddings=False)
    path = write_model(tmp_path / "m.gguf", model, arch, "Q4_0", MIXES[mix])
    wanted = kit.our_logits(kit.load(path))
    with prefer("triton"):
        ours = kit.load(path, torch.float16)
        logits = kit.our_logits(ours).float()
    assert float((logits - wanted).norm() / wanted.norm()) < 3e-3
    spec = resolve_model(str(path)).spec
    assert isinstance(ours.head.stored, GgufWeight)
    maps = [
        one.stored
        for layer in ours.layers
        for one in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    kept = sum(one.kept.num_bytes for one in (*maps, ours.head.stored) if isinstance(one, GgufWeight))
    targets = [target for target in ours.weight_targets().values() if isinstance(target, torch.Tensor)]
    assert weight_bytes(spec, 2, on_gpu=True) == kept + sum(target.nbytes for target in targets)


@pytest.mark.parametrize("packed", [False, True])
def test_scales_that_are_no_numbers(kit: Any, tmp_path: Path, packed: bool) -> None:
    """Named where blocks stay as they are, and where they are dequantised."""
    model, name = kit.tiny_model("qwen3"), "blk.1.attn_k.weight"
    path = write_model(tmp_path / "m.gguf", model, "qwen3", "Q4_0")
    tensor = read_gguf(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(tensor.offset + 5 * tensor.type.block_bytes)
        file.write(np.float16(np.nan).tobytes())
    with (
        prefer("triton" if packed else "reference"),
        pytest.raises(
            ModelError, match="no finite number as " + ("float16" if packed else "float32")
        ) as caught,
    ):
        kit.load(path, torch.float16 if packed else torch.float32)
    assert (caught.value.file, caught.value.item) == (str(path), name)


def test_dummy_weights_of_types_that_stay(kit: Any, tmp_path: Path) -> None:
    """Numbers, whatever the types: no bits that mean none."""
    mix = {"attn_q": "Q4_1", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_up": "Q5_1"}
    path = write_model(tmp_path / "m.gguf", kit.tiny_model("llama"), "llama", "Q4_0", mix)
    with prefer("triton"):
        spec = resolve_model(str(path), load_format="dummy").spec
        model = build_model(spec, torch.float16, kit.cpu)
        fill_dummy_weights(model.weight_targets(), seed=1)
        logits = kit.our_logits(model)
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize("kind", [kind for kind in dequantizable() if kind not in PLAIN])
def test_every_quantised_type(tmp_path: Path, kind: str) -> None:
    """Random blocks, whole chunks and a rest: bit for bit what the gguf package makes of the whole tensor."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (700, 512)  # more than one chunk of 2^18 elements
    generator = np.random.default_rng(5)
    data = generator.integers(0, 256, size=(shape[0], shape[1] // block_size * block_bytes), dtype=np.uint8)
    blocks = data.reshape(-1, block_bytes)
    with np.errstate(all="ignore"):
        numbers = gguf.quants.dequantize(blocks, GGMLQuantizationType[kind])
    blocks[~np.isfinite(numbers).all(1)] = 0  # scales that are no numbers are refused
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("token_embd.weight", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = torch.empty(shape)
    load_gguf_weights(read_gguf(path), None, {"model.embed_tokens.weight": target})
    expected = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(target.numpy(), expected)


def test_the_embedded_model(kit: Any) -> None:
    """Every tensor has its place, and the first and the last layer hold what the gguf package makes of the bytes."""
    source = resolve_model("smollm2")
    stored = source.gguf.tensors
    targets = kit.load("smollm2").weight_targets()
    assert {gguf_place(name).name for name in targets} == set(stored)
    content = np.memmap(source.path, dtype=np.uint8, mode="r")
    for name, target in targets.items():
        tensor = stored[gguf_place(name).name]
        if not any(part in name for part in ("layers.0.", "layers.29.", "model.norm")):
            continue
        blocks = content[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)
        expected = gguf.quants.dequantize(blocks, GGMLQuantizationType(tensor.type.type_id)).reshape(
            target.shape
        )
        for part, heads in (("q_proj", source.spec.num_heads), ("k_proj", source.spec.num_kv_heads)):
            if part in name:
                expected = (
                    expected.reshape(heads, -1, 2, expected.shape[-1]).swapaxes(1, 2).reshape(expected.shape)
                )
        np.testing.assert_array_equal(target.numpy(), expected, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        "output_norm.weight",
        "blk.1.attn_q.weight",
        "blk.0.attn_norm.weight",
        "blk.1.ffn_down.weight",
        "token_embd.weight",
    ],
)
def test_a_missing_tensor_is_named(kit: Any, tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", kit.tiny_model("llama"), "llama", **{name: None})
    with pytest.raises(ModelError, match="missing") as caught:
        kit.load(path)
    assert caught.value.item == name


def test_a_missing_bias_of_qwen2_is_named(kit: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", kit.tiny_model("qwen2"), "qwen2", **{"blk.0.attn_k.bias": None})
    with pytest.raises(ModelError) as caught:
        kit.load(path)
    assert caught.value.item == "blk.0.attn_k.bias"


def test_numbers_that_cannot_be_quantised_are_named(kit: Any, tmp_path: Path) -> None:
    model, name = kit.tiny_model("llama"), "blk.1.ffn_down.weight"
    matrix = np.ones((64, 96), np.float32)
    matrix[3, 4] = np.inf
    path = write_model(tmp_path / "model.gguf", model, "llama", **{name: matrix})
    source = resolve_model(str(path), quantization="fp8")
    with pytest.raises(ModelError, match="no finite number") as caught:
        load_model(source, dtype=torch.float32, device=torch.device("cpu"))
    assert (caught.value.file, caught.value.item) == (str(path), name)


def test_a_misshapen_tensor_is_named_with_both_shapes(kit: Any, tmp_path: Path) -> None:
    wrong = np.zeros((33, 64), dtype=np.float32)
    path = write_model(
        tmp_path / "m.gguf", kit.tiny_model("llama"), "llama", **{"blk.0.attn_v.weight": wrong}
    )
    with pytest.raises(ModelError, match=r"\[33, 64\], the model needs \[32, 64\]") as caught:
        kit.load(path)
    assert caught.value.item == "blk.0.attn_v.weight"


def test_the_table_of_weight_types_is_what_the_gguf_package_can_do() -> None:
    assert set(dequantizable()) == DEQUANTIZABLE


@pytest.mark.parametrize("kind", ["Q8_1", "I32"])
def test_types_that_are_no_weights_are_refused(tmp_path: Path, kind: str) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((4, 64 // block_size * block_bytes), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=kind) as caught:
        check_gguf(read_gguf(path), {"model.embed_tokens.weight": (4, 64)})
    assert caught.value.item == "token_embd.weight"


def test_progress_ends_at_the_total(kit: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_model(tmp_path / "m.gguf", kit.tiny_model("llama"), "llama")
    kit.load(path, progress=lambda what, done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
