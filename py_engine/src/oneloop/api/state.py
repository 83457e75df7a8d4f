"""What all handlers share, under one typed key of the application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from oneloop.api.arrivals import Arrivals
from oneloop.api.errors import ApiError, ErrorKind
from oneloop.api.protocol.fields import shown
from oneloop.api.protocol.repeated import Repeated

if TYPE_CHECKING:
    from oneloop.api.body import BodyReader
    from oneloop.api.limits import Limits
    from oneloop.api.metrics import HttpMetrics
    from oneloop.api.outbox import Outbox
    from oneloop.api.protocol.chat import ChatRequest
    from oneloop.api.protocol.completions import CompletionRequest
    from oneloop.config import ServerConfig
    from oneloop.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiState:
    """Lives as long as the application."""

    engine: AsyncEngine
    config: ServerConfig
    limits: Limits
    bodies: BodyReader
    metrics: HttpMetrics
    outbox: Outbox
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


STATE = web.AppKey("state", ApiState)
REQUEST_ID = web.RequestKey("request_id", str)
"""The id that headers and reply ids carry: the client's own where it is safe, else a new one."""
