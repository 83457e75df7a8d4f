"""The command line of `oneloop bench`. Each command's options are in its own file; nothing heavy is imported here."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from oneloop_bench.commands import compare, latency, serve, startup, throughput
from oneloop_bench.commands.values import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_USAGE = 2
_COMMANDS = {
    "serve": (serve, "load a running server, any that speaks the OpenAI protocol, and tell its latencies"),
    "throughput": (throughput, "how much this engine generates when it is handed all prompts at once"),
    "latency": (latency, "how long this engine takes for one batch"),
    "startup": (startup, "seconds until `oneloop serve` is ready, by part, cold and warm"),
    "compare": (compare, "saved results of `bench serve` side by side, with ratios"),
}


def make_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(prog="oneloop bench", description="Measure servers, and this engine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        module.add_options(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0, 1 failed, 2 usage). Raises OneloopError."""
    options = make_parser().parse_args(arguments)
    try:
        code: int = _COMMANDS[options.command][0].run(options)
        return code
    except UsageError as error:
        print(f"oneloop bench {options.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (OSError, RuntimeError) as error:
        print(f"oneloop bench {options.command}: failed: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
