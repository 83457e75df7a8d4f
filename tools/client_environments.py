"""Makes the environments of the client tests (tests/clients/test_frameworks.py): a virtual one for Python, one for npm.

They are apart from the environment of `make` because these clients bring some sixty packages that oneloop has no use
for. They stand in the cache folder (which ONELOOP_CACHE names), one for each content of the lock files, so that each is
installed once and then needs no network. The last line on standard output says where each is, as one JSON object.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oneloop.loader.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENTS = Path(__file__).parents[1] / "tests/clients"
INSTALL_LIMIT_S = 600
LEAST_NODE = 20


def main() -> int:
    try:
        places = {"python": str(python_environment()), "npm": str(npm_environment())}
    except ClientEnvironmentError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(json.dumps(places))
    return 0


class ClientEnvironmentError(RuntimeError):
    """An environment could not be made; the message says how far it got and what to do."""


def python_environment() -> Path:
    """The interpreter of the environment with the packages of tests/clients/python/requirements.lock."""
    lock = CLIENTS / "python/requirements.lock"

    def make(folder: Path) -> None:
        run([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Byte code is made for what is imported, as it is: of the largest package that is a small part.
        run([*pip, "--no-compile", "--require-hashes", "--no-deps", "-r", str(lock)], folder)

    return environment("python", [lock], sys.version, make) / "bin/python"


def npm_environment() -> Path:
    """The folder with the node_modules of tests/clients/npm/package-lock.json."""
    locks = [CLIENTS / "npm/package.json", CLIENTS / "npm/package-lock.json"]
    version = node_version()

    def make(folder: Path) -> None:
        folder.mkdir()
        for lock in locks:
            shutil.copy(lock, folder)
        run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder)

    return environment("npm", locks, version, make)


def node_version() -> str:
    """What `node --version` says. ClientEnvironmentError where node or npm is missing or too old."""
    remedy = (
        f"the tests of npm clients need node {LEAST_NODE} or later and npm; install them, then run this again"
    )
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise ClientEnvironmentError(f"node or npm is not there: {remedy}")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".", 1)[0]) < LEAST_NODE:
        raise ClientEnvironmentError(f"node is {version}: {remedy}")
    return version


def environment(name: str, locks: list[Path], version: str, make: Callable[[Path], None]) -> Path:
    """The folder for this content of the locks, made where it is not there or not whole.

    version: of the interpreter, for each of which the folder is another.
    """
    content = hashlib.sha256(
        b"\0".join([version.encode(), *(lock.read_bytes() for lock in locks)])
    ).hexdigest()
    folder = cache_folder() / "clients" / f"{name}-{content[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder / "oneloop-stamp"
    with folder.with_suffix(".lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)  # one process makes it, others wait
        if not stamp.is_file():
            print(f"clients: installing into {folder} (once)", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            stamp.write_text("whole\n")
    return folder


def run(command: list[str], folder: Path) -> None:
    """A step of making `folder`. ClientEnvironmentError with the last lines that it printed."""
    done = subprocess.run(
        command,
        cwd=folder if folder.is_dir() else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=INSTALL_LIMIT_S,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        remedy = (
            "it needs the package indexes, the first time, and 600 MB; ONELOOP_CACHE names another folder"
        )
        raise ClientEnvironmentError(f"{' '.join(command[:4])} … failed ({remedy}):\n{last}")


if __name__ == "__main__":
    sys.exit(main())
