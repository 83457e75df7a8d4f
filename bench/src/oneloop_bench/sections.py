"""Tables of bench/README.md beside that of table.py, each made from its file in bench/results."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from oneloop_bench.table import NOT_MEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Results = Mapping[str, Any]

GAP_US: Final = 10.0
"""Idle between decode steps, at most (issue B)."""
MIB: Final = 1 << 20
_OURS: Final = "oneloop"
_MAPS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "GEMM": (
        "Linear maps, share of the nearer ceiling, ours / cuBLAS (–: the plan is cuBLAS)",
        (_OURS, "cuBLAS"),
    ),
    "GEMM of 8 bits": (
        "Linear maps of 8 bits with the quantisation of their input, share of the nearer ceiling of 8-bit weights: "
        "scales by row / by block / the same map in bf16",
        (_OURS, "by block", "bf16"),
    ),
    "GEMM of 4 bits": (
        "Linear maps of 4 bits in groups of 128, share of the nearer ceiling of 4-bit weights: ours / always written "
        "out for cuBLAS",
        (_OURS, "written out"),
    ),
    "GEMM in the fixed order": (
        "Linear maps in the deterministic mode, share of the nearer ceiling: in the fixed order / by default",
        (_OURS, "default"),
    ),
}
"""Families that have a table of their own, by maps and rows: its heading, and whose shares stand in a cell."""
_SIZE: Final = re.compile(r" (\d.*|\S+)$")
"""Of a case's name, what those of one line differ in: from its first number on, or else its last word."""


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def kernels(results: Results) -> str:
    """All families with cases side by side, then the linear maps by rows."""
    if not results:
        return NOT_MEASURED
    rates = ", ".join(
        f"{name} {entry['rate']:,.0f} {entry['unit']}" for name, entry in results["ceilings"].items()
    )
    card = results["machine"].get("gpu", "no GPU")
    parts = [f"{card}, {results['utc']} UTC. Measured ceilings: {rates}."]
    parts.append(_families(results["rows"]))
    parts += [_maps(results["rows"], family) for family in _MAPS]
    if results["failed"]:
        listed = "; ".join(f"{name}: {why}" for name, why in results["failed"].items())
        parts.append(f"Without a figure: {listed}.")
    return "\n\n".join(part for part in parts if part)


def _families(rows: Sequence[Results]) -> str:
    """A line per family, beginning of the case's name and way; the ends of the names side by side."""
    lines: dict[tuple[str, str, str], list[Results]] = {}
    for row in rows:
        if row["family"] not in _MAPS:
            lines.setdefault((row["family"], _SIZE.sub("", row["case"]), row["way"]), []).append(row)
    head = ("kernel", "cases", "µs", "share of the ceiling", "to reach", "reached")
    return rows_of(head, [_family(key, found) for key, found in lines.items()]) if lines else ""


def _family(key: tuple[str, str, str], rows: Sequence[Results]) -> list[str]:
    family, first, way = key
    ceilings = list(dict.fromkeys(row["ceiling"] for row in rows if row["ceiling"]))
    shares = " / ".join("–" if row["share"] is None else f"{row['share']:.0%}" for row in rows)
    of = f" of {', '.join(ceilings)}" if ceilings else ""
    targets = list(dict.fromkeys(_target(row["target"]) for row in rows))
    return [
        f"{family}, {first}" + ("" if way == _OURS else f", {way}"),
        " / ".join(row["case"].removeprefix(first).strip() for row in rows),
        " / ".join(_us(row["us"]) for row in rows),
        shares + of,
        targets[0] if len(targets) == 1 else " / ".join(_target(row["target"]) for row in rows),
        " / ".join(_reached(row) for row in rows) if any(row["target"] for row in rows) else "–",
    ]


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _target(target: Results | None) -> str:
    if target is None:
        return "–"
    return f"≥ {target['share']:.0%}" if "share" in target else f"≤ {target['us']:.0f} µs"


