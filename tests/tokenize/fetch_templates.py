"""Fetches the chat templates of some sixty models (those that llama.cpp is tested with) into the cache folder.

python tests/tokenize/fetch_templates.py     fetches them and prints where they are
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from oneloop.loader.cache import cache_folder

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
"""Of the source distribution, which has the templates in it."""
INSIDE = "/vendor/llama.cpp/models/templates/"


class FetchError(Exception):
    """The package cannot be reached, or it is not what it was."""


def fetch() -> Path:
    """Folder with one .jinja file per model, fetched on first use."""
    root = cache_folder() / "test-templates"
    folder = root / VERSION
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        archive = _download(Path(temporary))
        unpacked = Path(temporary) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archive) as opened:
            for member in opened:
                source = opened.extractfile(member) if INSIDE in member.name else None
                if source is not None and member.name.endswith(".jinja"):
                    (unpacked / Path(member.name).name).write_bytes(source.read())
        try:
            os.rename(unpacked, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _download(folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "--dest", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        raise FetchError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-300:]}")
    digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise FetchError(f"{archives[0].name} has sha256 {digest}, not {SHA256}")
    return archives[0]


if __name__ == "__main__":
    print(fetch())
