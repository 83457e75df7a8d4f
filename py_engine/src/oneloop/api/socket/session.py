"""A socket: reads messages, begins and ends generations, and ends with them all."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import WSCloseCode, WSMsgType, web

from oneloop.api.errors import ApiError, ErrorKind, bad_request
from oneloop.api.handlers.chat import prepare_chat
from oneloop.api.handlers.completions import prepare_completion
from oneloop.api.limits import MAX_SOCKET_GENERATIONS, MAX_SOCKET_MESSAGE_BYTES, SOCKET_PING_S
from oneloop.api.protocol.fields import shown
from oneloop.api.socket import messages
from oneloop.api.socket.generation import Generation
from oneloop.api.socket.messages import Cancel, Credit, Open, Ping, read_message
from oneloop.api.state import STATE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.handlers.generation import Prepare
    from oneloop.api.socket.messages import Message
    from oneloop.api.state import ApiState

_ENDPOINTS: Mapping[str, Prepare] = {"chat": prepare_chat, "completions": prepare_completion}


async def stream_socket(request: web.Request) -> web.StreamResponse:
    """Upgrade, and serve until the client leaves or the server ends. ApiError 400, 403, 426."""
    state = request.app[STATE]
    _check_origin(request)
    socket = web.WebSocketResponse(
        heartbeat=SOCKET_PING_S, max_msg_size=MAX_SOCKET_MESSAGE_BYTES, compress=False, timeout=1.0
    )
    if not socket.can_prepare(request).ok:
        raise ApiError(
            ErrorKind.UPGRADE, "This route is a WebSocket (RFC 6455).", None, {"Upgrade": "websocket"}
        )
    await socket.prepare(request)
    state.sockets.add(socket)
    try:
        await _Session(state, socket).run()
    finally:
        state.sockets.discard(socket)
    return socket


async def close_sockets(state: ApiState) -> None:
    """The server ends: say so to all that are open."""
    goodbyes = [
        socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server is shut down")
        for socket in state.sockets
    ]
    await asyncio.gather(*goodbyes, return_exceptions=True)


def _check_origin(request: web.Request) -> None:
    """A page of another site may not use the socket in the name of whoever looks at it. ApiError (403)."""
    origin = request.headers.get("Origin")
    if origin is None:
        return
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        host = ""
    if not host or host != request.host:
        raise ApiError(ErrorKind.FORBIDDEN, "This socket is not open to pages of other sites.")


class _Session:
    """Belongs to the handler's task, which reads; each generation has a task of its own, which writes."""

    def __init__(self, state: ApiState, socket: web.WebSocketResponse) -> None:
        self._state = state
        self._socket = socket
        self._generations: dict[str, Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the client closes it, is cut, or sends what no client sends."""
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.TEXT:
                    await self._socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"send JSON as text")
                    return
                try:
                    await self._take(read_message(message.data))
                except ApiError as error:
                    await self._send(messages.failed(None, error))
        except ConnectionError:
            pass  # the client is gone
        finally:
            await self._end()

    async def _take(self, message: Message) -> None:
        """ApiError (400) where it cannot be done."""
        match message:
            case Ping():
                await self._send(messages.PONG)
            case Open():
                self._begin(message)
            case Credit(name, add):
                self._find(name).grant(add)
            case Cancel(name):
                self._find(name).cancel()

    def _begin(self, asked: Open) -> None:
        if asked.id in self._generations:
            raise bad_request("id", f"id: there is a generation {shown(asked.id)} already")
        if len(self._tasks) >= MAX_SOCKET_GENERATIONS:
            raise bad_request(
                "id", f"id: a socket has at most {MAX_SOCKET_GENERATIONS} generations at a time"
            )

        def retire() -> None:
            if self._generations.get(asked.id) is generation:
                del self._generations[asked.id]

        prepare = _ENDPOINTS[asked.endpoint]
        generation = Generation(self._state, asked, prepare, self._send, retire)
        self._generations[asked.id] = generation
        task = asyncio.get_running_loop().create_task(self._run(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _find(self, name: str) -> Generation:
        if name not in self._generations:
            raise bad_request("id", f"id: there is no generation {shown(name)}; it may have ended")
        return self._generations[name]

    @staticmethod
    async def _run(generation: Generation) -> None:
        with contextlib.suppress(ConnectionError):  # the reader's side notices, and ends the others
            await generation.run()

    async def _send(self, message: str) -> None:
        """ConnectionError when the client is gone, or has taken nothing for too long."""
        if self._socket.closed:
            raise ConnectionResetError("the socket is closed")
        try:
            async with asyncio.timeout(self._state.config.write_timeout_s):
                await self._socket.send_str(message)
        except TimeoutError:
            self._cut()
            raise ConnectionResetError("the client reads nothing") from None

    def _cut(self) -> None:
        """A reader that takes nothing: there is no point in a farewell."""
        transport = self._socket.get_extra_info("transport")
        if transport is not None:
            transport.abort()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
