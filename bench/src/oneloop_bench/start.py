"""Seconds from the command to a ready `oneloop serve` and to its first answer, by part, with cold and warm caches."""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oneloop_bench.server import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KERNEL_CACHES: Final = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""Variables that name the folders in which compiled kernels are kept."""
_READY: Final = re.compile(r"ready after [\d.]+ s: (.*)")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server."""

    ready_s: float
    """From the command until /health answers 200."""
    first_answer_s: float
    """From the command until the first completion is there."""
    parts: dict[str, float]
    """As the server logs them. Parts that run side by side overlap."""


@contextmanager
def kernel_caches() -> Iterator[dict[str, str]]:
    """An environment whose caches of compiled kernels are empty folders of their own, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="oneloop-start-") as folder:
        yield {name: str(Path(folder, name.lower())) for name in KERNEL_CACHES}


def measure_start(
    options: Sequence[str] = (), *, model: str = "smollm2", environment: Mapping[str, str] | None = None
) -> Start:
    """Start `oneloop serve` with these options, ask it once, stop it. RuntimeError, with its log, when it fails."""
    with tempfile.NamedTemporaryFile("r", prefix="oneloop-start-", suffix=".log") as log:
        begin = time.perf_counter()
        try:
            with running_server(*options, model=model, log=Path(log.name), environment=environment) as server:
                server.wait_ready()
                ready_s = time.perf_counter() - begin
                body = {"prompt": [1] * 16, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
                status, reply = server.request("POST", "/v1/completions", body)
                first_answer_s = time.perf_counter() - begin
        except RuntimeError as error:
            raise RuntimeError(f"{error}; its log ends with:\n{log.read()[-2000:]}") from None
        if status != 200:
            raise RuntimeError(f"status {status}: {reply}")
        return Start(ready_s, first_answer_s, read_parts(log.read()))


def read_parts(log: str) -> dict[str, float]:
    """Part → seconds of the line that a ready server logs. RuntimeError when there is none."""
    found = _READY.search(log)
    if found is None:
        raise RuntimeError("the server did not log the seconds of its start")
    pairs = (part.rpartition(" ") for part in found[1].strip().split(", "))
    return {name: float(seconds) for name, _, seconds in pairs}
