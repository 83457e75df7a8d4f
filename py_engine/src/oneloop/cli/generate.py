"""`oneloop generate`: completes one prompt and prints it as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from oneloop.cli.arguments import engine_values, sampling_values
from oneloop.cli.session import LocalModel
from oneloop.engine.params import SamplingParams
from oneloop.errors import RequestError

if TYPE_CHECKING:
    import argparse


def generate(options: argparse.Namespace) -> int:
    """Print the completion; returns the exit code. Raises OneloopError; KeyboardInterrupt ends it at once."""
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    params = SamplingParams(**sampling_values(options))
    with LocalModel(engine_values(options)) as model:
        if options.chat:
            pieces = model.reply([{"role": "user", "content": prompt}], params)
        else:
            pieces = model.complete(prompt, params)
        try:
            for text in pieces:
                sys.stdout.write(text)
                sys.stdout.flush()
        except RequestError as error:
            print(f"oneloop: error: {error}", file=sys.stderr)
            return 1
        finally:
            sys.stdout.write("\n")
    return 0
