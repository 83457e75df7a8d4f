"""Where oneloop keeps what it has fetched."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """ONELOOP_CACHE, else $XDG_CACHE_HOME/oneloop, else ~/.cache/oneloop. Not created here."""
    if folder := os.environ.get("ONELOOP_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "oneloop"
