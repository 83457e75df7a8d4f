"""What `make test-python` runs: every test file, and none twice."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
"""Variables of a make that runs this test."""


def commands_of(target: str) -> list[str]:
    """The lines with which make would run pytest."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return [line for line in done.stdout.splitlines() if " -m pytest" in line]


def test_python_tests_are_all_run_and_none_twice() -> None:
    commands = [shlex.split(command.partition("-m pytest")[2]) for command in commands_of("test-python")]
    assert len(commands) > 4
    runs: Counter[tuple[str, str]] = Counter()
    shares: dict[str, int] = {}
    for arguments in commands:
        share = arguments[arguments.index("--share") + 1] if "--share" in arguments else "1/1"
        for file in files_of(arguments):
            runs[file, share.partition("/")[0]] += 1
            assert shares.setdefault(file, int(share.partition("/")[2])) == int(share.partition("/")[2])
    everything = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(shares) == everything
    assert runs == Counter({(file, str(number + 1)): 1 for file in shares for number in range(shares[file])})


def test_pytests_beside_each_other_share_no_folder_of_temporary_files() -> None:
    beside = [command for command in commands_of("test-python") if "OMP_NUM_THREADS=1" in command]
    assert len(beside) > 4
    for command in beside:
        assert "folder=$(mktemp -d); " in command
        assert " --basetemp=$folder/" in command


def files_of(arguments: list[str]) -> set[str]:
    """Test files that pytest with these arguments collects; without a path those of tests/."""
    ignored = [word.removeprefix("--ignore=") for word in arguments if word.startswith("--ignore=")]
    paths = [word for word in arguments if word.startswith("tests/")] or ["tests"]
    found = {file for path in paths for file in under(path)}
    return found - {file for path in ignored for file in under(path)}


def under(path: str) -> set[str]:
    place = ROOT / path
    assert place.exists(), path
    files = [place] if place.is_file() else place.rglob("test_*.py")
    return {str(file.relative_to(ROOT)) for file in files}
