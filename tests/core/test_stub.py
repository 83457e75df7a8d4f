"""The hand-written stub describes the built module, and the module is the optimised one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import oneloop_core


def test_stub_matches_the_built_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "oneloop_core"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_release_build() -> None:
    assert oneloop_core.BUILD_PROFILE == "release"


def test_error_classes_share_a_base() -> None:
    errors = [
        oneloop_core.RequestError,
        oneloop_core.ConfigError,
        oneloop_core.SlabError,
        oneloop_core.AuditError,
        oneloop_core.CorePoisonedError,
        oneloop_core.TraceError,
    ]
    assert all(issubclass(error, oneloop_core.CoreError) for error in errors)
    assert not issubclass(oneloop_core.CoreError, ValueError)


def test_names_are_exported_once() -> None:
    public = {name for name in vars(oneloop_core) if not name.startswith("_")} - {"Literal"}
    assert public | {"__version__"} == set(oneloop_core.__all__)
