"""What every bench prints: the machine, and one JSON object as the last line; or one line of what is in its way."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop.device.cpus import usable_cpus
from oneloop.errors import OneloopError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXIT_USAGE = 2


class BenchError(ValueError):
    """What whoever runs a bench can put right."""


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, Python."""
    model = platform.processor() or "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {"cpu": model, "cores": usable_cpus(), "python": platform.python_version()}


def print_result(result: dict[str, Any]) -> None:
    """The last line of a bench's output."""
    print(json.dumps({**result, "machine": machine()}))


def print_figures(result: dict[str, Any]) -> None:
    """A line for each, then the result."""
    for name, value in result.items():
        print(f"{name}: {value}")
    print_result(result)


def run_bench(main: Callable[[], None]) -> None:
    """A bench as a program: what a person can put right is one line on stderr, and exit status 2."""
    try:
        main()
    except (BenchError, OneloopError) as error:
        print(f"{Path(sys.argv[0]).stem}: error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def save_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write what `python -m oneloop_bench.page FILE` takes over. Folders are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = {**result, "machine": result.get("machine") or machine()}
    file.write_text(json.dumps(whole) + "\n", encoding="utf-8")
