"""The simulated scheduler: its model of a device agrees with measured figures, and a limit does what it is for."""

from __future__ import annotations

import pytest

from oneloop_bench.schedule_sim import WORKLOADS, simulate

BY_NAME = {workload.name: workload for workload in WORKLOADS}


@pytest.mark.parametrize("name", [workload.name for workload in WORKLOADS])
def test_the_measured_figures_come_out(name):
    workload = BY_NAME[name]
    result = simulate(workload, {})
    assert result["seconds"] == pytest.approx(workload.measured["seconds"], rel=0.1)
    if name.startswith("llama8b") and workload.host is not None:
        for figure in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
            assert result[figure] == pytest.approx(workload.measured[figure], rel=0.15), figure


def test_smaller_steps_beside_streams_narrow_the_gaps():
    workload = BY_NAME["llama8b_conc256"]
    whole, limited = simulate(workload, {}), simulate(workload, {"mixed_step_tokens": 1024})
    assert limited["itl_p99"] < 0.65 * whole["itl_p99"]
    assert limited["seconds"] < 1.03 * whole["seconds"]


def test_offline_runs_are_not_limited():
    workload = BY_NAME["llama8b_1000x1024_128"]
    assert simulate(workload, {"mixed_step_tokens": 256}) == simulate(workload, {})
