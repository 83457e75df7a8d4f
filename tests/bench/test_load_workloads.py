"""Workloads: lengths, what is shared, the same for a seed; files and their faults."""

import json

import numpy as np
import pytest

from oneloop_bench.load import datasets
from oneloop_bench.load.datasets import (
    MultiTurn,
    PrefixRepetition,
    RandomLengths,
    ShareGptShape,
    cut_lognormal,
)
from oneloop_bench.load.files import CustomPrompts, TimedTrace
from oneloop_bench.load.prompts import IdPrompts, WordPrompts, common_words, named_tokenizer, prompt_source

IDS = IdPrompts((1000, 30000))
WORDS = WordPrompts([f" {word}" for word in common_words()], is_exact=False)


def rng(seed=0):
    return np.random.default_rng(seed)


def turns(workload, count, source=IDS, seed=0):
    sessions = workload.sessions(count, source, rng(seed))
    assert all(len(session.turns) == 1 for session in sessions)
    return [session.turns[0] for session in sessions]


def length(prompt):
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


@pytest.mark.parametrize("source", [IDS, WORDS])
def test_random_lengths(source):
    found = turns(RandomLengths(100, 20, 0.5, 7), 400, source)
    lengths = [length(turn.prompt) for turn in found]
    assert lengths == [turn.input_len for turn in found]
    assert min(lengths) == 50 + 7
    assert max(lengths) == 150 + 7
    assert {turn.output_len for turn in found} == set(range(10, 31))
    begin = found[0].prompt[:7] if source is IDS else found[0].prompt.split()[:7]
    assert all((turn.prompt if source is IDS else turn.prompt.split())[:7] == begin for turn in found)
    assert len({str(turn.prompt) for turn in found}) == 400


def test_exact_lengths_and_seeds():
    found = turns(RandomLengths(16, 4), 50)
    assert all((turn.input_len, turn.output_len) == (16, 4) for turn in found)
    assert all(1000 <= token < 30000 for turn in found for token in turn.prompt)
    assert found == turns(RandomLengths(16, 4), 50)
    assert found != turns(RandomLengths(16, 4), 50, seed=1)


def test_prefix_repetition():
    found = turns(PrefixRepetition(prefix_len=32, suffix_len=8, num_prefixes=4, output_len=3), 40)
    prefixes = [tuple(turn.prompt[:32]) for turn in found]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10] * 4
    assert prefixes != sorted(prefixes)
    assert len({tuple(turn.prompt[32:]) for turn in found}) == 40
    assert all(turn.input_len == 40 == len(turn.prompt) for turn in found)


def test_multi_turn():
    workload = MultiTurn(num_turns=4, input_len=5, output_len=6, system_len=7, think_time_s=0.5)
    sessions = workload.sessions(10, WORDS, rng())
    assert [len(session.turns) for session in sessions] == [4, 4, 2]
    assert len({session.system for session in sessions}) == 1
    assert length(sessions[0].system) == 7
    assert [len(session.think_s) for session in sessions] == [3, 3, 1]
    assert all(
        turn.output_len == 6 and length(turn.prompt) == 5 for session in sessions for turn in session.turns
    )
    with pytest.raises(ValueError, match="multi_turn sends text"):
        workload.sessions(10, IDS, rng())


def test_sharegpt_has_the_published_means():
    num_in, num_out = ShareGptShape().lengths(200_000, rng())
    assert num_in.mean() == pytest.approx(datasets.MEAN_IN, rel=0.01)
    assert num_out.mean() == pytest.approx(datasets.MEAN_OUT, rel=0.01)
    assert num_in.min() == 4 <= num_out.min()
    assert num_in.max() <= 1024
    assert (num_in + num_out).max() <= 2048
    assert 60 < np.median(num_in) < 100, "a long tail"
    found = turns(ShareGptShape(), 20)
    assert all(len(turn.prompt) == turn.input_len for turn in found)
    assert {turn.output_len for turn in turns(ShareGptShape(output_len=9), 20)} == {9}


def test_cut_lognormal_far_from_its_cuts_is_log_normal():
    found = np.log(cut_lognormal(rng(), 100_000, 1000.0, 0.5, 1, 1_000_000))
    assert found.std() == pytest.approx(0.5, rel=0.02)
    assert found.mean() == pytest.approx(np.log(1000) - 0.125, rel=0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomLengths(range_ratio=1.0),
        lambda: RandomLengths(input_len=0),
        lambda: PrefixRepetition(num_prefixes=0),
        lambda: MultiTurn(num_turns=0),
        lambda: MultiTurn(think_time_s=-1),
    ],
)
def test_workloads_that_cannot_be(make):
    with pytest.raises(ValueError, match="--"):
        make()


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return path


