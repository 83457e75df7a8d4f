"""Beam search finds transformers' texts, whatever else runs and however little room there is."""

from __future__ import annotations

import asyncio
import random
import warnings
from dataclasses import replace

import pytest
import torch

from oneloop import BeamSearchParams, SamplingParams
from oneloop.engine.beam_search import beam_search_output
from oneloop.engine.trace import replay_trace
from oneloop.errors import RequestError

EOS = 257


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def expected(twin, prompt, params, eos=(EOS,)):
    """transformers' texts (new tokens, end token included) and scores."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        found = twin.model.generate(
            torch.tensor([prompt]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            do_sample=False,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else list(eos),
            pad_token_id=259,
            return_dict_in_generate=True,
            output_scores=True,
        )
    texts = []
    for row in found.sequences.tolist():
        text = row[len(prompt) :]
        ends = [place for place, token in enumerate(text) if token in eos and not params.ignore_eos]
        texts.append(text[: ends[0] + 1] if ends else text)
    return texts, found.sequences_scores.tolist()


def check(twin, prompt, params, output, eos=(EOS,)):
    texts, scores = expected(twin, prompt, params, eos)
    assert [found.tokens[: len(prompt)] for found in output.sequences] == [prompt] * params.beam_width
    assert [found.tokens[len(prompt) :] for found in output.sequences] == texts
    for found, score in zip(output.sequences, scores, strict=True):
        length = len(found.tokens) - len(prompt)
        assert found.cum_logprob / length**params.length_penalty == pytest.approx(score, abs=1e-3)
        ended = found.tokens[-1] in eos and not params.ignore_eos
        assert found.finish_reason == ("stop" if ended else "length")


@pytest.fixture(scope="module")
def eager_twin(twin):
    """The twin, which is made to say the end token now and then: its row of the head is that of a frequent token."""
    counts: dict[int, int] = {}
    for seed in range(20):
        params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
        for text in expected(twin, prompt_of(20, seed), params)[0]:
            for token in text:
                counts[token] = counts.get(token, 0) + 1
    return twin, sorted(counts, key=lambda token: -counts[token])[3]


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_without_an_end(twin, make_llm, width, length):
    params = BeamSearchParams(beam_width=width, max_tokens=40, ignore_eos=True)
    prompt = prompt_of(length, width)
    with make_llm(max_num_seqs=8) as llm:
        (output,) = llm.beam_search({"prompt_token_ids": prompt}, params)
        assert llm.stats().num_used_blocks == 0
    check(twin, prompt, params, output)


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_texts_that_end(eager_twin, make_llm, length_penalty, early_stopping):
    """A frequent token as stop id counts as an end token does."""
    twin, stop = eager_twin
    lengths = set()
    with make_llm(max_num_seqs=16) as llm:
        for seed in range(6):
            params = BeamSearchParams(
                beam_width=4, max_tokens=24, length_penalty=length_penalty, early_stopping=early_stopping
            )
            prompt = prompt_of(20, seed)
            (output,) = run_with_stop(llm, [prompt], params, stop)
            check(twin, prompt, params, output, (EOS, stop))
            lengths |= {len(found.tokens) - 20 for found in output.sequences}
    assert len(lengths) > 3 or length_penalty == 2.0  # which prefers the longest


def run_with_stop(llm, prompts, params, stop):
    """LLM.beam_search with a stop id, which vLLM's parameters do not have."""
    engine = llm._thread.engine
    sampling = replace(params.as_sampling(), stop_token_ids=[stop])

    async def run():
        streams = [await engine.submit(prompt, sampling, final_only=True) for prompt in prompts]
        return [await beam_search_output(stream, engine.tokenizer) for stream in streams]

    return llm._thread.run(run())


