"""`oneloop bench serve`: loads a server, prints and saves what it gave. One run, or one per rate or concurrency."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from oneloop_bench.commands import serve_options
from oneloop_bench.commands.serve_plan import read_plan
from oneloop_bench.commands.values import as_usage_error
from oneloop_bench.load import plot, processes, result
from oneloop_bench.load.arrivals import arrival_times
from oneloop_bench.load.workload import Job

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from oneloop_bench.commands.serve_plan import Plan
    from oneloop_bench.load.processes import Outcome
    from oneloop_bench.load.workload import Session

add_options = serve_options.add_options


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises UsageError, OSError, RuntimeError, KeyboardInterrupt (what had ended is told)."""
    if options.measure_ceiling:
        from oneloop_bench.load.ceiling import tell_ceiling

        return tell_ceiling(options.client_processes)
    _check_targets(options)
    plan = read_plan(options)
    if plan.warm_ups:
        _warm_up(plan, options)
    results, is_good = [], True
    loads = list(itertools.product(options.request_rate, options.max_concurrency))
    for rate, concurrency in loads:
        found, outcome = _measure(plan, options, rate, concurrency)
        print(result.text(found), flush=True)
        if path := _result_path(options, found, is_one_of_several=len(loads) > 1):
            result.save(found, path, append=options.append_result)
            print(f"saved as {path}")
        if outcome.is_interrupted:
            raise KeyboardInterrupt
        results.append(found)
        is_good &= _is_good(outcome, strict=options.strict)
    if options.plot is not None:
        with as_usage_error():
            plot.draw(results, options.plot)
        print(f"drawn as {options.plot}")
    return 0 if is_good else 1


def _check_targets(options: argparse.Namespace) -> None:
    """What is to be written can be, as far as that is known before the run. UsageError, OSError."""
    if _saves(options):
        result.make_folder(options.result_dir / (options.result_filename or "result.json"))
    if options.plot is not None:
        with as_usage_error():
            plot.check(options.plot)


def _saves(options: argparse.Namespace) -> bool:
    return bool(options.save_result or options.append_result or options.save_detailed)


def _is_good(outcome: Outcome, *, strict: bool) -> bool:
    """Strict: every reply came and kept every check. Else: some came."""
    if strict:
        return all(record.is_complete and not record.problems for record in outcome.records)
    return any(record.is_complete for record in outcome.records)


def _measure(
    plan: Plan, options: argparse.Namespace, rate: float, concurrency: int | None
) -> tuple[dict[str, Any], Outcome]:
    """One run at one load."""
    if plan.self_timed:
        starts = [session.timestamp or 0.0 for session in plan.sessions]
    else:
        rng = np.random.default_rng((options.seed, 1))
        starts = arrival_times(
            len(plan.sessions), rate, rng, burstiness=options.burstiness, ramp_up=plan.ramp_up
        )
    outcome = _send(
        plan, options, plan.sessions, starts, concurrency, shows_progress=not options.disable_tqdm
    )
    about = {
        "date": result.now(),
        **plan.about,
        "num_prompts": sum(len(session.turns) for session in plan.sessions),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "max_concurrency": concurrency,
        "self_timed": plan.self_timed,
        "interrupted": outcome.is_interrupted,
    }
    return result.make_result(about, outcome, plan.selection, detailed=options.save_detailed), outcome


def _send(
    plan: Plan,
    options: argparse.Namespace,
    sessions: list[Session],
    starts: list[float],
    concurrency: int | None,
    *,
    shows_progress: bool,
) -> Outcome:
    """Send the sessions and wait for all that comes back."""
    numbers = list(itertools.accumulate((len(session.turns) for session in sessions), initial=0))
    job = Job(plan.url, plan.asking, sessions, starts, numbers[:-1], concurrency, options.insecure)
    with tqdm(total=numbers[-1], unit="req", disable=not shows_progress) as bar:

        def on_done(count: int) -> None:
            bar.update(count)

        return processes.run(job, options.client_processes, on_done)


def _warm_up(plan: Plan, options: argparse.Namespace) -> None:
    """Some requests before. RuntimeError when none of them is answered."""
    starts = [0.0] * len(plan.warm_ups)
    outcome = _send(plan, options, plan.warm_ups, starts, options.max_concurrency[0], shows_progress=False)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if not any(record.is_complete for record in outcome.records):
        error = str(outcome.records[0].error)
        raise RuntimeError(f"no warm-up request was answered: {error}{result.remedy(error)}")


def _result_path(
    options: argparse.Namespace, found: dict[str, Any], *, is_one_of_several: bool
) -> Path | None:
    """Where the result goes, if anywhere. Of several runs into one named file each gets its load in its name."""
    if not _saves(options):
        return None
    folder: Path = options.result_dir
    name = options.result_filename or result.file_name(found)
    path = folder / name
    if options.result_filename is None or options.append_result or not is_one_of_several:
        return path
    concurrency = found["max_concurrency"]
    load = f"{found['request_rate']}qps" + ("" if concurrency is None else f"-concurrency{concurrency}")
    return path.with_name(f"{path.stem}-{load}{path.suffix}")
