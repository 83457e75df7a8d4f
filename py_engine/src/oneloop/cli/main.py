"""`oneloop`: parses the command line and runs one command. Light: torch and aiohttp are imported by the command."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import oneloop
from oneloop.cli.arguments import (
    DEFAULT_GENERATE_TOKENS,
    add_engine_options,
    add_plan_options,
    add_sampling_options,
    add_server_options,
    add_text_options,
)
from oneloop.errors import OneloopError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="oneloop", description="An LLM serving engine in one event loop.")
    parser.add_argument("--version", action="version", version=f"oneloop {oneloop.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="serve a model over the OpenAI protocol", usage="%(prog)s [MODEL] [options]"
    )
    add_engine_options(serve, model_positional=True)
    add_server_options(serve)
    add_plan_options(serve)
    serve.set_defaults(usage=serve)

    launch = commands.add_parser("launch", help="serve a part of the work, for others to put together")
    parts = launch.add_subparsers(dest="part", required=True, metavar="PART")
    rendering = parts.add_parser(
        "render",
        help="prompts and replies without a model: /render, /derender, /tokenize",
        usage="%(prog)s [MODEL] [options]",
    )
    add_text_options(rendering)
    add_server_options(rendering)
    rendering.set_defaults(usage=rendering)

    chat = commands.add_parser(
        "chat", help="talk to a model in the terminal", usage="%(prog)s [MODEL] [options]"
    )
    chat.add_argument("--url", help="talk to the server at this address instead of loading a model")
    chat.add_argument("--api-key", help="the server's key, with --url; also ONELOOP_API_KEY")
    chat.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    add_sampling_options(chat, max_tokens=None)
    add_engine_options(chat, model_positional=True)
    chat.set_defaults(usage=chat)

    replay = commands.add_parser("replay", help="run a schedule trace again, without a model, and compare")
    replay.add_argument("file", metavar="FILE", help="what `oneloop serve --record-trace FILE` wrote")
    replay.add_argument("--until", type=_steps, metavar="STEP", help="stop when so many steps were scheduled")
    replay.add_argument("--print", action="store_true", help="a line for each event")
    replay.set_defaults(usage=replay)

    generate = commands.add_parser(
        "generate", help="complete one prompt and print it as it comes", usage="%(prog)s [PROMPT] [options]"
    )
    generate.add_argument("prompt", nargs="?", help="text to continue; default: what standard input holds")
    generate.add_argument("--chat", action="store_true", help="treat the prompt as a user's message")
    add_sampling_options(generate, max_tokens=DEFAULT_GENERATE_TOKENS)
    add_engine_options(generate, model_positional=False)
    generate.set_defaults(usage=generate)

    # Only named here: its options are the other distribution's, and are parsed there.
    commands.add_parser("bench", help="measure a server, any that speaks the OpenAI protocol, or this engine")
    return parser


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is needed")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0, 1 failed, 2 usage, 130 interrupted)."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == ["bench"]:
            from oneloop.cli.bench import bench

            return bench(given[1:])
        options, unknown = make_parser().parse_known_args(given)
        if unknown:  # told with the command's own usage; argparse by itself shows that of `oneloop`
            options.usage.error(f"unrecognized arguments: {' '.join(unknown)}")
        match options.command:
            case "serve":
                from oneloop.cli.serve import serve

                return serve(options)
            case "launch":
                from oneloop.cli.launch import launch_render

                return launch_render(options)
            case "chat":
                from oneloop.cli.chat import chat

                return chat(options)
            case "replay":
                from oneloop.cli.replay import replay

                return replay(options)
            case _:
                from oneloop.cli.generate import generate

                return generate(options)
    except OneloopError as error:
        print(f"oneloop: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; what is still buffered has nowhere to go.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return EXIT_FAILED


def run() -> NoReturn:
    """The console script: like main(), but ends at once instead of waiting for threads that are still loading."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            code = code or EXIT_FAILED
    os._exit(code)


if __name__ == "__main__":
    run()
