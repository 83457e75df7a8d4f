"""The scheduler, block pool and detokenizer of oneloop, written in Rust (see docs/architecture.md)."""

from typing import Literal

from oneloop_core import snapshot
from oneloop_core._core import (
    BUILD_PROFILE,
    MAX_LOGPROBS,
    AuditError,
    CompletionWatcher,
    ConfigError,
    Core,
    CoreConfig,
    CoreError,
    CorePoisonedError,
    Delta,
    Deltas,
    Field,
    LogprobsEncoder,
    PromptLogprobs,
    RequestError,
    SlabError,
    SlabLayout,
    Stats,
    StreamDecoder,
    StreamRelay,
    TraceDifference,
    TraceError,
    TraceReplay,
    TraceWriter,
    Vocabulary,
    __version__,
)

# Spelled as the union that a Literal of several values stands for: stubtest knows only that form at run time.
FinishReason = Literal["stop"] | Literal["length"] | Literal["abort"] | Literal["error"]

__all__ = [
    "BUILD_PROFILE",
    "MAX_LOGPROBS",
    "AuditError",
    "CompletionWatcher",
    "ConfigError",
    "Core",
    "CoreConfig",
    "CoreError",
    "CorePoisonedError",
    "Delta",
    "Deltas",
    "Field",
    "FinishReason",
    "LogprobsEncoder",
    "PromptLogprobs",
    "RequestError",
    "SlabError",
    "SlabLayout",
    "Stats",
    "StreamDecoder",
    "StreamRelay",
    "TraceDifference",
    "TraceError",
    "TraceReplay",
    "TraceWriter",
    "Vocabulary",
    "__version__",
    "snapshot",
]
