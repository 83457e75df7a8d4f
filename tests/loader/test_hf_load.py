"""safetensors checkpoints: legal ones give transformers' logits, incomplete and hostile ones are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from oneloop.errors import ConfigError, ModelError

INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_equal_transformers(
    kit: Any, checkpoint: Any, family: str, dtype: torch.dtype, tied: bool
) -> None:
    model, folder = checkpoint(family, dtype, tie_word_embeddings=tied)
    assert ("lm_head.weight" in tensors_of(folder)) != tied
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_are_stacked(kit: Any, checkpoint: Any, family: str) -> None:
    """A checkpoint has a tensor per expert and map."""
    model, folder = checkpoint(family, torch.bfloat16)
    assert any(".experts.2." in name for name in tensors_of(folder))
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_optional_biases(kit: Any, checkpoint: Any, options: dict) -> None:
    model, folder = checkpoint(**options)
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


def test_weights_are_converted_exactly(kit: Any, checkpoint: Any) -> None:
    model, folder = checkpoint(dtype=torch.bfloat16)
    source = model.state_dict()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, target in kit.load(folder, dtype).weight_targets().items():
            assert target.dtype == dtype
            assert torch.equal(target, source[name].to(dtype)), name


def test_types_may_be_mixed(kit: Any, checkpoint: Any) -> None:
    model, folder = checkpoint()
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = tensors_of(folder)
    write_tensors(folder, {name: tensor.to(types[i % 4]) for i, (name, tensor) in enumerate(tensors.items())})
    # float16 cannot hold every bfloat16: compare with what was written
    model.load_state_dict({name: tensor.float() for name, tensor in tensors_of(folder).items()})
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


def test_shards(kit: Any, checkpoint: Any) -> None:
    model, folder = checkpoint(max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


def test_tied_flag_with_a_head_in_the_file(kit: Any, checkpoint: Any) -> None:
    """H19 c: the flag wins, as in transformers, and the extra tensor is not used."""
    model, folder = checkpoint(tie_word_embeddings=True)
    tensors = tensors_of(folder)
    write_tensors(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


def test_untied_flag_without_a_head_is_refused(kit: Any, checkpoint: Any) -> None:
    """H19 b."""
    _, folder = checkpoint()
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    write_tensors(folder, tensors)
    with pytest.raises(ModelError, match="tie_word_embeddings") as caught:
        kit.load(folder)
    assert caught.value.item == "lm_head.weight"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_missing_tensor_is_named(kit: Any, checkpoint: Any, family: str) -> None:
    _, folder = checkpoint(family)
    tensors = tensors_of(folder)
    for name in tensors:
        if ".layers.0." in name:
            continue  # the same names as layer 1's
        write_tensors(folder, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises(ModelError, match="missing") as caught:
            kit.load(folder)
        assert caught.value.item == name


def test_tensors_of_other_names_are_told(kit: Any, checkpoint: Any) -> None:
    """As those of a model in a wrapper, or of experts that are stacked already."""
    _, folder = checkpoint()
    tensors = tensors_of(folder)
    write_tensors(folder, {f"base_model.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(ModelError, match=r"names that are not supported, e\.g\. base_model\.") as caught:
        kit.load(folder)
    assert caught.value.item == "model.embed_tokens.weight"


def test_a_misshapen_tensor_is_named_with_both_shapes(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint()
    tensors = tensors_of(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    write_tensors(folder, tensors | {name: tensors[name][:-1].clone()})
    with pytest.raises(ModelError, match=r"\[31, 64\], the model needs \[32, 64\]") as caught:
        kit.load(folder)
    assert caught.value.item == name


def test_integers_are_no_weights(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint()
    tensors = tensors_of(folder)
    write_tensors(folder, tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int32)})
    with pytest.raises(ModelError, match="I32") as caught:
        kit.load(folder)
    assert caught.value.item == "model.norm.weight"


def test_extra_tensors_are_one_log_line(kit: Any, checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, folder = checkpoint()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    write_tensors(folder, tensors_of(folder) | extra)
    with caplog.at_level(logging.WARNING, "oneloop"):
        kit.load(folder)
    assert caplog.records == []
    write_tensors(folder, tensors_of(folder) | {f"vision.{i}": torch.ones(2) for i in range(50)})
    with caplog.at_level(logging.WARNING, "oneloop"):
        loaded = kit.load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 50 tensors are not used, e.g. vision.0, vision.1, vision.10"
    ]
    torch.testing.assert_close(kit.our_logits(loaded), kit.expected_logits(model), atol=1e-4, rtol=1e-4)


def shard_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


@pytest.mark.parametrize(
    ("file_name", "message"),
    [
        ("model-00009-of-00009.safetensors", "missing"),
        ("../outside.safetensors", "no safetensors file of this folder"),
        ("/etc/passwd", "no safetensors file of this folder"),
        ("sub/model.safetensors", "no safetensors file of this folder"),
        ("..", "no safetensors file of this folder"),
        ("pytorch_model.bin", "no safetensors file of this folder"),
        (3, "no safetensors file of this folder"),
        (None, "no safetensors file of this folder"),
    ],
)
def test_an_index_that_names_other_files_is_refused(
    kit: Any, checkpoint: Any, file_name: Any, message: str
) -> None:
    _, folder = checkpoint(max_shard_size="60KB")
    index = shard_index(folder)
    shutil.copy(next(folder.glob("model-*.safetensors")), folder.parent / "outside.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    index["weight_map"][name] = file_name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message) as caught:
        kit.load(folder)
    assert caught.value.item == name


def test_a_shard_without_its_tensor_is_refused(kit: Any, checkpoint: Any) -> None:
    """H19 d."""
    _, folder = checkpoint(max_shard_size="60KB")
    index = shard_index(folder)
    first, second = sorted(set(index["weight_map"].values()))[:2]
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = second
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="missing") as caught:
        kit.load(folder)
    assert caught.value.item == name
    assert second in caught.value.file


@pytest.mark.parametrize("total", [0, 10**12, "many"])
def test_a_wrong_total_is_nobodys_fault(kit: Any, checkpoint: Any, total: Any) -> None:
    """Tools that cut a model, or save parts of it, leave totals that are not right."""
    model, folder = checkpoint(max_shard_size="60KB")
    kit.edit_json(folder / INDEX, metadata={"total_size": total})
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("there", [False, True])
def test_what_the_model_does_without_may_be_missing(
    kit: Any, checkpoint: Any, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    """Published indices name tensors of heads for drafts that were left out. there: the shard, but not the tensor."""
    model, folder = checkpoint(max_shard_size="60KB")
    index = shard_index(folder)
    index["weight_map"]["mtp.fc.weight"] = (
        next(iter(index["weight_map"].values())) if there else "mtp.safetensors"
    )
    (folder / INDEX).write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING, "oneloop"):
        loaded = kit.load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 1 tensors of the index are not there, e.g. mtp.fc.weight; the model does without"
    ]
    torch.testing.assert_close(kit.our_logits(loaded), kit.expected_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(kit: Any, checkpoint: Any, weight_map: Any) -> None:
    _, folder = checkpoint(max_shard_size="60KB")
    kit.edit_json(folder / INDEX, weight_map=weight_map)
    with pytest.raises(ModelError) as caught:
        kit.load(folder)
    assert caught.value.item == "weight_map"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(kit: Any, checkpoint: Any, name: str) -> None:
    _, folder = checkpoint()
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match="never loaded") as caught:
        kit.load(folder)
    assert caught.value.file.endswith(name)


def test_the_one_file_may_have_any_name(kit: Any, checkpoint: Any) -> None:
    model, folder = checkpoint()
    other = folder / "gptq_model-4bit-128g.safetensors"
    (folder / "model.safetensors").rename(other)
    torch.testing.assert_close(
        kit.our_logits(kit.load(folder)), kit.expected_logits(model), atol=1e-4, rtol=1e-4
    )
    shutil.copy(other, folder / "another.safetensors")
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor .*, nor one other file"):
        kit.load(folder)


def test_no_weights_at_all(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        kit.load(folder)


def test_load_formats(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint()
    kit.load(folder, load_format="safetensors")
    with pytest.raises(ConfigError, match="load_format"):
        kit.load(folder, load_format="gguf")


def test_dummy_weights_need_no_files(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint(tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    first, again, other = (
        kit.load(folder, load_format="dummy", seed=seed).weight_targets() for seed in (1, 1, 2)
    )
    for name, weight in first.items():
        assert weight.abs().max() <= 1e-3
        assert weight.std() > 4e-4
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])


def test_progress_ends_at_the_total(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint()
    seen: list[tuple[str, int, int]] = []
    kit.load(folder, progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen[-1][1] == seen[-1][2] > 0
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_memory_stays_near_the_weights(kit: Any, tmp_path: Path) -> None:
    """Converting a checkpoint of 64 MiB in bfloat16 to float32 costs its 128 MiB and little more."""
    sizes = kit.sizes | {"vocab_size": 1 << 19}
    model = kit.tiny_model.__globals__["CLASSES"]["llama"]
    config = model[0](**sizes, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    shapes = {name: parameter.shape for name, parameter in model[1](config).named_parameters()}
    write_tensors(
        tmp_path, {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    )
    kit.edit_json(tmp_path / "config.json", dtype="bfloat16")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = psutil.Process().memory_info().rss
    loaded = kit.load(tmp_path)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    weights = sum(target.nbytes for target in loaded.weight_targets().values())
    assert weights > 128 << 20
    assert peak - before < weights + (48 << 20)
