"""The application: routes, and what every request passes through on its way in and out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web

from oneloop.api.auth import KeyCheck
from oneloop.api.body import BodyReader
from oneloop.api.errors import SERVER_NAME, bad_request, error_response, told
from oneloop.api.framing import framing_fault
from oneloop.api.handlers.chat import chat_completions
from oneloop.api.handlers.completions import completions
from oneloop.api.handlers.debug import scheduler, stacks
from oneloop.api.handlers.embeddings import embeddings
from oneloop.api.handlers.health import health
from oneloop.api.handlers.metrics import metrics
from oneloop.api.handlers.models import list_models, show_model
from oneloop.api.handlers.tokenize import detokenize, tokenize
from oneloop.api.handlers.version import version
from oneloop.api.limits import Limits
from oneloop.api.metrics import CLIENT_GONE, HttpMetrics
from oneloop.api.outbox import Outbox
from oneloop.api.protocol.sampling import safe_request_id
from oneloop.api.replies import new_request_id
from oneloop.api.state import REQUEST_ID, STATE, ApiState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.typedefs import Handler, Middleware

    from oneloop.config import ServerConfig
    from oneloop.engine.async_engine import AsyncEngine


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", health),
    ("GET", "/ping", health),
    ("POST", "/ping", health),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:.+}", show_model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)
DEBUG_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/debug/scheduler", scheduler),
    ("GET", "/debug/stacks", stacks),
)
"""Only with --enable-debug-endpoints; else there are no such routes."""
OPEN_HANDLERS: frozenset[Handler] = frozenset({health})
"""What answers without the key; everything else, unknown paths included, asks for it."""


def create_app(engine: AsyncEngine, config: ServerConfig) -> web.Application:
    """The application over a started engine."""
    app = web.Application(middlewares=[_gate(KeyCheck(config.api_key))])
    routes = (*ROUTES, *DEBUG_ROUTES) if config.enable_debug_endpoints else ROUTES
    app[STATE] = _make_state(engine, config, [path for _, path, _ in routes])
    app.on_response_prepare.append(_mark)
    for method, path, handler in routes:
        if method == "GET":
            app.router.add_get(path, handler)
        else:
            app.router.add_route(method, path, handler)
    return app


def _make_state(engine: AsyncEngine, config: ServerConfig, paths: Iterable[str]) -> ApiState:
    tokenizer = engine.tokenizer
    scheduler = engine.config.scheduler
    longest_piece = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    limits = Limits(
        vocab_size=engine.model_info.vocab_size,
        max_model_len=engine.model_info.max_model_len,
        max_sequences=config.max_sequences_per_request,
        max_n=min(config.max_sequences_per_request, engine.config.resolved.max_num_seqs),
        max_prompt_chars=engine.model_info.max_model_len * longest_piece,
        max_body_bytes=config.max_body_bytes,
        priority=scheduler.scheduling_policy == "priority",
    )
    return ApiState(
        engine=engine,
        config=config,
        limits=limits,
        bodies=BodyReader(limits),
        metrics=HttpMetrics(dict.fromkeys(paths)),
        outbox=Outbox(engine.metrics.loop),
        started=int(time.time()),
    )


def one_exit(inner: Handler) -> Handler:
    """Around everything the application does: every error becomes the wire format here, every request is counted.

    Outside of aiohttp's middlewares, because its `Expect` handling refuses requests before they run.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = safe_request_id(request.headers.get("X-Request-Id")) or new_request_id()
        begin = time.monotonic()
        status = CLIENT_GONE
        try:
            try:
                response = await inner(request)
            except ConnectionError:
                raise
            except Exception as error:
                response = error_response(told(error, request[REQUEST_ID]))
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = None if resource is None else resource.canonical
            request.app[STATE].metrics.observe(route, request.method, status, time.monotonic() - begin)

    return handle


async def _mark(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every reply."""
    response.headers["Server"] = SERVER_NAME
    response.headers["X-Request-Id"] = request[REQUEST_ID]


def _gate(keys: KeyCheck) -> Middleware:
    """Framing, host and key, decided before the handler runs and on the handler the router chose."""

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        fault = framing_fault(request.version, request.headers)
        if fault is not None:
            return error_response(bad_request(None, fault), close=True)
        if request.match_info.handler not in OPEN_HANDLERS:
            keys.check(request)
        return await handler(request)

    return gate
