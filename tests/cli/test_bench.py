"""`oneloop bench` runs the command of whichever distribution has it, and says so when none has."""

import subprocess
import sys

import pytest

from oneloop.cli.main import main

METADATA = "Metadata-Version: 2.1\nName: other-bench\nVersion: 1\n"
COMMAND = "def main(arguments):\n    print('ran with', arguments)\n    return 7\n"


@pytest.fixture
def other_bench(tmp_path, monkeypatch):
    """A distribution with the entry point, the first to be found."""
    info = tmp_path / "other_bench-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[oneloop.commands]\nbench = other_bench_command:main\n")
    (tmp_path / "other_bench_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_arguments_and_exit_code_are_passed_on(other_bench, capsys):
    assert main(["bench", "serve", "--help", "-x", "--model", "a b"]) == 7
    assert capsys.readouterr().out == "ran with ['serve', '--help', '-x', '--model', 'a b']\n"


def test_without_it(monkeypatch, capsys):
    monkeypatch.setattr("oneloop.cli.bench.entry_points", lambda **_: ())
    assert main(["bench", "serve"]) == 2
    assert "pip install oneloop-bench" in capsys.readouterr().err


def test_the_help_names_it():
    done = subprocess.run(
        [sys.executable, "-m", "oneloop.cli.main", "--help"], capture_output=True, text=True, check=True
    )
    assert "bench" in done.stdout
