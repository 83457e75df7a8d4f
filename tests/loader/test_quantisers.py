"""The repository's own quantisers: what they write is what the loader reads, and GPTQ's results are nearer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oneloop.loader.embedded import GENERATION
from oneloop.loader.resolve import resolve_model
from oneloop_bench.perplexity import windows_of
from oneloop_bench.quantize.__main__ import main as quantize
from oneloop_bench.quantize.numbers import Grid, gptq, round_to_nearest
from oneloop_bench.report import BenchError

WAYS = {
    "awq": ["--layout", "awq"],
    "gptq": ["--layout", "gptq"],
    "gptq, symmetric": ["--layout", "gptq", "--symmetric"],
    "compressed": ["--layout", "compressed-tensors"],
    "compressed, symmetric": ["--layout", "compressed-tensors", "--symmetric"],
}


@pytest.mark.parametrize("symmetric", [False, True])
def test_to_nearest_is_half_a_step_away_at_most(symmetric: bool) -> None:
    """But for ends that a whole zero shifts out of the range: they may be one step away."""
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    found = round_to_nearest(weight, Grid(32, symmetric))
    steps = (found.plain() - weight).abs() / found.scales[:, found.groups].float()
    assert float(steps.max()) < 1.01
    assert float((steps > 0.51).float().mean()) < 0.06
    assert symmetric == bool((found.zeros == 8).all())


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize("size", [32, 128])
def test_gptq_changes_results_less(by_activation: bool, size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(48, 192, generator=generator)
    mixing = torch.randn(192, 192, generator=generator) / 14 + torch.diag(
        torch.rand(192, generator=generator) * 3
    )
    x = torch.randn(600, 192, generator=generator) @ mixing
    grid = Grid(size)
    errors = [
        float(((found.plain() - weight) @ x.T).norm())
        for found in (
            round_to_nearest(weight, grid),
            gptq(weight, x.T @ x, grid, by_activation=by_activation),
        )
    ]
    assert errors[1] < 0.75 * errors[0]


def test_gptq_of_independent_inputs_is_to_nearest() -> None:
    weight = torch.randn(20, 128, generator=torch.Generator().manual_seed(3))
    nearest, found = (
        round_to_nearest(weight, Grid(64)),
        gptq(weight, torch.eye(128), Grid(64), by_activation=False),
    )
    assert torch.equal(found.values, nearest.values)
    assert torch.equal(found.scales, nearest.scales)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_what_is_read(kit: Any, tmp_path: Path, way: str) -> None:
    """The logits of the model with every map replaced by what its numbers mean."""
    model = kit.tiny_model("llama")
    kit.save(model, tmp_path / "plain")
    quantize([str(tmp_path / "plain"), str(tmp_path / "made"), "--group-size", "32", *WAYS[way]])
    grid = Grid(32, "--symmetric" in WAYS[way])
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(round_to_nearest(module.weight, grid).plain())
        for name, parameter in model.named_parameters():
            if "proj" not in name:
                parameter.copy_(parameter.half())
    ours = kit.our_logits(kit.load(tmp_path / "made"))
    torch.testing.assert_close(ours, kit.expected_logits(model), atol=1e-4, rtol=1e-4)


def test_the_embedded_models_temperature_goes_along(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file has none; at the protocol's 1.0 a model so small rambles."""
    kit.save(kit.tiny_model("llama"), tmp_path / "plain")
    source = replace(resolve_model(str(tmp_path / "plain")), kind="gguf", generation=GENERATION)
    monkeypatch.setattr("oneloop_bench.quantize.__main__.resolve_model", lambda _: source)
    quantize(["smollm2", str(tmp_path / "made"), "--group-size", "32", *WAYS["awq"]])
    assert resolve_model(str(tmp_path / "made")).generation == GENERATION


def test_what_a_layout_has_no_room_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="AWQ's layout has zeros"):
        quantize(["smollm2", str(tmp_path), "--layout", "awq", "--symmetric"])
    with pytest.raises(BenchError, match="order of --method gptq"):
        quantize(["smollm2", str(tmp_path), "--layout", "gptq", "--by-activation"])


def test_windows() -> None:
    assert windows_of(range(10), 4, 100) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows_of(range(10), 4, 7) == [[0, 1, 2, 3]]
    assert windows_of(range(3), 4, 100) == []
