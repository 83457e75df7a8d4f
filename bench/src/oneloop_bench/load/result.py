"""The result of a run: one JSON object with the names that users of `vllm bench serve` know, as a file and as text."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from oneloop_bench.load.metrics import METRICS, summarize
from oneloop_bench.load.processes import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop_bench.load.metrics import Selection
    from oneloop_bench.load.record import Record

ABOUT_FIELDS: Final = (
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "dataset_name", "seed"),
    *("burstiness", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("num_prompts", "request_rate", "max_concurrency", "self_timed", "interrupted"),
)
"""What was run."""
BUSY_SHARE: Final = 0.8
"""Of a core: a client that is busier measures itself."""
LEAST_BUSY_S: Final = 0.5
"""In a shorter run it is its own start that keeps it busy."""
LATE_MS: Final = 20.0
_WIDTH: Final = 56
_VARYING: Final = re.compile(r"(?P<status>status \d+)|[\w-]*\d[\w-]*")
"""Numbers and ids; the status stays."""
_COUNTS: Final = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests",
    "total_token_throughput": "Total token throughput (tok/s)",
}


def make_result(
    about: Mapping[str, Any], outcome: Outcome, selection: Selection, *, detailed: bool
) -> dict[str, Any]:
    """about: date, model, traffic and other settings, which come first. detailed: also lists, an entry per request."""
    figures = summarize(outcome.records, outcome.begin, selection)
    result = {
        **about,
        **figures,
        "checks": _checks(outcome.records),
        "client": _client(outcome, figures["duration"], is_limited=about["max_concurrency"] is not None),
    }
    result["error_messages"] = _error_messages(outcome.records)
    return {**result, **_details(outcome)} if detailed else result


def _error_messages(records: Sequence[Record]) -> dict[str, int]:
    """The most frequent ones. Those that differ only in numbers and ids are counted together, as the first of them."""
    firsts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error is not None:
            alike = _VARYING.sub(r"\g<status>", record.error)
            counts[firsts.setdefault(alike, record.error)] += 1
    return dict(counts.most_common(5))


def remedy(error: str) -> str:
    """What helps against a failure that the workload brings about, to stand behind its message; "" where unknown."""
    if "vocab" in error.lower():
        return "; --token-id-range LOW:HIGH says which ids are drawn, --prompt-form text sends words"
    return ""


def field_names(selection: Selection) -> set[str]:
    """What a result has beside a user's own metadata."""
    figures = make_result({"max_concurrency": None}, Outcome([], 0.0, [0.0]), selection, detailed=True)
    return {*ABOUT_FIELDS, *figures}


def _checks(records: Sequence[Record]) -> dict[str, Any]:
    """How many complete replies were judged, and how many failed which check."""
    done = [record for record in records if record.is_complete]
    problems = Counter(name for record in done for name in record.problems)
    failed = sum(bool(record.problems) for record in done)
    return {"checked": len(done), "failed": failed, "problems": dict(problems)}


def _client(outcome: Outcome, duration: float, *, is_limited: bool) -> dict[str, Any]:
    """Whether the client itself kept up: its CPU time over the run's duration, and how late it sent what was due."""
    shares = [cpu_s / duration if duration else 0.0 for cpu_s in outcome.cpu_s]
    # With a limit on concurrency requests wait for the server's replies, which is no fault of the client.
    late = [] if is_limited else [record.sent - record.scheduled for record in outcome.records]
    return {
        "processes": len(shares),
        "cpu_share": [round(share, 3) for share in shares],
        "p99_send_delay_ms": float(np.percentile(late, 99)) * 1e3 if late else None,
    }


