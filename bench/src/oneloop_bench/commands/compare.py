"""`oneloop bench compare a.json b.json`: saved results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oneloop_bench.commands.values import as_usage_error
from oneloop_bench.load import compare, plot, result

if TYPE_CHECKING:
    import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """See main."""
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="results of `bench serve`, ours or vLLM's; ratios are to the first",
    )
    parser.add_argument("--all", action="store_true", help="every percentile, std and max too")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="draw latencies against load, a curve per label (needs matplotlib)",
    )


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises UsageError, OSError."""
    names, results = [], []
    with as_usage_error():
        for path in options.results:
            found = result.load(path)
            results += found
            names += [
                path.stem if len(found) == 1 else f"{path.stem}:{number}" for number in range(len(found))
            ]
        print(compare.table(names, results, every=options.all))
        if options.plot is not None:
            plot.draw(results, options.plot)
            print(f"drawn as {options.plot}")
    return 0
