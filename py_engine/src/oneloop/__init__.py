"""oneloop: an LLM serving engine that lives in one asyncio event loop.

Importing this package imports no torch: the heavy names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneloop.engine.async_engine import AsyncEngine
    from oneloop.engine.beam_search import BeamSearchParams
    from oneloop.engine.offline import LLM
    from oneloop.engine.outputs import CompletionOutput, RequestOutput
    from oneloop.engine.params import SamplingParams
    from oneloop.engine.structured import StructuredOutputsParams
    from oneloop.errors import ConfigError, ModelError, RequestError

__all__ = [
    "LLM", "AsyncEngine", "BeamSearchParams", "CompletionOutput", "ConfigError", "ModelError", "RequestError",
    "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "LLM": "oneloop.engine.offline",
    "BeamSearchParams": "oneloop.engine.beam_search",
    "AsyncEngine": "oneloop.engine.async_engine",
    "RequestOutput": "oneloop.engine.outputs",
    "CompletionOutput": "oneloop.engine.outputs",
    "SamplingParams": "oneloop.engine.params",
    "StructuredOutputsParams": "oneloop.engine.structured",
    "ConfigError": "oneloop.errors",
    "ModelError": "oneloop.errors",
    "RequestError": "oneloop.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'oneloop' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
