"""tools/client_environments.py: made once, again where left half made, and what it says of what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a cache folder of its own."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location(
        "client_environments", ROOT / "tools/client_environments.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_made_once_for_each_lock(tool: Any, tmp_path: Path) -> None:
    lock, made = tmp_path / "lock", []

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text("whole")
        made.append(folder)

    lock.write_text("a==1")
    first = tool.environment("x", [lock], "3.11", make)
    assert tool.environment("x", [lock], "3.11", make) == first
    assert made == [first]
    assert tool.environment("x", [lock], "3.12", make) != first
    lock.write_text("a==2")
    assert tool.environment("x", [lock], "3.11", make) not in made[:-1]
    assert len(made) == 3


def test_half_made_is_made_again(tool: Any, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("a==1")

    def broken(folder: Path) -> None:
        folder.mkdir()
        (folder / "part").touch()
        tool.run(["sh", "-c", "echo no network; exit 3"], folder)

    with pytest.raises(tool.ClientEnvironmentError, match=r"(?s)ONELOOP_CACHE.*no network"):
        tool.environment("x", [lock], "", broken)
    folder = tool.environment("x", [lock], "", lambda folder: folder.mkdir())
    assert not (folder / "part").exists()


def test_without_node(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tool.ClientEnvironmentError, match="node 20 or later and npm; install them"):
        tool.npm_environment()
    for name in ("node", "npm"):
        (tmp_path / name).write_text("#!/bin/sh\necho v12.1.0\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(tool.ClientEnvironmentError, match=r"node is v12\.1\.0"):
        tool.npm_environment()


@pytest.mark.parametrize("name", ["python/requirements.lock", "npm/package-lock.json"])
def test_locks_name_no_registry(name: str) -> None:
    """So that they work with any, and each package is held to its hash."""
    text = (ROOT / "tests/clients" / name).read_text()
    assert "://" not in text
    packages = text.count("==") if name.startswith("python") else text.count('"version"')
    assert 0 < packages <= text.count("--hash=") + text.count('"integrity"')
