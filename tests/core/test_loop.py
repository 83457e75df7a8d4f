"""Whole requests on the fake device: what comes out must be what the fake model gives without any scheduler."""

from __future__ import annotations

import random

import pytest

from oneloop_core import Vocabulary

BYTES = Vocabulary([bytes([byte]) for byte in range(256)])
GREEDY = {"temperature": 0.0}


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    """Half of them continue one of three shared prefixes."""
    rng = random.Random(seed)
    shared = [[rng.randrange(256) for _ in range(longest // 2)] for _ in range(3)]
    out = []
    for _ in range(count):
        prefix = rng.choice(shared)[: rng.randrange(longest // 2)] if rng.random() < 0.5 else []
        out.append(prefix + [rng.randrange(256) for _ in range(1 + rng.randrange(longest // 2))])
    return out


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64},
        {"enable_prefix_caching": False},
        {"block_size": 1, "num_blocks": 1024},
    ],
    ids=["plain", "chunked", "starved", "uncached", "block1"],
)
def test_outputs_equal_the_model_alone(make_harness, reference, depth: int, sizes: dict[str, int]) -> None:
    harness = make_harness(depth=depth, **sizes)
    rng = random.Random(depth)
    expected = {}
    for prompt in prompts(depth, 48, 100):
        num_tokens = 1 + rng.randrange(40)
        handle = harness.core.submit(prompt, max_tokens=num_tokens, **GREEDY)
        expected[handle] = reference(prompt, num_tokens)
        if rng.random() < 0.3:
            harness.turn()
    harness.run()
    harness.assert_empty()
    assert {handle: harness.outputs[handle, 0].token_ids for handle in expected} == expected
    assert {output.finish_reason for output in harness.outputs.values()} == {"length"}
    stats = harness.core.stats()
    assert stats.num_generation_tokens == sum(map(len, expected.values()))
    assert (stats.num_preemptions > 0) == ("block_size" in sizes and sizes["num_blocks"] == 40)
    assert (stats.num_prefix_hit_tokens > 0) == ("enable_prefix_caching" not in sizes)


@pytest.mark.parametrize("num_blocks", [256, 48])
def test_forks_share_their_prompt_and_nothing_else(make_harness, reference, num_blocks: int) -> None:
    harness = make_harness(num_blocks=num_blocks, block_size=4)
    wanted = {harness.core.submit(p, n=4, max_tokens=20, seed=i): p for i, p in enumerate(prompts(5, 12, 60))}
    harness.run()
    harness.assert_empty()
    for handle, prompt in wanted.items():
        outputs = [harness.outputs[handle, index].token_ids for index in range(4)]
        # Each sequence follows the model with its own seed, which its first token gives away.
        seeds = [(tokens[0] - reference(prompt, 1)[0]) % 256 for tokens in outputs]
        assert outputs == [reference(prompt, 20, seed=seed) for seed in seeds]
        assert len(set(seeds)) > 1


def test_a_seed_gives_the_same_tokens_whatever_else_runs(make_harness) -> None:
    results = []
    for others in (0, 7):
        harness = make_harness()
        for prompt in prompts(1, others, 40):
            harness.core.submit(prompt, max_tokens=30)
        handle = harness.core.submit([1, 2, 3], max_tokens=20, seed=1234, n=2)
        harness.run()
        results.append([harness.outputs[handle, index].token_ids for index in range(2)])
    assert results[0] == results[1]


def test_a_repeated_prompt_comes_from_the_cache(make_harness) -> None:
    harness = make_harness(block_size=16)
    prompt = list(range(100))
    for expected in (0, 96, 96):
        handle = harness.core.submit(prompt, max_tokens=3, **GREEDY)
        harness.run()
        assert harness.outputs[handle, 0].last.num_cached_tokens == expected
    siblings = harness.core.submit(prompt, n=3, max_tokens=3, **GREEDY)
    harness.run()
    assert [harness.outputs[siblings, index].last.num_cached_tokens for index in range(3)] == [96] * 3
    salted = harness.core.submit(prompt, max_tokens=3, cache_salt=b"other", **GREEDY)
    harness.run()
    assert harness.outputs[salted, 0].last.num_cached_tokens == 0
    assert harness.core.reset_prefix_cache()
    assert harness.core.stats().num_cached_blocks == 0


def finish(harness, prompt: list[int], **options):
    handle = harness.core.submit(prompt, **(GREEDY | options))
    harness.run()
    harness.assert_empty()
    output = harness.outputs[handle, 0]
    return output.token_ids, output.text, output.finish_reason, output.last.stop_reason


def test_finish_reasons(make_harness, reference) -> None:
    harness = make_harness(vocabulary=BYTES)
    prompt = [3, 1, 4]
    tokens = reference(prompt, 30)
    stop = tokens[10]
    first = tokens.index(stop) + 1
    text = bytes(tokens[:first]).decode("utf-8", "replace")
    before = bytes(tokens[: first - 1]).decode("utf-8", "replace")
    assert finish(harness, prompt, max_tokens=first - 1)[2:] == ("length", None)
    assert finish(harness, prompt, max_tokens=30, eos_token_ids=[stop]) == (
        tokens[:first],
        before,
        "stop",
        None,
    )
    assert finish(harness, prompt, max_tokens=30, stop_token_ids=[stop]) == (
        tokens[:first],
        before,
        "stop",
        stop,
    )
    included = {"stop_token_ids": [stop], "include_stop_str_in_output": True}
    assert finish(harness, prompt, max_tokens=30, **included) == (tokens[:first], text, "stop", stop)
    ignored = finish(harness, prompt, max_tokens=30, eos_token_ids=[stop], ignore_eos=True)
    assert (ignored[0], ignored[2]) == (tokens, "length")


def test_the_context_ends_a_sequence(make_harness) -> None:
    harness = make_harness(max_model_len=64)
    handle = harness.core.submit(list(range(60)), **GREEDY)
    harness.run()
    assert len(harness.outputs[handle, 0].token_ids) == 4
    assert harness.outputs[handle, 0].finish_reason == "length"


def test_stop_strings_end_the_text_and_the_sequence(make_harness, reference) -> None:
    vocabulary = Vocabulary([bytes([97 + i % 26, 97 + i // 26]) for i in range(256)])
    harness = make_harness(vocabulary=vocabulary)
    tokens = reference([7, 7], 40)
    text = vocabulary.decode(tokens)
    stop = text[11:16]
    end = text.index(stop) + len(stop)
    used = tokens[: -(-end // 2)]
    assert finish(harness, [7, 7], max_tokens=40, stop=[stop]) == (used, text[: end - 5], "stop", stop)
    included = finish(harness, [7, 7], max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert included == (used, text[:end], "stop", stop)
    assert finish(harness, [7, 7], max_tokens=40, stop=["no such text"])[1:] == (text, "length", None)
    later = finish(harness, [7, 7], max_tokens=40, stop=[stop], min_tokens=len(used))
    assert later[1:3] == (text, "length")


def test_without_detokenizing_there_are_ids_and_no_text(make_harness, reference) -> None:
    harness = make_harness(vocabulary=BYTES)
    assert finish(harness, [1], max_tokens=5, detokenize=False) == (reference([1], 5), "", "length", None)


def test_logprobs_arrive_as_the_device_wrote_them(make_harness, reference) -> None:
    harness = make_harness()
    with_top = harness.core.submit([5], max_tokens=6, logprobs=2, **GREEDY)
    alone = harness.core.submit([6], max_tokens=6, logprobs=0, **GREEDY)
    without = harness.core.submit([8], max_tokens=6, **GREEDY)
    harness.run()
    tokens = reference([5], 6)
    seen = [entry for delta in harness.outputs[with_top, 0].deltas for entry in delta.logprobs]
    assert seen == [(1 + t % 7, [(t, -float(t)), (0, 0.0), (1, -0.5)]) for t in tokens]
    seen = [entry for delta in harness.outputs[alone, 0].deltas for entry in delta.logprobs]
    assert seen == [(1 + t % 7, [(t, -float(t))]) for t in reference([6], 6)]
    assert all(delta.logprobs is None for delta in harness.outputs[without, 0].deltas)


def test_queue_time_is_told_once(make_harness) -> None:
    harness = make_harness()
    handle = harness.core.submit([5], max_tokens=3)
    harness.run()
    times = [delta.queue_s for delta in harness.outputs[handle, 0].deltas]
    assert times[0] >= 0
    assert times[1:] == [None, None]


def test_priority_runs_before_arrival(make_harness) -> None:
    harness = make_harness(policy="priority", max_num_seqs=1)
    handles = [harness.core.submit([i + 1], max_tokens=2, priority=p) for i, p in enumerate((5, 5, -3, 0))]
    order = []
    while harness.core.has_work():
        harness.turn()
        order += [request for (request, _) in harness.outputs if request not in order]
    assert order == [handles[2], handles[3], handles[0], handles[1]]


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_at_any_moment(make_harness, reference, depth: int) -> None:
    harness = make_harness(depth=depth, num_blocks=48, block_size=4)
    rng = random.Random(depth)
    live = {
        harness.core.submit(p, max_tokens=30, n=rng.choice((1, 2)), **GREEDY): p for p in prompts(9, 40, 60)
    }
    expected = dict(live)
    while harness.core.has_work():
        harness.turn()
        if live and rng.random() < 0.3:
            victim = rng.choice(list(live))
            ended = harness.outputs[victim, 0].finish_reason and harness.outputs.get((victim, 1), None)
            aborted = harness.core.abort(victim)
            assert aborted or ended or harness.outputs[victim, 0].finish_reason
            assert not harness.core.abort(victim)
            del live[victim]
            if aborted:
                del expected[victim]
                harness.core.drain()
                harness.core.audit()
                before = [len(harness.outputs[victim, i].deltas) for i in range(2)]
                harness.turn()
                assert [len(harness.outputs[victim, i].deltas) for i in range(2)] == before
    harness.assert_empty()
    assert expected
    for handle, prompt in expected.items():
        assert harness.outputs[handle, 0].token_ids == reference(prompt, 30)
    assert not harness.core.abort(0)
    assert not harness.core.abort(-5)
    assert not harness.core.abort(10**30)


def test_a_failed_step_ends_its_requests_and_poisons_no_cache(make_harness, reference) -> None:
    harness = make_harness()
    prompt = list(range(64))
    doomed = harness.core.submit(prompt, max_tokens=9, **GREEDY)
    assert harness.launch()
    step, _ = harness.in_flight.pop()
    (delta,) = harness.core.fail(step, "device lost")
    assert (delta.request, delta.finish_reason, delta.error) == (doomed, "error", "device lost")
    harness.core.audit()
    handle = harness.core.submit(prompt, max_tokens=9, **GREEDY)
    harness.run()
    harness.assert_empty()
    assert harness.outputs[handle, 0].last.num_cached_tokens == 0
    assert harness.outputs[handle, 0].token_ids == reference(prompt, 9)
    assert harness.core.stats().num_errored == 1


def test_deltas_are_lazy_and_outlive_their_batch(make_harness) -> None:
    harness = make_harness(vocabulary=BYTES)
    handles = [harness.core.submit([65 + i], max_tokens=2) for i in range(3)]
    assert harness.launch()
    step, slab = harness.in_flight.pop()
    deltas = harness.core.commit(step, slab.buffer)
    assert len(deltas) == 3
    assert [d.request for d in deltas] == [d.request for d in deltas] == handles
    iterator = iter(deltas)
    first = next(iterator)
    del deltas
    assert [next(iterator).index, next(iterator).index, next(iterator, "end"), next(iterator, "end")] == [
        0,
        0,
        "end",
        "end",
    ]
    assert first.request == handles[0]
    assert f"request={handles[0]}" in repr(first)
