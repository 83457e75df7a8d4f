"""Which executor serves a configuration. By name, so that nothing heavy is imported until one is made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from oneloop.config import EngineConfig
    from oneloop.executor.base import Executor
    from oneloop.start_times import StartTimes

_EXECUTORS: dict[str, tuple[str, str]] = {
    "cpu": ("oneloop.executor.cpu", "CpuExecutor"),
    "cuda": ("oneloop.executor.cuda", "CudaExecutor"),
    "null": ("oneloop.executor.null", "NullExecutor"),
}


def create_executor(config: EngineConfig, start_times: StartTimes) -> Executor:
    """The configuration's executor, or that of its device, not started yet. It adds its parts to start_times."""
    wanted = config.worker.executor
    module, kind = _EXECUTORS[config.resolved.device if wanted == "auto" else wanted]
    return cast("Executor", getattr(import_module(module), kind)(config, start_times))
