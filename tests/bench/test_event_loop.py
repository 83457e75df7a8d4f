"""The event loop's time per step, from two readings of /metrics."""

import pytest

from oneloop_bench.event_loop import per_step, read_options


def reading(steps, turns, **parts):
    return {
        "steps_total": float(steps),
        "turn_seconds_sum": turns,
        "gc_pause_seconds_sum": 0.0,
        **{f'part_seconds_total{{part="{part}"}}': seconds for part, seconds in parts.items()},
    }


def test_parts_and_the_rest_add_up_to_the_loops_time():
    before = reading(100, 1.0, schedule=0.1, send=0.2)
    after = reading(1100, 3.0, schedule=0.15, send=1.2)
    found = per_step(before, after, wall_s=8.0)
    assert found["steps"] == 1000
    assert (found["wall_us"], found["loop_us"], found["busy"]) == (8000.0, 2000.0, 0.25)
    assert (found["parts_us"]["schedule"], found["parts_us"]["send"]) == (50.0, 1000.0)
    assert found["parts_us"]["commit"] == 0.0
    assert found["other_us"] == 950.0


def test_no_steps_is_no_figure():
    with pytest.raises(ValueError, match="no step"):
        per_step(reading(5, 1.0), reading(5, 2.0), wall_s=1.0)


def test_options():
    options = read_options(["folder", "--streams", "1,2", "--serve-options", "--device cpu"])
    assert (options.model, options.streams, options.serve_options) == ("folder", "1,2", "--device cpu")
    assert options.json is None
