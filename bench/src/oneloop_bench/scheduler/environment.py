"""The environment that vLLM is imported in: made once, apart from ours, in the cache folder.

vLLM asks for some 200 packages, most of them for devices. What its scheduler imports is listed in vllm.lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from oneloop.loader.cache import cache_folder

VLLM = "vllm==0.26.0"
LOCK = Path(__file__).with_name("vllm.lock")
_PROBE = "import vllm.v1.core.sched.scheduler"


class PeerEnvironmentError(RuntimeError):
    """The environment could not be made; the message says how far it got and what to do."""


def peer_python(folder: Path | None = None) -> Path:
    """The interpreter of the peer's environment, which is made where it is not there or not whole.

    folder: default, `peers` in the cache folder (which ONELOOP_CACHE names). Says on standard output what it does.
    """
    folder = folder or cache_folder() / "peers" / VLLM.replace("==", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, stamp = folder / "bin" / "python", folder / "oneloop-stamp"
    content = hashlib.sha256(LOCK.read_bytes() + VLLM.encode() + sys.version.encode()).hexdigest()
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process makes it, others wait
        if stamp.is_file() and stamp.read_text() == content:
            print(f"peer: {VLLM} in {folder}")
            return python
        print(f"peer: installing {VLLM} and torch into {folder} (5 GB, some minutes, once)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], "making a virtual environment")
        # Without dependencies: vllm.lock has those that count, each with its version.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "-r", str(LOCK), VLLM], "installing packages")
        _run([str(python), "-c", _PROBE], "importing vLLM's scheduler")
        stamp.write_text(content)
    return python


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        remedy = "it needs the package index and 8 GB of free disk; ONELOOP_CACHE names another folder"
        raise PeerEnvironmentError(f"{what} failed ({remedy}):\n{last}")
