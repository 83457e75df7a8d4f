"""AsyncEngine: submit, stream, abort, drain. One per process, on one event loop; everything else hangs off it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from oneloop.config import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from oneloop_core import Stats

    from oneloop.engine.intake import Prompt
    from oneloop.engine.metrics import EngineMetrics
    from oneloop.engine.outputs import RequestOutput
    from oneloop.engine.params import SamplingDefaults, SamplingParams
    from oneloop.engine.stream import RequestStream
    from oneloop.executor.base import Executor, ModelInfo
    from oneloop.tokenize import Tokenizer


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are served now."""

    state: Literal["loading", "ready", "draining", "dead", "stopped"]
    reason: str | None = None
    """Why it is dead, in one line."""

    @property
    def ok(self) -> bool:
        """Ready, and steps complete within their limit."""
        return self.state == "ready"


class AsyncEngine:
    """Serves one model on the running event loop.

    All methods belong to the loop that ran `start()`. `executor` None means the local one.
    """

    def __init__(self, config: EngineConfig, *, executor: Executor | None = None) -> None:
        raise NotImplementedError

    @classmethod
    def from_settings(cls, model: str = DEFAULT_MODEL, **settings: Any) -> AsyncEngine:
        """An engine from flat settings (names as in `oneloop.config`, same as the command line's)."""
        return cls(EngineConfig.from_flat({"model": model, **settings}))

    config: EngineConfig
    metrics: EngineMetrics
    served_model_names: tuple[str, ...]
    """At least one; the first is the one replies carry."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once started."""
        raise NotImplementedError

    @property
    def model_info(self) -> ModelInfo:
        """Sizes of the loaded model, once started."""
        raise NotImplementedError

    @property
    def default_sampling(self) -> SamplingDefaults:
        """What the model's generation_config gives to requests that leave a field open, once started."""
        raise NotImplementedError

    async def start(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Load model and tokenizer, then serve. Raises ModelError or ConfigError; the engine is then unusable."""
        raise NotImplementedError

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, give running ones up to `drain_timeout` seconds, abort the rest, free everything."""
        raise NotImplementedError

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """Check, tokenise (in a thread) and queue one request.

        Raises RequestError (400), OverloadedError (503, Retry-After) or EngineDeadError (503).
        """
        raise NotImplementedError

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """An async iterator over everything generated so far; the last one has finished=True.

        Leaving the iteration, or cancelling the task, aborts the request. Raises as submit(), and GenerationError
        when the request failed under way.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End the live requests with this id. False when there is none."""
        raise NotImplementedError

    def health(self) -> Health:
        """Cheap and without side effects; false as soon as the loop died or a step is overdue."""
        raise NotImplementedError

    def stats(self) -> Stats:
        """The core's gauges and counters."""
        raise NotImplementedError

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, computed off the loop."""
        raise NotImplementedError

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. RequestError naming the first id out of range."""
        raise NotImplementedError

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template's text for these messages, rendered off the loop. RequestError when it refuses them.

        Encode it with add_special_tokens=False: the template writes its own.
        """
        raise NotImplementedError
