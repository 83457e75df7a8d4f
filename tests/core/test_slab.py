"""Buffers that are no slab, and steps out of order."""

from __future__ import annotations

import numpy as np
import pytest

from oneloop_core import SlabError


@pytest.fixture
def harness(make_harness):
    harness = make_harness()
    harness.core.submit([1, 2, 3], max_tokens=4)
    return harness


def misfits(buffer: np.ndarray) -> dict[str, object]:
    raw = np.zeros(len(buffer) + 128, np.uint8)
    start = -raw.ctypes.data % 64
    shifted = raw[start + 4 : start + 4 + len(buffer)]
    strided = np.zeros(2 * len(buffer), np.uint8)[::2]
    return {"bytes instead of": buffer[:-64], "multiple of 64": shifted, "contiguous": strided}


def test_misfitting_buffers_are_refused(harness) -> None:
    buffer = harness.ring[0].buffer
    for message, misfit in misfits(buffer).items():
        with pytest.raises(SlabError, match=message):
            harness.core.schedule(misfit)
    with pytest.raises(SlabError, match="bytes instead of"):
        harness.core.schedule(bytearray())
    with pytest.raises(SlabError, match="read-only"):
        harness.core.schedule(memoryview(buffer).toreadonly())
    for other in (None, 5, "slab", [1]):
        with pytest.raises(TypeError):
            harness.core.schedule(other)
    assert harness.core.stats().num_steps == 0
    harness.run()
    harness.assert_empty()


def test_commit_takes_the_oldest_step_and_a_fitting_buffer_only(harness) -> None:
    assert harness.launch()
    assert harness.launch()
    (first, slab), (second, _) = harness.in_flight
    for wrong in (second, 0, -1, 10**30):
        with pytest.raises(SlabError):
            harness.core.commit(wrong, slab.buffer)
        with pytest.raises(SlabError):
            harness.core.fail(wrong, "why")
    for misfit in misfits(slab.buffer).values():
        with pytest.raises(SlabError):
            harness.core.commit(first, misfit)
    harness.core.audit()
    harness.run()
    harness.assert_empty()


def test_commit_reads_a_read_only_view(harness) -> None:
    assert harness.launch()
    step, slab = harness.in_flight.pop()
    deltas = harness.core.commit(step, memoryview(slab.buffer).toreadonly())
    assert [len(delta.token_ids) for delta in deltas] == [1]


@pytest.mark.parametrize(
    ("token", "told"), [(-1, "NaN or +infinity"), (-2, "-2"), (256, "256"), (2**31 - 1, "2147483647")]
)
def test_a_sampled_id_out_of_range_ends_its_own_sequence_only(
    harness, reference, token: int, told: str
) -> None:
    other = harness.core.submit([4, 5], max_tokens=4, temperature=0.0)
    assert harness.launch()
    harness.in_flight[0][1]["output_token"][0] = token
    delta, _ = harness.commit()
    assert (delta.finish_reason, delta.token_ids) == ("error", [])
    assert told in delta.error
    harness.run()
    harness.assert_empty()
    assert harness.outputs[other, 0].token_ids == reference([4, 5], 4)


def test_no_more_steps_than_allowed_are_in_flight(harness) -> None:
    assert harness.launch()
    assert harness.launch()
    assert not harness.launch()
    assert harness.core.stats().num_steps_in_flight == 2


@pytest.mark.parametrize(("num_requests", "expected"), [(7, 0), (8, 5), (12, 5)])
def test_header_counts_the_widely_shared_blocks(make_harness, num_requests, expected) -> None:
    harness = make_harness(num_blocks=200, block_size=4, max_num_seqs=12, max_num_batched_tokens=64)
    for own in range(num_requests):
        harness.core.submit([*range(20), 30 + own], max_tokens=8, ignore_eos=True)
    assert harness.launch()
    assert harness.in_flight[-1][1].header("num_widely_shared") == expected
    harness.run()
    harness.core.submit([*range(20), 30], max_tokens=2, ignore_eos=True)
    assert harness.launch()
    assert harness.in_flight[-1][1].header("num_widely_shared") == 0
    harness.run()
    harness.assert_empty()
