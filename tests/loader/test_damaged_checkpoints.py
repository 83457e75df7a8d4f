"""Quantised checkpoints with one or two random faults: what the tensors mean, or an error of ours. Nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import safetensors.torch
import torch

from oneloop.errors import ModelError
from oneloop_bench.quantize.layouts import Layout, config_of, tensors_of
from oneloop_bench.quantize.numbers import Grid, round_to_nearest

CASES: Final = 60
"""Of each layout."""
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
JUNK: Final[tuple[Any, ...]] = (
    None,
    0,
    -1,
    1,
    3,
    8,
    16,
    "x",
    "",
    [],
    {},
    True,
    False,
    1.5,
    10**30,
    ["mlp"],
    [1],
    {"a": 1},
    "re:(",
)
DTYPES: Final = (
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e5m2,
)
Tensors = dict[str, torch.Tensor]


def maps(model: Any) -> dict[str, torch.nn.Linear]:
    found = model.model.named_modules()
    return {f"model.{name}": module for name, module in found if isinstance(module, torch.nn.Linear)}


def stored(model: Any, layout: Layout, rng: random.Random) -> tuple[Tensors, dict[str, Any]]:
    """A sound checkpoint's tensors and its quantization_config."""
    symmetric = layout != "awq" and rng.random() < 0.5
    grid = Grid(rng.choice([16, 32, 48, 64]), symmetric)
    tensors = dict(model.state_dict())
    for name, module in maps(model).items():
        del tensors[f"{name}.weight"]
        q = round_to_nearest(module.weight.detach(), grid)
        parts = tensors_of(layout, q, by_activation=False, symmetric=symmetric)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return tensors, config_of(layout, grid, by_activation=False)


def unpacked(words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    moved = words.movedim(dim, -1).long()
    places = torch.tensor([4 * order.index(number) for number in range(8)])
    return (moved[..., None] >> places & 15).flatten(-2).movedim(-1, dim)


def meaning(tensors: Tensors, name: str, shape: torch.Size, config: dict[str, Any]) -> torch.Tensor:
    """[out, in], as the code of the formats' makers has it: by the tensors, whatever config says twice."""
    out_size, in_size = shape
    if f"{name}.weight_packed" in tensors:
        weights = config["config_groups"]["group_0"]["weights"]
        numbers = unpacked(tensors[f"{name}.weight_packed"], 1)[:, :in_size]
        scales = tensors[f"{name}.weight_scale"].float()
        groups = torch.arange(in_size) // (weights["group_size"] or in_size)
        zeros = torch.full(scales.shape, 8)
        if not weights.get("symmetric", True):
            zeros = unpacked(tensors[f"{name}.weight_zero_point"], 0)[:out_size]
        return (numbers - zeros[:, groups]) * scales[:, groups]
    is_awq = config["quant_method"] == "awq"
    order = AWQ_ORDER if is_awq else tuple(range(8))
    numbers = unpacked(tensors[f"{name}.qweight"], 1 if is_awq else 0, order)
    zeros, scales = unpacked(tensors[f"{name}.qzeros"], 1, order), tensors[f"{name}.scales"].float()
    size = config["group_size"]
    groups = torch.arange(in_size) // (in_size if size == -1 else size)
    if not is_awq:
        groups = tensors.get(f"{name}.g_idx", groups).long()
        zeros = zeros + 1 & 15
    return ((numbers - zeros[groups]) * scales[groups]).T


def edit_tensor(tensors: Tensors, rng: random.Random, names: set[str]) -> None:
    """One tensor of a map: dropped, of another shape or type, or with other numbers."""
    name = rng.choice([key for key in tensors if key.rsplit(".", 1)[0] in names])
    tensor = tensors[name]
    edits: dict[str, Callable[[], torch.Tensor]] = {
        "longer": lambda: torch.cat([tensor.reshape(-1)] * 2),
        "one more row": lambda: torch.cat([tensor, tensor[:1]]),
        "turned": lambda: tensor.T.contiguous(),
        "empty": lambda: tensor.reshape(-1)[:0],
        "one number": lambda: tensor.reshape(-1)[0].clone(),
        "other type": lambda: tensor.to(rng.choice(DTYPES)),
        "other numbers": lambda: tensor.reshape(-1).flip(0).reshape(tensor.shape).contiguous(),
        "one other": lambda: with_one(tensor, rng),
    }
    kind = rng.choice(["dropped", *edits])
    if kind == "dropped":
        del tensors[name]
    else:
        tensors[name] = edits[kind]()


def with_one(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    values = [torch.nan, torch.inf, 0.0, -0.01] if tensor.is_floating_point() else [-1, 0, 2**31 - 1]
    other = tensor.clone()
    other.view(-1)[rng.randrange(other.numel())] = rng.choice(values)
    return other


def places(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in values.items():
        yield values, key
        if isinstance(value, dict):
            yield from places(value)


def edit_config(config: dict[str, Any], rng: random.Random) -> None:
    values, key = rng.choice(list(places(config)))
    if rng.random() < 0.3:
        del values[key]
    else:
        values[key] = rng.choice(JUNK)


def logits_or_none(kit: Any, folder: Path) -> torch.Tensor | None:
    """None: the model was refused, by its file or key."""
    try:
        logits: torch.Tensor = kit.our_logits(kit.load(folder))
    except ModelError as error:
        if str(folder) not in str(error) and error.item != "quantization_config":
            raise
        return None
    return logits


@pytest.mark.parametrize("layout", get_args(Layout))
def test_random_faults(kit: Any, tmp_path: Path, layout: Layout) -> None:
    outcomes = dict.fromkeys(("refused", "computed"), 0)
    for case in range(CASES):
        rng = random.Random(case)
        model = kit.tiny_model("llama")
        tensors, config = stored(model, layout, rng)
        for _ in range(rng.choice([0, 1, 1, 2])):
            if rng.random() < 0.6:
                edit_tensor(tensors, rng, set(maps(model)))
            else:
                edit_config(config, rng)
        folder = tmp_path / f"{case}"
        folder.mkdir()
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        values = json.loads(model.config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
        ours = logits_or_none(kit, folder)
        outcomes["refused" if ours is None else "computed"] += 1
        if ours is None:
            continue
        with torch.no_grad():
            for name, module in maps(model).items():
                module.weight.copy_(meaning(tensors, name, module.weight.shape, config))
        wanted = kit.expected_logits(model)
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4, msg=f"case {case}, {config}")
    assert min(outcomes.values()) > CASES // 5, outcomes