def test_generate_tells_their_log_probabilities(twin, make_llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with make_llm() as llm:
        (found,) = llm.beam_search({"prompt_token_ids": prompt_of(9)}, params)
        (output,) = llm.generate({"prompt_token_ids": prompt_of(9)}, params.as_sampling())
    for ours, theirs in zip(output.outputs, found.sequences, strict=True):
        assert ours.token_ids == theirs.tokens[9:]
        assert ours.cumulative_logprob == theirs.cum_logprob
        assert ours.finish_reason == theirs.finish_reason


def test_batched_chunked_and_beside_samples(eager_twin, make_llm):
    twin, stop = eager_twin
    params = BeamSearchParams(beam_width=3, max_tokens=20)
    prompts = [prompt_of(length, length) for length in (60, 5, 33, 90, 17)]
    with make_llm(max_num_seqs=7, max_num_batched_tokens=24) as llm:
        outputs = run_with_stop(llm, prompts, params, stop)
        assert llm.stats().num_used_blocks == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(twin, prompt, params, output, (EOS, stop))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_starved_pool_and_preemptions(twin, make_llm, prefix_caching):
    """Beams that are preempted are computed again and waited for; every law holds after every call of the core."""
    params = BeamSearchParams(beam_width=4, max_tokens=60, ignore_eos=True)
    prompts = [prompt_of(30, seed) for seed in range(6)]
    sizes = {
        "num_gpu_blocks_override": 34,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
    }
    with make_llm(**sizes, enable_prefix_caching=prefix_caching) as llm:
        engine = llm._thread.engine
        core = engine._assembly.core
        num_audits = 0

        async def run():
            nonlocal num_audits
            samples = [
                await engine.submit(
                    prompt_of(25, 50 + seed), SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
                )
                for seed in range(6)
            ]
            streams = [
                await engine.submit(prompt, params.as_sampling(), final_only=True) for prompt in prompts
            ]
            gone = await engine.submit(prompt_of(30, 77), params.as_sampling(), final_only=True)
            waiting = asyncio.gather(*(beam_search_output(stream, engine.tokenizer) for stream in streams))
            while not waiting.done():
                core.audit()
                num_audits += 1
                if num_audits == 40:
                    gone.abort()
                await asyncio.sleep(0)
            for stream in samples:
                await stream.all_deltas()
            return await waiting

        outputs = llm._thread.run(run())
        stats = llm.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_preemptions > 10
        assert num_audits > 100
    for prompt, output in zip(prompts, outputs, strict=True):
        check(twin, prompt, params, output)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "n must be in 1"),
        ({"beam_width": 20}, "candidates"),
        ({"length_penalty": 11.0}, "length_penalty must be in -10"),
        ({"early_stopping": "soon"}, "early_stopping must be true or false"),
        ({"max_tokens": 0}, "max_tokens must be in 1"),
        ({"max_tokens": 400, "beam_width": 16}, "could need"),
    ],
)
def test_what_is_refused(make_llm, changes, message):
    params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **changes})
    with make_llm(max_num_seqs=32) as llm, pytest.raises(RequestError, match=message):
        llm.beam_search("x", params)


async def test_over_http(server, twin):
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True, length_penalty=0.5)
    prompt = prompt_of(20)
    body = {
        "prompt": prompt, "n": 3, "max_tokens": 10, "ignore_eos": True, "use_beam_search": True,
        "length_penalty": 0.5, "early_stopping": "never",
    }  # fmt: skip
    texts, _ = await asyncio.to_thread(expected, twin, prompt, params)
    decoded = [server.engine.tokenizer.decode([token for token in text if token < 258]) for text in texts]
    status, reply = await server.post("/v1/completions", **body)
    assert status == 200, reply
    assert [choice["text"] for choice in reply["choices"]] == decoded
    assert reply["usage"]["completion_tokens"] == 30
    streamed = ["", "", ""]
    for event in await server.stream("/v1/completions", **body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == decoded
    messages = [{"role": "user", "content": "x"}]
    status, reply = await server.post(
        "/v1/chat/completions", messages=messages, use_beam_search=True, n=2, max_tokens=5
    )
    assert status == 200, reply
    for changes, param in [
        ({"temperature": 0.5}, "temperature"), ({"logprobs": 1}, "logprobs"), ({"stop": "x"}, "stop"), ({"n": 25}, "n"),
        ({"length_penalty": "x"}, "length_penalty"), ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": 1}, "early_stopping"), ({"use_beam_search": False}, "length_penalty"),
    ]:  # fmt: skip
        status, reply = await server.post("/v1/completions", **{**body, **changes})
        assert (status, reply["error"]["param"]) == (400, param), reply


@pytest.mark.parametrize("width", [2, 5])
def test_beams_are_recorded_and_replayed(make_llm, tmp_path, width):
    """Decisions of real beams, several searches at once."""
    trace = tmp_path / "trace"
    with make_llm(max_num_seqs=8, num_gpu_blocks_override=40, record_trace=str(trace)) as llm:
        for early_stopping in (False, True, "never"):
            params = BeamSearchParams(beam_width=width, max_tokens=20, early_stopping=early_stopping)
            prompts = [{"prompt_token_ids": prompt_of(length, length)} for length in (5, 18, 33)]
            llm.beam_search(prompts, params)
        stats = llm.stats()
    lines: list[str] = []
    report = replay_trace(trace, show=lines.append)
    assert (report.difference, report.problem) == (None, None)
    assert report.replay.num_steps == stats.num_steps
    assert any(f"{width} beams" in line for line in lines)
    assert any("groups of beams went on" in line for line in lines)