def _reached(row: Results) -> str:
    """A tick, or how far it is from the target: points of a share, or per cent of a time."""
    target = row["target"]
    if target is None:
        return "–"
    if row["reached"]:
        return "✓"
    if "share" in target:
        return f"{100 * (row['share'] - target['share']):+.1f} points"
    return f"{row['us'] / target['us'] - 1:+.0%}"


def _maps(rows: Sequence[Results], family: str) -> str:
    """Maps by rows of x."""
    heading, ways = _MAPS[family]
    cells: dict[str, dict[int, dict[str, float | None]]] = {}
    for row in rows:
        if row["family"] == family:
            model, name, number, _ = row["case"].split(" ")
            found = cells.setdefault(f"{model} {name}", {}).setdefault(int(number), {})
            found[row["way"]] = row["share"]
    sizes = sorted({size for by_size in cells.values() for size in by_size})
    if not sizes:
        return ""
    return f"{heading}:\n\n" + rows_of(
        ("map, by rows", *map(str, sizes)),
        [
            [name, *(_shares(by_size.get(size, {}), ways) for size in sizes)]
            for name, by_size in cells.items()
        ],
    )


def _shares(found: Mapping[str, float | None], ways: Sequence[str]) -> str:
    shares = [found.get(way) for way in ways]
    return " / ".join("–" if share is None else f"{share:.0%}" for share in shares)


def host_gap(results: Results) -> str:
    """By model and batch: idle time of the device between steps and within them."""
    found = []
    for model, result in results.get("models", {}).items():
        for step in result["steps"]:
            gaps = step["gap_us"]
            if "batch" not in step or not gaps:
                continue
            border, within = gaps["border"], gaps["within"]
            found.append(
                [
                    f"{model}, {step['batch']}",
                    f"{step['step_ms']:.2f}",
                    f"{border['p50']:.1f} / {border['max']:.1f}",
                    f"≤ {GAP_US:.0f}",
                    "✓" if border["p50"] <= GAP_US else f"{border['p50'] / GAP_US - 1:+.0%}",
                    f"{within['p50']:.1f}",
                    f"{gaps['step_p50'] - 1e3 * step['step_ms_p50']:+.0f}",
                ]
            )
    head = (
        "decode, batch", "step, ms", "idle between steps, µs, p50 / max", "to reach", "reached",
        "idle within a step, µs, p50", "step with the tracing on, µs",
    )  # fmt: skip
    return rows_of(head, found) if found else NOT_MEASURED


def event_loop(results: Results) -> str:
    """By model and streams: µs of the event loop per step."""
    found = []
    names: list[str] = []
    for model, result in results.get("models", {}).items():
        for load in result["loads"]:
            names = list(load["parts_us"])
            found.append(
                [
                    f"{model}, {load['streams']}",
                    f"{load['wall_us']:,.0f}",
                    f"{load['loop_us']:,.0f} ({load['busy']:.0%})",
                    *(f"{us:.1f}" for us in load["parts_us"].values()),
                    f"{load['other_us']:.1f}",
                ]
            )
    if not found:
        return NOT_MEASURED
    return rows_of(("streams", "a step, µs", "the loop's time in it", *names, "other"), found)


def ledger(results: Results) -> str:
    """Items by model: planned and measured."""
    models = results.get("models", {})
    if not models:
        return NOT_MEASURED
    items = list(dict.fromkeys(item for result in models.values() for item in result["planned"]))

    def cell(result: Results, item: str) -> str:
        pair = [result[kind].get(item) for kind in ("planned", "measured")]
        return " / ".join("–" if value is None else f"{value / MIB:,.0f}" for value in pair)

    rows = [[item.replace("_", " "), *(cell(result, item) for result in models.values())] for item in items]
    sums = [
        [sum(result[kind].values()) / MIB for kind in ("planned", "measured")] for result in models.values()
    ]
    rows.append(["all", *(f"{planned:,.0f} / {measured:,.0f}" for planned, measured in sums)])
    return rows_of(("MiB, planned / measured", *models), rows)
