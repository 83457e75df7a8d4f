"""The bench beside vLLM's scheduler, without vLLM: our side serves its mixes, and the comparison finds what differs."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from oneloop_bench.scheduler.compare import ScheduleError, check_same, check_served, rows_of, run_in_turns
from oneloop_bench.scheduler.core_side import CoreSide
from oneloop_bench.scheduler.mixes import cached_admissions, decodes, everything
from oneloop_bench.scheduler.peer import PeerError, PeerSide
from oneloop_bench.scheduler.workload import Mix
from oneloop_core import Vocabulary

VOCAB_SIZE = 1000
TEXT = list(range(3, 103))


@pytest.fixture(scope="module")
def served():
    """A mix and its schedule."""
    mix = everything(TEXT, VOCAB_SIZE)
    with closing(CoreSide()) as side:
        steps = run_in_turns(mix, {"ours": side})["ours"]
    return mix, [rows_of(flat) for flat in steps.rows]


@pytest.mark.parametrize(
    "mix",
    [decodes(20, 30, TEXT, VOCAB_SIZE), cached_admissions(10, TEXT, VOCAB_SIZE)],
    ids=lambda mix: mix.name,
)
def test_text_changes_no_schedule(mix):
    vocabulary = Vocabulary([b" %d" % token for token in range(VOCAB_SIZE)])
    with closing(CoreSide()) as ids, closing(CoreSide(vocabulary, streams=True)) as text:
        results = run_in_turns(mix, {"ids": ids, "text": text})
        assert len(text.hand_over) == mix.num_steps
        assert any(text.hand_over)
        assert not any(ids.hand_over)
    for steps in results.values():
        columns = (steps.submit, steps.schedule, steps.update, steps.rows)
        assert [len(column) for column in columns] == [mix.num_steps] * len(columns)
        assert all(steps.schedule[mix.measured_from : mix.measured_to])


def test_measured_steps_are_what_they_are_called():
    mix = decodes(20, 30, TEXT, VOCAB_SIZE)
    with closing(CoreSide()) as side:
        rows = run_in_turns(mix, {"ours": side})["ours"].rows
    for flat in rows[mix.measured_from : mix.measured_to]:
        assert [count for _, _, count in rows_of(flat)] == [1] * 20

    mix = cached_admissions(10, TEXT, VOCAB_SIZE)
    with closing(CoreSide()) as side:
        rows = run_in_turns(mix, {"ours": side})["ours"].rows
    for step, flat in enumerate(rows):
        is_cached = mix.measured_from <= step < mix.measured_to
        assert rows_of(flat) == [(step, 8176, 16) if is_cached else (step, 0, 8192)]


def test_everything_has_what_it_is_for(served):
    mix, schedule = served
    first_rows = {}
    for rows in schedule:
        for request, start, count in rows:
            first_rows.setdefault(request, (start, count))
    num_hits = sum(start > 0 for start, _ in first_rows.values())
    assert num_hits > len(mix.requests) / 2
    assert any(
        start + count < len(mix.prompts[mix.requests[request].prompt])
        for request, (start, count) in first_rows.items()
    )
    assert max(map(len, schedule)) == mix.max_num_seqs, "nothing ever queued"
    assert not schedule[-1]


def lacks_a_row(rows):
    return rows[1:]


def gives_a_token_less(rows):
    (request, start, count), *others = rows
    return [(request, start, count - 1), *others]


def finds_a_block_less(rows):
    (request, start, count), *others = rows
    return [(request, start - 16, count + 16), *others]


def runs_another_request(rows):
    (_, start, count), *others = rows
    return [(999, start, count), *others]


@pytest.mark.parametrize("alter", [lacks_a_row, gives_a_token_less, finds_a_block_less, runs_another_request])
def test_an_altered_schedule_is_found(served, alter):
    mix, schedule = served
    altered = [*schedule[:100], alter(schedule[100]), *schedule[101:]]
    check_same(mix, {"ours": schedule, "copy": list(schedule)})
    with pytest.raises(ScheduleError, match=r"everything, step 100: (ours|theirs) gives request"):
        check_same(mix, {"ours": schedule, "theirs": altered})


def test_a_step_more_or_late_is_found(served):
    mix, schedule = served
    with pytest.raises(ScheduleError, match="step 50"):
        check_same(mix, {"ours": schedule, "theirs": [*schedule[:50], [], *schedule[50:]]})
    with pytest.raises(ScheduleError, match=f"step {len(schedule)}"):
        check_same(mix, {"ours": schedule, "theirs": [*schedule, [(1, 2, 3)]]})


def test_what_both_sides_leave_out_is_found(served):
    mix, schedule = served
    check_served(mix, schedule)
    with pytest.raises(ScheduleError, match=r"request \d+ goes on at token"):
        check_served(mix, [*schedule[:100], lacks_a_row(schedule[100]), *schedule[101:]])
    forgotten = [[row for row in rows if row[0] != 7] for rows in schedule]
    with pytest.raises(ScheduleError, match="request 7 got 0 of"):
        check_served(mix, forgotten)


def test_a_mix_is_the_same_after_the_pipe():
    mix = everything(TEXT, VOCAB_SIZE)
    assert Mix.from_json(mix.to_json()) == mix


def test_a_peer_that_ends_is_told_with_what_it_said():
    with (
        closing(PeerSide(Path(sys.executable), module="oneloop_bench.no_such_peer")) as peer,
        pytest.raises(PeerError, match=r"status 1:\n(.|\n)*No module named oneloop_bench.no_such_peer"),
    ):
        peer.run(1)
