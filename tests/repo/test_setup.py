"""What `make` says before it downloads anything, on machines that lack something."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash") or "bash"


def check(tools: Path, python: str = "python3") -> subprocess.CompletedProcess[str]:
    """Run the check with nothing but `tools` on the PATH."""
    command = [BASH, str(ROOT / "tools/check_setup.sh"), python]
    return subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=30)


def write_tool(folder: Path, name: str, body: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with all that is needed."""
    for name in ("python3", "cargo", "cc"):
        write_tool(tmp_path, name)
    return tmp_path


def test_nothing_is_said_where_all_is_there(tools: Path) -> None:
    result = check(tools)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("python3", None, "make PYTHON="),
        ("python3", 'case "$*" in *version_info*) exit 1;; --version) echo Python 3.9.18;; esac', "3.9.18"),
        ("python3", 'case "$*" in *ensurepip*) exit 1;; esac', "python3-venv"),
        ("cargo", None, "rustup"),
        ("cargo", "exit 1", "rustup"),
        ("cc", None, "C compiler"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    tools: Path, name: str, body: str | None, says: str
) -> None:
    (tools / name).unlink()
    if body is not None:
        write_tool(tools, name, body)
    result = check(tools)
    assert result.returncode == 1
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_everything_missing_is_said_at_once(tmp_path: Path) -> None:
    assert len(check(tmp_path).stderr.splitlines()) == 3


def test_make_checks_before_it_downloads(tmp_path: Path) -> None:
    """With a Python that is too old, `make install` ends at once and leaves no environment behind."""
    write_tool(tmp_path, "oldpython", 'case "$*" in --version) echo Python 3.9.18;; *) exit 1;; esac')
    command = ["make", "install", f"PYTHON={tmp_path}/oldpython", f"VENV={tmp_path}/venv"]
    result = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=30
    )
    assert result.returncode != 0
    assert "Python 3.9.18" in result.stderr
    assert "pip" not in result.stdout
    assert not (tmp_path / "venv").exists()


def test_an_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    """What is left where `python3 -m venv` was interrupted, or Debian's venv package was absent."""
    makes = f"'-m venv --clear '*) echo made > {tmp_path}/made; exit 1;;"
    write_tool(tmp_path, "python", f'case "$*" in *version_info*|*ensurepip*) exit 0;; {makes} esac')
    (tmp_path / "venv/bin").mkdir(parents=True)
    write_tool(tmp_path / "venv/bin", "python", "exit 1")
    command = ["make", "install", f"PYTHON={tmp_path}/python", f"VENV={tmp_path}/venv"]
    result = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=30
    )
    assert result.returncode != 0
    assert (tmp_path / "made").is_file()
