"""`oneloop launch render`: prompts and replies without a model, for a process or a machine of their own. No torch."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from oneloop.api.peers import watch_peers
from oneloop.api.server import run_text_server
from oneloop.cli.arguments import TEXT_SETTINGS, engine_values, server_values
from oneloop.cli.logs import logging_to_stderr
from oneloop.cli.serve import bind
from oneloop.config import ModelConfig, ServerConfig
from oneloop.engine.assembly import generation_defaults
from oneloop.engine.event_loop import turn_loop
from oneloop.engine.interpreter import collect_rarely, settle_interpreter
from oneloop.engine.loop_times import LoopTimes
from oneloop.engine.params import SamplingDefaults
from oneloop.engine.text_engine import TextEngine
from oneloop.errors import ConfigError
from oneloop.loader.resolve import resolve_texts
from oneloop.tokenize.load import load_tokenizer
from oneloop.tokenize.renderer import choose_renderer

if TYPE_CHECKING:
    import argparse
    import socket

    from oneloop.tokenize.renderer import Renderer
    from oneloop.tokenize.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def launch_render(options: argparse.Namespace) -> int:
    """Run the server until a signal; returns the exit code. Raises ConfigError or ModelError before it serves."""
    given = engine_values(options)
    config = ModelConfig(**{name: given[name] for name in TEXT_SETTINGS if name in given})
    server_config = ServerConfig(**server_values(options))
    loop_times = LoopTimes()
    with (
        bind(server_config.host, server_config.port) as listening,
        logging_to_stderr(server_config.log_level.upper()),
    ):
        watch_peers(listening, server_config.write_timeout_s)
        collect_rarely()
        side = _TextSide(config)
        settle_interpreter()
        with asyncio.Runner(loop_factory=turn_loop(loop_times)) as runner:
            return runner.run(_run(side, server_config, listening))


class _TextSide:
    """A model's files, read."""

    def __init__(self, config: ModelConfig) -> None:
        files = resolve_texts(config.model, revision=config.revision)
        template = None if config.chat_template is None else Path(config.chat_template)
        own = files.path if config.tokenizer is None else Path(config.tokenizer).expanduser()
        gguf = files.gguf if config.tokenizer is None else None
        self._config = config
        self._tokenizer: Tokenizer = load_tokenizer(own, gguf=gguf, chat_template_file=template)
        self._renderer: Renderer = choose_renderer(
            self._tokenizer, config.renderer, own_template=template is None
        )
        self._defaults = SamplingDefaults.over(generation_defaults(config, files.generation))
        self._vocab_size = files.vocab_size or self._tokenizer.vocab_size
        asked = config.max_model_len
        length = asked if isinstance(asked, int) else files.max_model_len
        if length is None:
            raise ConfigError("max_model_len", "is not said by the model's files; give --max-model-len")
        self._max_model_len = length

    def engine(self) -> TextEngine:
        """On the running event loop."""
        config = self._config
        return TextEngine(
            self._tokenizer,
            self._renderer,
            served_model_names=config.served_model_name or (config.model,),
            default_sampling=self._defaults,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
        )


async def _run(side: _TextSide, config: ServerConfig, listening: socket.socket) -> int:
    stop = asyncio.Event()

    def signalled(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled, number)
    engine = side.engine()
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    log.info(
        "rendering for %s (%s) on http://%s:%d",
        ", ".join(engine.served_model_names), engine.renderer_name, host, port,
    )  # fmt: skip
    await run_text_server(engine, config, listening, stop)
    return 0
