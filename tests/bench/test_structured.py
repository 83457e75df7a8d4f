"""The bench of structured output: what it makes of rounds that are known, and a small run of it."""

import asyncio
import json

import pytest

from oneloop_bench import structured
from oneloop_bench.structured import Mix, Round, compare, engines, measure, read_options


def pairs(slower):
    """Eight pairs of 1,000 tokens on a machine whose speed drifts; the rounds with schemas slower by this factor."""
    drift = [1.0, 1.3, 0.9, 2.0, 1.1, 1.0, 1.6, 1.2]
    return [(Round([600, 400], slower * speed, 0.2), Round([600, 400], speed, 0.1)) for speed in drift]


def test_a_drifting_machine_decides_nothing():
    result = compare(pairs(1.0))
    assert (result["ratio"], result["interval"]) == (1.0, [1.0, 1.0])
    assert (result["schemas_cpu_us_per_token"], result["free_cpu_us_per_token"]) == (200.0, 100.0)


def test_a_cost_is_seen():
    result = compare(pairs(1.1))
    assert result["ratio"] == round(1 / 1.1, 4)
    assert result["schemas_tokens_per_s"] < result["free_tokens_per_s"]


@pytest.mark.held_at_most(
    1
)  # the vocabulary is loaded, grammars are looked up, an executor samples in Python
async def test_a_small_run():
    settings, _, _ = engines(read_options(["--step-ms", "1"]))["null"]
    result = await measure(settings, Mix(num_requests=10, max_tokens=24), 2)
    assert result["num_pairs"] == 2
    assert 100 < result["tokens_per_round"] <= 240
    assert 0.2 < result["ratio"] < 5
    assert json.loads(json.dumps(result)) == result


async def test_both_kinds_have_equal_lengths():
    seen = []

    async def run_round(engine, mix, lengths):
        await asyncio.sleep(0)
        seen.append(lengths)
        return Round([len(seen)] * mix.num_requests if lengths is None else lengths, 1.0, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structured, "run_round", run_round)
        found = await structured.run_pairs(None, Mix(2, 9), 4)
    assert [lengths is None for lengths in seen] == [True, False, *[True, False, False, True] * 2]
    assert [formed.lengths == free.lengths for formed, free in found[::2]] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.held_at_most(5)
@pytest.mark.parametrize("name", ["null", "cpu"])
async def test_schemas_cost_no_more_than_a_twentieth(name):
    """A machine too busy to tell fails nobody: the whole interval must be beyond the limit."""
    settings, mix, num_pairs = engines(read_options())[name]
    result = await measure(settings, mix, num_pairs)
    print(name, result)
    assert result["interval"][1] >= structured.MIN_RATIO, result
