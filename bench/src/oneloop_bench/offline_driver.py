"""The anchors' offline driver, as it is, on batch sizes of one's choice.

    python -m oneloop_bench.offline_driver FOLDER [--batch 1,16] -- OPTIONS OF bench_offline.py

FOLDER has the drivers. Without --batch decode steps are of the sizes that its workloads name.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def choose_batches(offline: Mapping[str, Sequence[dict[str, Any]]], batches: Sequence[int]) -> None:
    """Of all workloads that are decode steps. offline: model → workloads, as in the anchors' workloads.py."""
    for workloads in offline.values():
        for workload in workloads:
            if "bs" in workload:
                workload["bs"] = list(batches)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before "--", and behind it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=lambda text: [int(size) for size in text.split(",")])
    mine, theirs = split_arguments(sys.argv[1:])
    chosen = parser.parse_args(mine)
    driver = chosen.folder / "bench_offline.py"
    if chosen.batch:
        sys.path.insert(0, str(chosen.folder))
        # The driver imports the same module, under the same name, and so finds it as it is left here.
        choose_batches(import_module("workloads").OFFLINE, chosen.batch)
    sys.argv = [str(driver), *theirs]
    runpy.run_path(str(driver), run_name="__main__")


if __name__ == "__main__":
    main()
