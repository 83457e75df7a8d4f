"""`oneloop replay FILE`: runs a schedule trace through the core, without device and model, and compares each decision.

Exit code: 0 when all of it is identical, 1 when a decision differs or the file is damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oneloop.engine.trace import replay_trace

if TYPE_CHECKING:
    import argparse

    from oneloop.engine.trace import ReplayReport


def replay(options: argparse.Namespace) -> int:
    """Replay, print a summary; returns the exit code. Raises TraceFileError."""
    show = print if options.print else None
    report = replay_trace(Path(options.file), until=options.until, show=show)
    print("\n".join(_lines(report, options.until)))
    return 0 if report.is_identical else 1


def _lines(report: ReplayReport, until: int | None) -> list[str]:
    """What a person reads; until: as far as was asked for."""
    replay, difference = report.replay, report.difference
    lines = [
        f"{replay.num_steps} steps, {replay.num_tokens} tokens, {replay.num_requests} requests, "
        # Of a file of others it may be anything; a terminal shall not obey it.
        f"{replay.num_preemptions} preemptions; recorded by oneloop {ascii(replay.release)[1:-1]}"
    ]
    if replay.poisoned_during is not None:
        lines.append(f"the recorded core panicked in {replay.poisoned_during}")
    if difference is not None:
        return [
            *lines,
            f"DIFFERENT in step {difference.step_id}: {difference.field}",
            f"  expected {difference.expected}",
            f"  got      {difference.got}",
        ]
    if report.problem is not None:
        return [*lines, f"UNREADABLE beyond that: {report.problem}; what comes before is identical"]
    if until is not None and replay.num_steps >= until:
        return [*lines, "identical so far (there may be more steps)"]
    return [
        *lines,
        f"identical ({replay.end or 'no end mark: up to here, or to where the process was killed'})",
    ]
