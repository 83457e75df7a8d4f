"""`oneloop generate`: completes one prompt and prints it as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from oneloop.cli.arguments import DEFAULT_GENERATE_TOKENS, engine_values, sampling_values
from oneloop.cli.session import LocalModel
from oneloop.engine.params import SamplingParams
from oneloop.errors import OneloopError

if TYPE_CHECKING:
    import argparse


def generate(options: argparse.Namespace) -> int:
    """Print the completion; returns the exit code. Raises OneloopError; KeyboardInterrupt ends it at once."""
    prompt = _read_prompt() if options.prompt is None else options.prompt
    params = SamplingParams(**sampling_values(options))
    with LocalModel(engine_values(options), max_tokens=DEFAULT_GENERATE_TOKENS) as model:
        if options.chat:
            pieces = model.reply([{"role": "user", "content": prompt}], params)
        else:
            pieces = model.complete(prompt, params)
        has_begun = False
        try:
            for text in pieces:
                has_begun = True
                sys.stdout.write(text)
                sys.stdout.flush()
        except (OneloopError, KeyboardInterrupt):
            if has_begun:
                print()
            raise
        print()
    return 0


def _read_prompt() -> str:
    """All of standard input; a person who types it is told that we wait."""
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D on a line of its own ends it.", file=sys.stderr)
    return sys.stdin.read()
