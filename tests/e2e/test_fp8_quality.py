"""SmolLM2 in 8 bits stays near itself: weights with either kind of scales, keys and values, and both.

Compared are log-probabilities over one text with those of the plain model: of its own tokens, and of the twenty that it
finds likeliest at each place, which are its logits but for a constant.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from oneloop import LLM, SamplingParams

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = {"cpu": 512, "cuda": 1024}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
"""Of the plain model, and of what is not in 8 bits."""
TEXT = Path(__file__).parents[2] / "docs/http-api.md"
SCORED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=20)
SMALL = {"max_model_len": 1040, "max_num_seqs": 4, "num_gpu_blocks_override": 96, "use_tqdm": False}
"""Other tests may have the rest of the card."""


class Bounds(NamedTuple):
    """Twice what was seen over 1,024 tokens in float32 (docs/quantization.md), at most."""

    perplexity: float
    """More than the plain model's, relative."""
    own: float
    """Nats: how far the log-probability of a token of the text is off, on average."""
    likeliest: float
    """Nats: root mean square of the same for the twenty likeliest."""
    best: float
    """Share of the places where the likeliest token is another."""


WEIGHTS = Bounds(0.05, 0.33, 0.7, 0.19)
CACHE = Bounds(0.02, 0.17, 0.43, 0.11)
BOTH = Bounds(0.05, 0.37, 0.83, 0.22)
WAYS = {
    "fp8": ({"quantization": "fp8"}, WEIGHTS),
    "fp8-block": ({"quantization": "fp8-block"}, WEIGHTS),
    "cache": ({"kv_cache_dtype": "fp8"}, CACHE),
    "fp8, cache": ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, BOTH),
    "fp8-block, cache": ({"quantization": "fp8-block", "kv_cache_dtype": "fp8"}, BOTH),
}


class Scores(NamedTuple):
    """tokens: of the text. places: for each but the first, token → log-probability of its own and the likeliest."""

    tokens: list[int]
    places: list[dict[int, float]]

    def own(self) -> torch.Tensor:
        """Of the text's tokens but the first."""
        return torch.tensor([place[token] for token, place in zip(self.tokens[1:], self.places, strict=True)])

    def best(self) -> list[int]:
        return [max(place, key=place.__getitem__) for place in self.places]


def scores(device: str, **settings) -> Scores:
    with LLM("smollm2", device=device, dtype=DTYPE[device], **SMALL, **settings) as llm:
        tokens = llm.get_tokenizer().encode(TEXT.read_text())[: NUM_TOKENS[device]]
        (output,) = llm.generate([{"prompt_token_ids": tokens}], SCORED, use_tqdm=False)
    places = [
        {token: entry.logprob for token, entry in place.items()} for place in output.prompt_logprobs[1:]
    ]
    return Scores(tokens, places)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def plain(request) -> tuple[str, Scores]:
    return request.param, scores(request.param)


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_near_the_plain_models(plain, way):
    device, expected = plain
    settings, bounds = WAYS[way]
    found = scores(device, **settings)
    own = found.own() - expected.own()
    assert math.exp(-own.mean()) < 1 + bounds.perplexity
    assert 0 < own.abs().mean() < bounds.own  # equal numbers would be those of the plain model
    likeliest = torch.tensor(
        [
            theirs[token] - place[token]
            for place, theirs in zip(expected.places, found.places, strict=True)
            for token in place.keys() & theirs.keys()
        ]
    )
    assert len(likeliest) > 16 * len(own)  # most of the twenty are the same
    assert likeliest.square().mean().sqrt() < bounds.likeliest
    others = [mine != theirs for mine, theirs in zip(found.best(), expected.best(), strict=True)]
    assert sum(others) < bounds.best * len(others)
