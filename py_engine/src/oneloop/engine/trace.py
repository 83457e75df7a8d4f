"""Schedule traces (docs/schedule-trace.md): recording beside a running engine, and replaying without one."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oneloop.errors import ConfigError, TraceFileError
from oneloop_core import TraceError, TraceReplay

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop_core import Core, TraceDifference, TraceWriter

log = logging.getLogger(__name__)

CLOSE_LIMIT_S: Final = 10.0
"""How long close() waits for the disk."""
_SLICE_STEPS: Final = 2000


class TraceRecording:
    """Writes a core's trace from a thread of its own, from before its first request until close()."""

    def __init__(self, core: Core, path: str) -> None:
        """Opens the file, which may block; one that is there already is kept beside it, as *.previous: a server that is
        started again after a crash must not wipe out the trace of the crash. ConfigError when it cannot be made.
        """
        self._core = core
        file = Path(path).expanduser()
        try:
            if file.is_file() and not file.is_symlink() and file.stat().st_size:
                file.replace(file.with_name(f"{file.name}.previous"))
            writer = core.record_trace(file)
        except OSError as error:
            raise ConfigError("record_trace", f"cannot write {file}: {error}; name another file") from None
        # The thread must not hold the core: a core that goes ends its trace.
        self._thread = threading.Thread(target=_write, args=(writer, file), name="oneloop-trace", daemon=True)
        self._thread.start()
        log.info("recording the schedule to %s (no prompt or output text is in it)", file)

    def close(self) -> None:
        """End the trace and let the rest be written; waits for at most CLOSE_LIMIT_S. Idempotent."""
        self._core.close_trace()
        self._thread.join(CLOSE_LIMIT_S)


def _write(writer: TraceWriter, file: Path) -> None:
    num_steps, num_bytes, problem = writer.run()
    if problem is None:
        log.info("the schedule trace %s is complete: %d steps, %d bytes", file, num_steps, num_bytes)
    else:
        log.error(
            "the schedule trace %s ends after %d steps and %d bytes: %s; serving goes on without it",
            file, num_steps, num_bytes, problem,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What became of a replay."""

    replay: TraceReplay
    """As far as it came: its counts."""
    problem: str | None
    """Why the file cannot be read further."""

    @property
    def difference(self) -> TraceDifference | None:
        """The first decision that was another."""
        return self.replay.difference

    @property
    def is_identical(self) -> bool:
        """Whether the file is sound and every decision in it was made again."""
        return self.problem is None and self.difference is None


def replay_trace(
    path: Path, *, until: int | None = None, show: Callable[[str], None] | None = None
) -> ReplayReport:
    """Run a trace through a core without device or model, and compare each decision.

    until: stop when so many steps were scheduled. show: gets each event in a line. TraceFileError for a file that is no
    trace of this version or is not there.
    """
    try:
        replay = TraceReplay(path)
    except (TraceError, OSError) as error:
        raise TraceFileError(f"{path}: {error}") from None
    try:
        if show is None:
            _run(replay, until)
        else:
            while (until is None or replay.num_steps < until) and (line := replay.advance()) is not None:
                show(line)
    except TraceError as error:
        return ReplayReport(replay, str(error))
    return ReplayReport(replay, None)


def _run(replay: TraceReplay, until: int | None) -> None:
    """In slices: between them this thread hears of Ctrl-C."""
    while until is None or replay.num_steps < until:
        target = replay.num_steps + _SLICE_STEPS
        replay.run(target if until is None else min(target, until))
        if replay.num_steps < target:
            return
