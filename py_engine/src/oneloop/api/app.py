"""The application: routes, and what every request passes through on its way in and out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from aiohttp import web

from oneloop.api.anthropic.errors import anthropic_error, has_anthropic_errors
from oneloop.api.anthropic.handler import count_tokens, messages
from oneloop.api.auth import KeyCheck, Owners
from oneloop.api.body import BodyReader
from oneloop.api.errors import SERVER_NAME, bad_request, error_response, told
from oneloop.api.framing import framing_fault
from oneloop.api.handlers.chat import chat_completions
from oneloop.api.handlers.completions import completions
from oneloop.api.handlers.control import control
from oneloop.api.handlers.debug import experts, scheduler, stacks
from oneloop.api.handlers.derender import derender, derender_chat, derender_completion
from oneloop.api.handlers.embeddings import embeddings
from oneloop.api.handlers.generate import generate
from oneloop.api.handlers.health import health
from oneloop.api.handlers.metrics import metrics
from oneloop.api.handlers.models import list_models, show_model
from oneloop.api.handlers.render import render, render_chat, render_completion
from oneloop.api.handlers.tokenize import detokenize, tokenize, tokenizer_info
from oneloop.api.handlers.version import version
from oneloop.api.limits import Limits
from oneloop.api.metrics import CLIENT_GONE, HttpMetrics
from oneloop.api.outbox import Outbox
from oneloop.api.parsing import OutputFormats
from oneloop.api.protocol.sampling import safe_request_id
from oneloop.api.replies import new_request_id
from oneloop.api.responses.handler import (
    cancel_response,
    create_response,
    delete_response,
    render_response,
    show_response,
)
from oneloop.api.responses.store import ResponseStore
from oneloop.api.socket.session import stream_socket
from oneloop.api.state import REQUEST_ID, STATE, TEXT, ApiState, TextState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.typedefs import Handler, Middleware

    from oneloop.api.errors import ApiError
    from oneloop.api.state import TextSide
    from oneloop.config import ServerConfig
    from oneloop.engine.async_engine import AsyncEngine
    from oneloop.engine.text_engine import TextEngine


Routes: TypeAlias = "tuple[tuple[str, str, Handler], ...]"

TEXT_ROUTES: Routes = (
    ("GET", "/health", health),
    ("GET", "/ping", health),
    ("POST", "/ping", health),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:.+}", show_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/v1/chat/completions/render", render_chat),
    ("POST", "/v1/completions/render", render_completion),
    ("POST", "/render", render),
    ("POST", "/v1/chat/completions/derender", derender_chat),
    ("POST", "/v1/completions/derender", derender_completion),
    ("POST", "/derender", derender),
)
"""What needs no model."""
ROUTES: Routes = (
    *TEXT_ROUTES,
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/inference/v1/generate", generate),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/responses", create_response),
    ("POST", "/v1/responses/render", render_response),
    ("GET", "/v1/responses/{response_id}", show_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response),
    ("POST", "/v1/requests/{request_id}/control", control),
    ("GET", "/v1/stream", stream_socket),
)
INFO_ROUTES: Routes = (("GET", "/tokenizer_info", tokenizer_info),)
"""Only with --enable-tokenizer-info-endpoint."""
DEBUG_ROUTES: Routes = (
    ("GET", "/debug/scheduler", scheduler),
    ("GET", "/debug/experts", experts),
    ("GET", "/debug/stacks", stacks),
)
"""Only with --enable-debug-endpoints; else there are no such routes."""
OPEN_HANDLERS: frozenset[Handler] = frozenset({health})
"""What answers without the key; everything else, unknown paths included, asks for it."""


def create_app(engine: AsyncEngine, config: ServerConfig) -> web.Application:
    """The application over a started engine."""
    routes = (*ROUTES, *DEBUG_ROUTES) if config.enable_debug_endpoints else ROUTES
    app, routes = _make_app(config, routes)
    state = _make_state(engine, config, [path for _, path, _ in routes])
    app[STATE] = app[TEXT] = state
    return app


def create_text_app(engine: TextEngine, config: ServerConfig) -> web.Application:
    """The application of a server without a model."""
    app, routes = _make_app(config, TEXT_ROUTES)
    limits = _make_limits(engine, config, engine.vocab_size, engine.max_model_len)
    app[TEXT] = TextState(
        engine=engine,
        config=config,
        limits=replace(limits, priority=True),
        bodies=BodyReader(limits),
        metrics=HttpMetrics(dict.fromkeys(path for _, path, _ in routes)),
        formats=OutputFormats.choose(config, engine.tokenizer),
        started=int(time.time()),
    )
    return app


def _make_app(config: ServerConfig, routes: Routes) -> tuple[web.Application, Routes]:
    """An application without its state, and the routes that it has."""
    app = web.Application(middlewares=[_gate(KeyCheck(config.api_key))])
    if config.enable_tokenizer_info_endpoint:
        routes = (*routes, *INFO_ROUTES)
    app.on_response_prepare.append(_mark)
    for method, path, handler in routes:
        if method == "GET":
            app.router.add_get(path, handler)
        else:
            app.router.add_route(method, path, handler)
    return app, routes


def _make_limits(engine: TextSide, config: ServerConfig, vocab_size: int, max_model_len: int) -> Limits:
    tokenizer = engine.tokenizer
    longest_piece = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    return Limits(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_sequences=config.max_sequences_per_request,
        max_n=config.max_sequences_per_request,
        max_prompt_chars=max_model_len * longest_piece,
        max_body_bytes=config.max_body_bytes,
        priority=False,
        request_templates=config.trust_request_chat_template,
        force_usage=config.enable_force_include_usage,
    )


def _make_state(engine: AsyncEngine, config: ServerConfig, paths: Iterable[str]) -> ApiState:
    info = engine.model_info
    limits = replace(
        _make_limits(engine, config, info.vocab_size, info.max_model_len),
        max_n=min(config.max_sequences_per_request, engine.config.resolved.max_num_seqs),
        priority=engine.config.scheduler.scheduling_policy == "priority",
    )
    return ApiState(
        engine=engine,
        config=config,
        limits=limits,
        bodies=BodyReader(limits),
        metrics=HttpMetrics(dict.fromkeys(paths)),
        outbox=Outbox(engine.metrics.loop),
        owners=Owners(config.api_key),
        responses=ResponseStore(
            config.response_store_entries, config.response_store_bytes, config.response_store_ttl_s
        ),
        formats=OutputFormats.choose(config, engine.tokenizer),
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
                response = _told(request, told(error, request[REQUEST_ID]))
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = None if resource is None else resource.canonical
            request.app[TEXT].metrics.observe(route, request.method, status, time.monotonic() - begin)

    return handle


async def _mark(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every reply."""
    response.headers["Server"] = SERVER_NAME
    response.headers["X-Request-Id"] = request[REQUEST_ID]
    if has_anthropic_errors(request.path):
        response.headers["request-id"] = request[REQUEST_ID]


def _told(request: web.Request, error: ApiError, *, close: bool = False) -> web.Response:
    """The reply to a request that cannot be served, in the form of the API that it is of."""
    body = anthropic_error(error, request[REQUEST_ID]) if has_anthropic_errors(request.path) else None
    return error_response(error, close=close, body=body)


def _gate(keys: KeyCheck) -> Middleware:
    """Framing, host and key, decided before the handler runs and on the handler the router chose."""

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        fault = framing_fault(request.version, request.headers)
        if fault is not None:
            return _told(request, bad_request(None, fault), close=True)
        if request.match_info.handler not in OPEN_HANDLERS:
            keys.check(request)
        return await handler(request)

    return gate
