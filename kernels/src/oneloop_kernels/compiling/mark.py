"""A file in Triton's cache that says: all kernels of such a start are here. Asking for it imports no Triton."""

from __future__ import annotations

import logging
import os
import sysconfig
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)


class StartMark:
    """Made when a start has compiled everything. Only a guess: kernels are compiled whatever it says."""

    __slots__ = ("path",)

    def __init__(self, *start: object, environment: Mapping[str, str] = os.environ) -> None:
        """start: what tells such starts apart (card, model, sizes), by its text. Triton and the kernels count too."""
        digest = sha256()
        for part in (*start, sysconfig.get_config_var("EXT_SUFFIX"), _state_of_triton()):
            digest.update(f"{part!r}\n".encode())
        for source in sorted(Path(__file__).parents[1].rglob("*")):
            if source.suffix in (".py", ".json"):  # kernels, and how they are cut
                digest.update(source.read_bytes())
        self.path = _cache_folder(environment) / f"oneloop-start-{digest.hexdigest()[:32]}"

    def exists(self) -> bool:
        """Whether such a start was through with this cache."""
        return self.path.exists()

    def write(self) -> None:
        """Such a start is through. Where the cache cannot be written, nothing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            log.debug("no mark in the kernel cache: %s", error)


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """Where Triton keeps what it has compiled, by the same variables."""
    folder = environment.get("TRITON_CACHE_DIR")
    return Path(folder) if folder else Path(environment.get("TRITON_HOME") or Path.home(), ".triton", "cache")


def _state_of_triton() -> tuple[str, int] | None:
    """Where it is and when it was installed, without importing it."""
    found = find_spec("triton")
    if found is None or found.origin is None:
        return None
    return found.origin, os.stat(found.origin).st_mtime_ns
