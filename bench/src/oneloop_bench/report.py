"""What every bench prints: the machine, and one JSON object as the last line."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop.device.cpus import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def save_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write what `python -m oneloop_bench.page FILE` takes over. Folders are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = {**result, "machine": result.get("machine") or machine()}
    file.write_text(json.dumps(whole) + "\n", encoding="utf-8")
