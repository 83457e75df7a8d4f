"""Takes results of benches over into bench/results, and makes the tables of bench/README.md anew. Needs no GPU.

    python -m oneloop_bench.page [FILE…]

A result's "bench" says where it belongs; of figures that come by model, those of other models stay. A picture replaces
the one of its name.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oneloop_bench import sections, table
from oneloop_bench.report import BenchError, run_bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BENCH: Final = Path(__file__).parents[2]
RESULTS, README = BENCH / "results", BENCH / "README.md"
_OLDEST: Final = "h200"
"""Whose results do not say what they are."""


@dataclass(frozen=True, slots=True)
class Section:
    """One table, between marks of its name."""

    name: str
    markdown: Callable[[Mapping[str, Any]], str]
    merge: Callable[[dict[str, Any], Mapping[str, Any]], None]
    source: str = ""
    """The file with its results, where that is another section's."""

    @property
    def file(self) -> str:
        """Of the results, without its ending."""
        return self.source or self.name

    def put_into(self, page: str, results: Mapping[str, Any]) -> str:
        """The page with this table made anew. ValueError where the marks are missing."""
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        head, found, rest = page.partition(begin)
        _, also_found, tail = rest.partition(end)
        if not found or not also_found:
            raise ValueError(f"the page has no {begin} … {end}")
        return f"{head}{begin}\n\n{self.markdown(results)}\n\n{end}{tail}"


def replace_all(known: dict[str, Any], newer: Mapping[str, Any]) -> None:
    """The newer run alone."""
    known.clear()
    known.update(newer)


def replace_model(known: dict[str, Any], newer: Mapping[str, Any]) -> None:
    """The newer run in the place of its model's."""
    known.setdefault("bench", newer["bench"])
    known.setdefault("models", {})[newer["model"]] = dict(newer)


def merge_parts(known: dict[str, Any], newer: Mapping[str, Any]) -> None:
    """Of h200: what the newer run did not measure stays."""
    for model, workloads in newer["offline"].items():
        of_model = known.setdefault("offline", {}).setdefault(model, {})
        if measured := of_model.get("measured", {}) | workloads.get("measured", {}):
            workloads = {**workloads, "measured": measured}  # by workload
        of_model.update(workloads)
    for kind in ("online", "start", "determinism", "agreement"):
        known.setdefault(kind, {}).update(newer.get(kind, {}))


def merge_modes(known: dict[str, Any], newer: Mapping[str, Any]) -> None:
    """Of oneloop_bench.determinism: the newer run in the place of its model's of the same kind."""
    kind = "agreement" if any("mode" in row for row in newer["results"]) else "determinism"
    known.setdefault(kind, {})[newer["model"]] = dict(newer)


SECTIONS: Final = (
    Section("h200", table.markdown, merge_parts),
    Section("determinism", table.determinism, merge_modes, source="h200"),
    Section("kernels", sections.kernels, replace_all),
    Section("host_gap", sections.host_gap, replace_model),
    Section("event_loop", sections.event_loop, replace_model),
    Section("ledger", sections.ledger, replace_model),
)


def take(files: Sequence[Path], results: Path = RESULTS, readme: Path = README) -> None:
    """Merge the files into the folder `results` and make the page's tables anew.

    BenchError: a file that is not there, or of another kind. Then nothing was taken.
    """
    for file in files:
        if not file.is_file():
            raise BenchError(f"{file}: no such file")
    for file in files:
        if file.suffix == ".svg":
            (results / file.name).write_bytes(file.read_bytes())
            continue
        newer = json.loads(file.read_text(encoding="utf-8"))
        name = newer.get("bench", _OLDEST)
        section = next((section for section in SECTIONS if section.name == name), None)
        if section is None:
            raise BenchError(f"{file}: {name} is no section of the page")
        if newer.get("smoke"):
            raise BenchError(f"{file}: a smoke run, whose figures mean nothing")
        known = read(results, section.file)
        section.merge(known, newer)
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{section.file}.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        for label, why in newer.get("failed", {}).items():
            print(f"{file}: {label} failed: {why}")
    readme.write_text(made_anew(readme.read_text(encoding="utf-8"), results), encoding="utf-8")


def made_anew(page: str, results: Path = RESULTS) -> str:
    """The page with all its tables as the folder's files say."""
    for section in SECTIONS:
        page = section.put_into(page, read(results, section.file))
    return page


def read(results: Path, name: str) -> dict[str, Any]:
    """What is known; empty where there is no file."""
    file = results / f"{name}.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*")
    take(parser.parse_args().files)


if __name__ == "__main__":
    run_bench(main)
