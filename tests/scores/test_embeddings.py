"""Vectors equal transformers' hidden states."""

from __future__ import annotations

import random

import numpy as np
import pytest

from oneloop import SamplingParams
from oneloop.engine.embedding import embedding_output
from oneloop.engine.pooling import pooling_params
from oneloop.errors import RequestError


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def expected(twin, prompt, pooling, normalize):
    hidden = twin.hidden(prompt)
    vector = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_cold_and_with_prefix_hits_and_chunked(twin, make_llm, pooling, normalize):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 5, 16, 17, 33, 100, 512))]
    with make_llm(max_num_batched_tokens=40, max_num_seqs=4) as llm:
        for _ in range(2):
            outputs = llm.embed(
                [{"prompt_token_ids": prompt} for prompt in prompts], pooling=pooling, normalize=normalize
            )
            for prompt, output in zip(prompts, outputs, strict=True):
                vector = np.array(output.outputs.embedding)
                assert vector == pytest.approx(expected(twin, prompt, pooling, normalize), abs=1e-3)
        assert (llm.stats().num_prefix_hit_tokens > 0) == (pooling == "last")
        assert llm.stats().num_generation_tokens == 0


def test_beside_answers(twin, make_llm):
    with make_llm(max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        alone = llm.generate({"prompt_token_ids": prompt_of(30)}, params)[0].outputs[0].token_ids
        thread_engine = llm._thread.engine

        async def both():
            stream = await thread_engine.submit(prompt_of(30), params)
            pooled = await thread_engine.submit(prompt_of(50, 9), pooling_params("mean"))
            vector = await embedding_output(pooled, normalize=True)
            return await stream.all_deltas(), vector

        deltas, vector = llm._thread.run(both())
        assert deltas[0].token_ids == alone
        assert vector.outputs.embedding == pytest.approx(
            expected(twin, prompt_of(50, 9), "mean", True), abs=1e-3
        )


def test_what_is_refused(make_llm):
    with make_llm() as llm:
        with pytest.raises(RequestError, match="pooling must be one of last, mean"):
            llm.embed("x", pooling="max")
        with pytest.raises(RequestError, match="empty"):
            llm.embed(["x", ""])
        with pytest.raises(RequestError, match="512 tokens, and the prompt has 513"):
            llm.embed({"prompt_token_ids": prompt_of(513)})
    with make_llm(executor="null") as llm, pytest.raises(RequestError, match="no hidden states"):
        llm.embed("x")
