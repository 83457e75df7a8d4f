"""Which executor serves a configuration. By name, so that nothing heavy is imported until one is made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from oneloop.config import EngineConfig
    from oneloop.executor.base import Executor

_EXECUTORS = {"local": ("oneloop.executor.local", "LocalExecutor")}


def create_executor(config: EngineConfig, name: str = "local") -> Executor:
    """The executor of that name, not started yet."""
    module, kind = _EXECUTORS[name]
    return cast("Executor", getattr(import_module(module), kind)(config))
