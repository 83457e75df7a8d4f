"""`oneloop serve`: takes the port, loads the model, serves until a signal, drains, ends.

SIGINT and SIGTERM stop accepting and give running requests `shutdown_timeout` seconds; a second one ends the process at
once. Exit code: 0 after a stop that was asked for, 1 when something failed, 128 + signal where it cut things short.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import resource
import signal
import socket
from typing import TYPE_CHECKING

from oneloop.api.listener import BACKLOG
from oneloop.api.peers import watch_peers
from oneloop.cli.arguments import engine_values, server_values
from oneloop.cli.loading import answering_while_loading
from oneloop.cli.logs import logging_to_stderr
from oneloop.config import EngineConfig, ServerConfig
from oneloop.engine.event_loop import turn_loop
from oneloop.engine.interpreter import collect_rarely, settle_interpreter
from oneloop.engine.loop_times import LoopTimes
from oneloop.errors import ConfigError
from oneloop.start_times import StartTimes, process_age_s

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine
    from typing import Any

    from oneloop.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 16
_OTHER_DESCRIPTORS = 64
"""Of the model's files, the device, the event loop."""


def serve(options: argparse.Namespace) -> int:
    """Run the server; returns the exit code. Raises ConfigError or ModelError before anything is served."""
    if options.plan or options.plan_device is not None:
        from oneloop.cli.plan import show_plan

        return show_plan(options, engine_values(options))
    if options.json:
        raise ConfigError("json", "is the plan's form; add --plan")
    engine_config = EngineConfig.from_flat(engine_values(options))
    server_config = ServerConfig(**server_values(options))
    level = server_config.log_level.upper()
    with bind(server_config.host, server_config.port) as listening, logging_to_stderr(level):
        # Before anybody is accepted: connections take over what the listening socket has by then.
        watch_peers(listening, server_config.write_timeout_s)
        warn_of_few_descriptors(allow_many_descriptors(), engine_config.resolved.max_num_seqs)
        collect_rarely()
        start_times = StartTimes(process_age_s())
        loop_times = LoopTimes()
        serving = _Serving(engine_config, server_config, listening, start_times, loop_times)
        with asyncio.Runner(loop_factory=turn_loop(loop_times)) as runner, loop_times.watching_gc():
            return runner.run(serving.run())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError, naming host or port, when there is none to be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"{host} is no address to listen on ({error})") from None
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        fault = f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                "host", f"{fault}; give an address of this machine, or 0.0.0.0 for all"
            ) from None
        raise ConfigError("port", f"{fault}; choose another with --port") from None


def allow_many_descriptors() -> int:
    """Raise this process's limit to what it may be: a streamed reply takes two descriptors, and 1,024 are soon gone.

    Returns the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY:
        return MAX_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def warn_of_few_descriptors(limit: int, max_num_seqs: int) -> None:
    """Say so where the batch cannot be full of streams. limit: what allow_many_descriptors() has reached."""
    needed = 2 * max_num_seqs + _OTHER_DESCRIPTORS
    if limit < needed:
        log.warning(
            "this process may open %d descriptors, and %d streams at once take %d: connections will have to wait; "
            "raise the limit (`ulimit -Hn`, LimitNOFILE) or lower --max-num-seqs", limit, max_num_seqs, needed,
        )  # fmt: skip


class _Serving:
    """The server's life as one readable chain: load, serve, stop."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listening: socket.socket,
        start_times: StartTimes,
        loop_times: LoopTimes,
    ) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._listening = listening
        self._start_times = start_times
        self._loop_times = loop_times
        self._stop = asyncio.Event()
        self._engine: AsyncEngine | None = None

    async def run(self) -> int:
        with self._start_times.part("import engine"):
            from oneloop.engine.async_engine import AsyncEngine

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        engine = AsyncEngine(self._engine_config, start_times=self._start_times, loop_times=self._loop_times)
        if not await self._load(engine):
            return 0
        self._engine = engine
        try:
            # A signal may have come when there was little left to load.
            return 0 if self._stop.is_set() else await self._serve(engine)
        finally:
            await engine.shutdown()

    async def _load(self, engine: AsyncEngine) -> bool:
        """Load with progress bars. False when a signal came first."""
        from oneloop.engine.progress import LoadBars
        from oneloop.engine.threads import in_daemon_thread

        async with answering_while_loading(self._listening):
            with LoadBars() as bars:
                importing = asyncio.create_task(in_daemon_thread(self._import_api, "oneloop-import"))
                loaded = await self._unless_stopped(engine.start(bars))
                if loaded:
                    await importing
        settle_interpreter()
        return loaded

    def _import_api(self) -> None:
        """So that it is there once the model is; while weights are read the interpreter has time for it."""
        with self._start_times.part("import api"):
            importlib.import_module("oneloop.api.server")

    async def _serve(self, engine: AsyncEngine) -> int:
        from oneloop.api.server import run_server

        host, port = self._listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        log.info("ready after %s", self._start_times)
        log.info("serving %s on http://%s:%d", ", ".join(engine.served_model_names), host, port)
        death = asyncio.create_task(self._stop_when_dead(engine))
        try:
            await run_server(engine, self._config, self._listening, self._stop)
        finally:
            death.cancel()
        return 1 if engine.health().state == "dead" else 0

    async def _stop_when_dead(self, engine: AsyncEngine) -> None:
        await engine.wait_dead()
        self._stop.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Await `work`; False, and `work` left behind, when a signal comes first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        if self._engine is not None and self._engine.num_requests:
            log.info(
                "stopping: running requests get %g s; once more to end at once", self._config.shutdown_timeout
            )
        else:
            log.info("stopping")
        self._stop.set()
