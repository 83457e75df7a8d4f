"""Models that a person talks to from the terminal: one loaded here, or one behind a server."""

from __future__ import annotations

import http
import http.client
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from oneloop.errors import ConfigError, GenerationError, RequestError
from oneloop.tokenize.messages import read_conversation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from oneloop.engine.params import SamplingParams

Message = dict[str, str]

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""How long a server may take over its next token."""
MAX_LINE_BYTES = 1 << 20


class ChatModel(Protocol):
    """Answers conversations, piece by piece. Closing the iterator ends the answer."""

    def reply(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """The answer's text as it comes. Raises RequestError or GenerationError."""


class LocalModel:
    """A model in this process."""

    def __init__(self, settings: Mapping[str, Any], *, max_tokens: int | None = None) -> None:
        """Loads it; bars show while it takes time and a person watches.

        max_tokens: of answers whose parameters name none, as far as the context reaches; None: the model's default.
        """
        from contextlib import nullcontext

        from oneloop.engine.async_engine import AsyncEngine
        from oneloop.engine.engine_thread import EngineThread
        from oneloop.engine.progress import LoadBars

        engine = AsyncEngine.from_settings(**settings)
        self._max_tokens = max_tokens
        with LoadBars(leave=False) if sys.stderr.isatty() else nullcontext() as bars:
            self._thread = EngineThread(engine, bars)

    def reply(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """As ChatModel."""
        return self._thread.iterate(lambda: self._chat(messages, params))

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[str]:
        """The continuation of a plain prompt as it comes."""
        return self._thread.iterate(lambda: self._pieces(prompt, params, add_special_tokens=True))

    async def _chat(self, messages: Sequence[Message], params: SamplingParams) -> AsyncIterator[str]:
        prompt = await self._thread.engine.render_chat(read_conversation(messages))
        async for text in self._pieces(prompt, params, add_special_tokens=False):
            yield text

    async def _pieces(
        self, prompt: str, params: SamplingParams, *, add_special_tokens: bool
    ) -> AsyncIterator[str]:
        engine = self._thread.engine
        defaults = engine.default_sampling
        if self._max_tokens is not None:
            defaults = replace(defaults, max_tokens=self._max_tokens)
        resolved = params.resolve(
            defaults,
            vocab_size=engine.model_info.vocab_size,
            max_sequences=engine.config.resolved.max_num_seqs,
        )
        async with await engine.submit(prompt, resolved, add_special_tokens=add_special_tokens) as stream:
            async for deltas in stream:
                for delta in deltas:
                    if delta.finish_reason == "error":
                        raise GenerationError(delta.error or "the request failed")
                    if delta.text:
                        yield delta.text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.close()


class RemoteModel:
    """A model behind a server that speaks the OpenAI protocol."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        """url: http(s)://host[:port][/prefix], with or without /v1. model: None means the server's own."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError("url", f"{url!r} is no server address; write it like http://127.0.0.1:8000")
        self._https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        self._address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._model = model
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def reply(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """As ChatModel. Leaving early closes the connection, which aborts the request at the server."""
        body: dict[str, Any] = {"messages": list(messages), "stream": True, **_wire_params(params)}
        if self._model is not None:
            body["model"] = self._model
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_TIMEOUT_S)
            connection.request("POST", self._path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                message = _error_message(response.status, response.read(MAX_LINE_BYTES))
                if response.status == http.HTTPStatus.UNAUTHORIZED:
                    message += "; give the server's key with --api-key or ONELOOP_API_KEY"
                raise RequestError(None, message)
            yield from _texts(response)
        except ConnectionRefusedError:
            raise GenerationError(
                f"nothing answers at {self._address}; is the server running there?"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise GenerationError(f"{self._host}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _wire_params(params: SamplingParams) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    values = {name: getattr(params, name) for name in names}
    values["stop"] = list(params.stop or ()) or None
    return {name: value for name, value in values.items() if value is not None}


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    """Text of a stream of server-sent events. GenerationError for an error event, or an end without [DONE]."""
    while line := response.readline(MAX_LINE_BYTES):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise GenerationError("the server sent something that is no event") from None
        if "error" in event:
            raise GenerationError(_error_message(500, data))
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                yield text
    raise GenerationError("the server ended the answer before it was complete")


def _error_message(status: int, body: bytes) -> str:
    """The message of an OpenAI error body, else the status."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
