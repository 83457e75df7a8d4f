"""What a model argument means, and what is said when it means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import pytest

from oneloop.errors import ModelError
from oneloop.formats.generation import GenerationDefaults
from oneloop.loader.embedded import fetch_embedded
from oneloop.loader.resolve import resolve_model


def test_the_embedded_model_by_name() -> None:
    source = resolve_model("smollm2")
    assert (source.kind, source.path) == ("gguf", fetch_embedded())
    assert source.gguf is not None
    assert source.spec.vocab_size == 49152
    assert source.generation == GenerationDefaults(temperature=0.2)  # the model card's; at 1.0 it rambles


def test_folder_and_file(checkpoint: Any) -> None:
    _, folder = checkpoint()
    assert resolve_model(str(folder)).kind == "folder"
    assert resolve_model(str(fetch_embedded())).kind == "gguf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such file"),
        ("./model", "no such file"),
        ("~/nothing-here", "no such file"),
        ("model.gguf", "no such file"),
        ("a/b/c", "no such file"),
        ("../x", "no such file"),
        ("name with spaces", "no such file"),
        ("", "no such file|no config"),
    ],
)
def test_what_is_no_hub_id_is_never_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_files_of_other_kinds(tmp_path: Path, checkpoint: Any) -> None:
    for name in ("model.bin", "model.pt", "model.pth"):
        (tmp_path / name).write_bytes(b"x" * 64)
        with pytest.raises(ModelError, match="never loaded"):
            resolve_model(str(tmp_path / name))
    _, folder = checkpoint()
    with pytest.raises(ModelError, match="give the folder"):
        resolve_model(str(folder / "model.safetensors"))
    (tmp_path / "x.txt").write_bytes(b"x" * 64)
    with pytest.raises(ModelError, match="not a GGUF"):
        resolve_model(str(tmp_path / "x.txt"))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"name one of them, e\.g\. .*m\.gguf"):
        resolve_model(str(tmp_path))


def test_a_hub_model_is_fetched_at_one_revision_and_without_code(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    _, folder = checkpoint()
    seen: list[tuple[tuple, dict]] = []

    def snapshot(*args: Any, **options: Any) -> str:
        seen.append((args, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/model", revision="abc").path == folder
    resolve_model("org/model", load_format="dummy")
    (args, options), (_, without_weights) = seen
    assert args == ("org/model",)
    assert options["revision"] == "abc"
    assert not any(
        pattern.endswith((".py", "*", ".bin")) and pattern != "additional_chat_templates/*"
        for pattern in options["allow_patterns"]
    )
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.safetensors" not in without_weights["allow_patterns"]
    names = [
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "original/x.safetensors",
        "config.json",
    ]
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(names, **patterns)) == [names[0], "config.json"]


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="give a local folder or GGUF file"):
        resolve_model("org/model")


def test_the_loader_imports_no_transformers() -> None:
    code = "import sys, oneloop.loader.load; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
