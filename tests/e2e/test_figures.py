"""The figures oneloop must reach, as the benches print them. Slow, and meant for a machine that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def figures(bench: str, *arguments: str) -> dict[str, Any]:
    """The bench's last line."""
    command = [sys.executable, "-m", f"oneloop_bench.{bench}", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_core() -> None:
    found = figures("micro.core")
    step_us = found["step_us"]
    assert step_us["256"] <= 70, found
    assert step_us["1024"] <= 250, found
    assert step_us["1024"] <= 6 * step_us["256"], "growth is linear, but for the caches"
    assert found["admit_cached_8k_us"] <= 150, found


def test_speed_on_the_cpu() -> None:
    found = figures("cpu")
    assert found["ratio_1"] >= 1.3, found
    assert found["ratio_16"] >= 2.5, found


def test_memory() -> None:
    found = figures("memory")
    assert found["rss_above_torch_gb"] <= 1.2, found


def test_start() -> None:
    found = figures("commands.main", "startup")
    assert found["avg_warm_first_answer_time"] <= 8, found
