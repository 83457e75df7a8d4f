"""A closed loop over a server of this machine that must be right: what our own benches drive servers with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop_bench.load.processes import run
from oneloop_bench.load.workload import Asking, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop_bench.load.processes import Outcome
    from oneloop_bench.load.workload import Session


def closed_loop(
    port: int, model: str, sessions: Sequence[Session], num_streams: int, *, num_processes: int = 1
) -> Outcome:
    """Stream the completions greedily and to their full length, num_streams at once.

    RuntimeError when a reply fails or breaks a check.
    """
    numbers = list(range(len(sessions)))
    asking = Asking(model, ignore_eos=True, extra_body={"temperature": 0})
    job = Job(f"http://127.0.0.1:{port}", asking, list(sessions), [0.0] * len(sessions), numbers, num_streams)
    outcome = run(job, num_processes, lambda count: None)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    wrong = [record for record in outcome.records if record.error or record.problems]
    if wrong:
        why = wrong[0].error or f"checks failed: {', '.join(wrong[0].problems)}"
        raise RuntimeError(f"{len(wrong)} of {len(outcome.records)} replies are wrong: {why}")
    return outcome
