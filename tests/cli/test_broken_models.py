"""Broken model files end the command with their name, soon and without a traceback (B-15); the formats' own tests have
the whole corpus."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 5.0


def safetensors(header: dict[str, object], num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


NORM = {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}
WEIGHTS = {
    "cut": (safetensors(NORM, 100), "model.safetensors: model.norm.weight: "),
    "missing tensor": (safetensors(NORM, 128), ": model.embed_tokens.weight: this tensor is missing"),
    "no header": (b"\xff" * 64, "model.safetensors: header length: "),
}


def fails(*arguments: str) -> str:
    """stderr of a command that fails within the limit. CPU time, so that a busy machine is no false alarm."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "oneloop.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT_S
    return done.stderr


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    content, message = WEIGHTS[kind]
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    errors = fails("serve", str(folder), "--port", "0", "--num-gpu-blocks-override", "64")
    assert str(folder) in errors
    assert message in errors


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_truncated_gguf_file(command: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(40))
    arguments = ["serve", "--port", "0"] if command == "serve" else ["generate", "hi"]
    assert f"oneloop: error: {path}: " in fails(*arguments, "--model", str(path))


def test_a_configuration_that_names_no_model_of_ours(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert f"{folder / 'config.json'}: architectures: 'BertModel' is not supported" in fails(
        "serve", str(folder), "--port", "0"
    )
