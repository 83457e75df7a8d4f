"""`oneloop chat`: a conversation in the terminal, with a model loaded here or behind a server."""

from __future__ import annotations

import os
import sys
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from oneloop.cli.arguments import engine_values, sampling_values
from oneloop.cli.session import LocalModel, RemoteModel
from oneloop.engine.params import SamplingParams
from oneloop.errors import GenerationError, RequestError

if TYPE_CHECKING:
    import argparse

    from oneloop.cli.session import ChatModel, Message

HELP = "/reset starts afresh, /exit or Ctrl-D ends, Ctrl-C stops an answer, and ends at the prompt."
PROMPT = ">>> "


def chat(options: argparse.Namespace) -> int:
    """Talk until the end of the input; returns the exit code. Ctrl-C at the prompt is a KeyboardInterrupt."""
    params = SamplingParams(**sampling_values(options))
    with _open_model(options) as model:
        return Conversation(model, params, system=options.system).run()


def _open_model(options: argparse.Namespace) -> LocalModel | nullcontext[RemoteModel]:
    settings = engine_values(options)
    if options.url is None:
        return LocalModel(settings)
    key = options.api_key or os.environ.get("ONELOOP_API_KEY")
    return nullcontext(RemoteModel(options.url, model=settings.get("model"), api_key=key))


class Conversation:
    """Reads lines, streams answers, keeps the history."""

    def __init__(self, model: ChatModel, params: SamplingParams, *, system: str | None) -> None:
        self._model = model
        self._params = params
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._interactive = sys.stdin.isatty()

    def run(self) -> int:
        """Until /exit or the end of the input; returns the exit code: 1 when the last answer failed."""
        if self._interactive:
            import readline  # noqa: F401  (line editing and history for input())

            print(HELP, file=sys.stderr)
        failed = False
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/reset":
                    self._messages = list(self._opening)
                case "/help":
                    print(HELP, file=sys.stderr)
                case _:
                    failed = not self._answer(line)
        return int(failed)

    def _read(self) -> str | None:
        try:
            return input(PROMPT) if self._interactive else input()
        except EOFError:
            if self._interactive:
                print()
            return None

    def _answer(self, question: str) -> bool:
        """Stream the answer to one message. False when there was none; the message is then not kept."""
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            # Closed at once, not when it is collected: closing is what stops the model.
            with closing(self._model.reply(self._messages, self._params)) as reply:  # type: ignore[type-var]
                for text in reply:
                    pieces.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except (RequestError, GenerationError) as error:
            sys.stdout.flush()
            print(f"{'' if not pieces else chr(10)}oneloop: error: {error}", file=sys.stderr)
            self._messages.pop()
            return False
        print()
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        return True