def test_custom_prompts(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "output_tokens": 7},
        {"prompt": [1, 2, 3]},
        {"messages": messages, "extra_body": {"top_k": 2}},
    )
    found = turns(CustomPrompts(path, 9, shuffles=False), 7)
    assert [turn.prompt for turn in found[:2]] == ["a", [1, 2, 3]]
    assert [turn.output_len for turn in found[:3]] == [7, 9, 9]
    assert found[1].input_len == 3
    assert (found[2].messages, found[2].extra_body) == (messages, {"top_k": 2})
    assert found[3:6] == found[:3]
    shuffled = turns(CustomPrompts(path, 9), 30)
    assert len(shuffled) == 30
    assert shuffled != turns(CustomPrompts(path, 9, shuffles=False), 30)


def test_custom_prompts_with_times(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "b", "timestamp": 2.5}, {"prompt": "a", "timestamp": 0.5})
    sessions = CustomPrompts(path).sessions(10, IDS, rng())
    assert [(s.timestamp, s.turns[0].prompt) for s in sessions] == [(0.5, "a"), (2.5, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: a line is one JSON object"),
        ({"text": "a"}, 'line 2: "prompt"'),
        ({"prompt": ["a"]}, 'line 2: "prompt"'),
        ({"prompt": ""}, 'line 2: "prompt"'),
        ({"prompt": []}, 'line 2: "prompt"'),
        ({"prompt": [True]}, 'line 2: "prompt"'),
        ({"prompt": [-1]}, 'line 2: "prompt"'),
        ({"messages": []}, 'line 2: "prompt"'),
        ({"messages": ["hi"]}, 'line 2: "prompt"'),
        ({"prompt": "a", "output_tokens": "4"}, 'line 2: "output_tokens"'),
        ({"prompt": "a", "output_tokens": 0}, 'line 2: "output_tokens"'),
        ({"prompt": "a", "timestamp": "1"}, 'line 2: "timestamp"'),
        ({"prompt": "a", "timestamp": -1}, 'line 2: "timestamp"'),
        ({"prompt": "a", "timestamp": [1]}, 'line 2: "timestamp"'),
        ({"prompt": "a", "extra_body": [1]}, 'line 2: "extra_body"'),
    ],
)
def test_faults_of_custom_files(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, line)
    with pytest.raises(ValueError, match=message):
        CustomPrompts(path).sessions(10, IDS, rng())
    with pytest.raises(ValueError, match="has no prompts"):
        CustomPrompts(write(tmp_path / "empty.jsonl")).sessions(1, IDS, rng())


@pytest.mark.parametrize("source", [IDS, WORDS])
def test_a_trace(tmp_path, source):
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 5000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 5500, "input_length": 18, "output_length": 4, "hash_ids": [1, 2, 9]},
        {"timestamp": 7000, "input_length": 30, "output_length": 5},
    )
    sessions = TimedTrace(path, 0.001, 8).sessions(10, source, rng())
    assert [session.timestamp for session in sessions] == [0.0, 0.5, 2.0]
    prompts = [session.turns[0].prompt for session in sessions]
    assert [length(prompt) for prompt in prompts] == [20, 18, 30]
    assert [session.turns[0].output_len for session in sessions] == [3, 4, 5]
    first, second, third = (p if source is IDS else p.split() for p in prompts)
    assert first[:16] == second[:16]
    assert first[16:18] != second[16:18]
    assert third[:8] != first[:8]
    assert len(TimedTrace(path, 0.001, 8).sessions(2, source, rng())) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"timestamp": 1, "input_length": 2}, "line 1: 'output_length' is missing"),
        ({"timestamp": 1, "input_length": 0, "output_length": 1}, "line 1: lengths must be 1 or more"),
        ({"timestamp": 1, "input_length": "2", "output_length": 1}, "line 1: lengths must be"),
        ({"timestamp": 1, "input_length": 2, "output_length": 1.5}, "line 1: lengths must be"),
        ({"timestamp": 1, "input_length": True, "output_length": 1}, "line 1: lengths must be"),
        ({"timestamp": 1, "input_length": 10**12, "output_length": 1}, "line 1: lengths must be"),
        ({"timestamp": None, "input_length": 2, "output_length": 1}, 'line 1: "timestamp"'),
        ({"timestamp": -1, "input_length": 2, "output_length": 1}, 'line 1: "timestamp"'),
        ({"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": ["a"]}, 'line 1: "hash_ids"'),
        ({"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": [-1]}, 'line 1: "hash_ids"'),
        ({"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": 5}, 'line 1: "hash_ids"'),
    ],
)
def test_faults_of_traces(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        TimedTrace(write(tmp_path / "t.jsonl", line)).sessions(10, IDS, rng())


def test_words_of_a_tokenizer_are_tokens():
    tokenizer = named_tokenizer("smollm2")
    text = prompt_source(tokenizer, as_ids=False).draw(rng(), 200)
    ids = prompt_source(tokenizer, as_ids=True).draw(rng(), 200)
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 200
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    common = [len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in common_words()]
    assert np.mean(common) < 1.02
    assert len(common) > 400