def _details(outcome: Outcome) -> dict[str, Any]:
    records = outcome.records
    return {
        "input_lens": [record.input_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [record.times[0] - record.sent if record.times else 0.0 for record in records],
        "itls": [np.diff(record.times).tolist() if record.times else [] for record in records],
        "latencies": [record.end - record.sent for record in records],
        "start_times": [record.sent - outcome.begin for record in records],
        "queue_times": [record.sent - record.scheduled for record in records],
        "errors": [record.error or "" for record in records],
        "problems": [record.problems for record in records],
    }


def file_name(about: Mapping[str, Any]) -> str:
    """As `vllm bench serve` names its results."""
    model = str(about["model_id"]).rstrip("/").rpartition("/")[2]
    if "ramp_up_strategy" in about:
        start, end = about["ramp_up_start_rps"], about["ramp_up_end_rps"]
        rate = f"ramp-up-{about['ramp_up_strategy']}-{start:g}qps-{end:g}qps"
    else:
        rate = f"{about['request_rate']}qps"
    concurrency = about["max_concurrency"]
    part = "" if concurrency is None else f"-concurrency{concurrency}"
    return f"{about['label']}-{rate}{part}-{model}-{about['date']}.json"


def now() -> str:
    """The date as results have it."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def save(result: Mapping[str, Any], path: Path, *, append: bool = False) -> None:
    """One JSON object in the file; append: a line more in it."""
    make_folder(path)
    data = orjson.dumps(result)
    if append:
        with path.open("ab") as file:
            file.write((b"\n" if file.tell() else b"") + data)
    else:
        path.write_bytes(data + b"\n")


def make_folder(path: Path) -> None:
    """Of a file that is to be written. OSError where it cannot be, or the path is a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path.parent} cannot be written to")


def finite(value: Any) -> float | None:
    """The value, where it is a finite number: files of others may hold anything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -sys.float_info.max <= value <= sys.float_info.max else None


def load(path: Path) -> list[dict[str, Any]]:
    """The results in a file: one object, or one per line. ValueError when it has none; OSError."""
    data = path.read_bytes()
    try:
        found = [json.loads(data)]  # takes the NaN and Infinity that others write
    except ValueError:
        try:
            found = [json.loads(line) for line in data.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path} is no result: {error}") from None
    if not found or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path} is no result: it holds no JSON object")
    return found


def text(result: Mapping[str, Any]) -> str:
    """What a person reads."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for name, label in _COUNTS.items():
        if result[name] is not None:
            lines.append(_row(label, result[name]))
    for metric, heading in METRICS.items():
        ending = f"_{metric}_ms"
        found = {name.removesuffix(ending): value for name, value in result.items() if name.endswith(ending)}
        if any(value is not None for value in found.values()):
            lines.append(f"{heading:-^{_WIDTH}}")
            lines += [
                _row(f"{kind.capitalize()} {metric.upper()} (ms)", value) for kind, value in found.items()
            ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines + _remarks(result))


def _row(label: str, value: float | None) -> str:
    shown = "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return f"{label + ':':<40} {shown:>15}"


def _remarks(result: Mapping[str, Any]) -> list[str]:
    """What was wrong: replies, requests, and a client at its limit."""
    checks, client = result["checks"], result["client"]
    lines = []
    if result.get("interrupted"):
        num_ended = result["completed"] + result["failed"]
        lines = [f"INTERRUPTED: only {num_ended} of {result['num_prompts']} requests had ended."]
    if checks["failed"]:
        problems = ", ".join(f"{name} {count}" for name, count in checks["problems"].items())
        lines += [f"{checks['failed']} of {checks['checked']} replies failed a check: {problems}"]
    else:
        lines += [f"All checks held on {checks['checked']} replies."] if checks["checked"] else []
    for message, count in result["error_messages"].items():
        lines.append(f"{count} request{'s' * (count != 1)} failed: {message}{remedy(message)}")
    late_ms = client["p99_send_delay_ms"]
    if late_ms is not None and late_ms >= LATE_MS:
        lines.append(
            f"The client sent what was due up to {late_ms:.0f} ms late (p99), which no latency tells."
        )
    busy = max(client["cpu_share"], default=0.0)
    if busy >= BUSY_SHARE and result["duration"] >= LEAST_BUSY_S:
        lines.append(
            f"The client was busy for {busy:.0%} of the run: these figures are partly its own. "
            f"Use more than {client['processes']} --client-processes."
        )
    return lines
