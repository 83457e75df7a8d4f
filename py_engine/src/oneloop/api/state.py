"""What all handlers share, under typed keys of the application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from oneloop.api.arrivals import Arrivals
from oneloop.api.errors import ApiError, ErrorKind, bad_request
from oneloop.api.handlers.json_reply import ignored_header
from oneloop.api.protocol.fields import shown
from oneloop.api.protocol.repeated import Repeated

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from oneloop.api.auth import Owners
    from oneloop.api.body import BodyReader
    from oneloop.api.limits import Limits
    from oneloop.api.metrics import HttpMetrics
    from oneloop.api.outbox import Outbox
    from oneloop.api.parsing import OutputFormats
    from oneloop.api.protocol.chat import ChatRequest
    from oneloop.api.protocol.completions import CompletionRequest
    from oneloop.api.responses.store import ResponseStore
    from oneloop.config import ServerConfig
    from oneloop.engine.async_engine import AsyncEngine, Health
    from oneloop.engine.logprobs import Vocabulary
    from oneloop.engine.metrics import EngineMetrics
    from oneloop.engine.params import SamplingDefaults
    from oneloop.tokenize.conversation import ChatForm, Conversation
    from oneloop.tokenize.tokenizer import Tokenizer


class TextSide(Protocol):
    """What handlers need that run no model: AsyncEngine has it, and so has TextEngine."""

    served_model_names: tuple[str, ...]
    metrics: EngineMetrics

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def default_sampling(self) -> SamplingDefaults:
        """What requests get for fields they leave open."""

    def health(self) -> Health:
        """Whether requests are served now."""

    def check_accepting(self) -> None:
        """Raises what every request would get."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    async def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The same, and each token's characters."""

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""

    async def render_chat(
        self, conversation: Conversation | Callable[[], Conversation], form: ChatForm
    ) -> str:
        """A prompt's text."""

    async def id_vocabulary(self) -> Vocabulary:
        """Tokens named "token_id:5"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextState:
    """What every application has. Lives as long as it does."""

    engine: TextSide
    config: ServerConfig
    limits: Limits
    bodies: BodyReader
    metrics: HttpMetrics
    formats: OutputFormats
    arrivals: Arrivals = field(default_factory=Arrivals)
    repeated_completions: Repeated[CompletionRequest] = field(default_factory=Repeated)
    repeated_chats: Repeated[ChatRequest] = field(default_factory=Repeated)
    started: int
    """Unix time at which the model became available."""

    def check_model(self, name: str | None) -> str:
        """The name replies carry: the client's, or the first served one when none was given. ApiError (404)."""
        served = self.engine.served_model_names
        if not name:
            return served[0]
        if name not in served:
            raise ApiError(
                ErrorKind.NOT_FOUND,
                f"The model {shown(name)} does not exist; this server has: {', '.join(served)}.",
                "model",
            )
        return name

    def note_ignored(self, names: Sequence[str]) -> Mapping[str, str]:
        """The header of a reply that lists these fields, which have no effect. ApiError (400) with --strict-fields.

        To be asked before anything is queued.
        """
        if names and self.config.strict_fields:
            name = names[0][:_MAX_SHOWN]
            raise bad_request(name, f"{name} is unknown or has no effect here, and this server is strict.")
        return ignored_header(names)


_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiState(TextState):
    """What an application has that runs a model."""

    engine: AsyncEngine
    outbox: Outbox
    owners: Owners
    responses: ResponseStore
    sockets: set[web.WebSocketResponse] = field(default_factory=set)
    """Those that are open."""
    running_responses: dict[str, str] = field(default_factory=dict)
    """Ids of responses that run → their requests'."""
    background: set[asyncio.Task[None]] = field(default_factory=set)
    """Replies that run without their client."""


TEXT = web.AppKey("text", TextState)
"""In every application."""
STATE = web.AppKey("state", ApiState)
"""In those that run a model; the same object."""
REQUEST_ID = web.RequestKey("request_id", str)
"""The id that headers and reply ids carry: the client's own where it is safe, else a new one."""
