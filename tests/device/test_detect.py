"""Which device `auto` means, from device files and CUDA_VISIBLE_DEVICES alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oneloop.device.cards import CARDS, card_named
from oneloop.device.detect import resolve_device, sees_gpu, torch_has_cuda, visible_devices


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("none", ()),
        ("0", ("0",)),
        (" 2, 0", ("2", "0")),
        ("1,-1,0", ("1",)),
        ("GPU-8932f937,MIG-1", ("GPU-8932f937", "MIG-1")),
    ],
)
def test_visible_devices(value, expected):
    assert visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == expected


def test_a_gpu_is_seen_by_its_device_file(tmp_path):
    assert not sees_gpu({}, tmp_path)
    (tmp_path / "nvidiactl").touch()  # there with a driver and no GPU, too
    assert not sees_gpu({}, tmp_path)
    (tmp_path / "nvidia3").touch()
    assert sees_gpu({}, tmp_path)
    assert sees_gpu({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    assert not sees_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)


def test_what_was_asked_for_by_name_is_not_questioned():
    assert resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


def test_torch_is_asked_without_importing_it():
    code = "import sys; from oneloop.device.detect import torch_has_cuda as f; print(f(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    assert done.stdout.split() == [str(torch.version.cuda is not None), "False"]
    assert torch_has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize("line", ["cuda: Optional[str] = None", "cuda = None"])
def test_a_torch_for_the_cpu_runs_on_the_cpu(tmp_path, monkeypatch, line):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.11.0+cpu'\n{line}\n")
    code = "from oneloop.device.detect import torch_has_cuda as f; print(f())"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("h200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L4", None),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_cards_are_known_by_their_names(name, key):
    card = card_named(name)
    assert (card and card.key) == key


def test_cards_are_plausible():
    assert len({card.key for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert 20 << 30 < card.total_bytes < 200 << 30
        assert 5e11 < card.bytes_per_s < 1e13
        assert 1e14 < card.flops < 2e15
