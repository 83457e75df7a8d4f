"""SmolLM2 with weights and activations of 8 bits stays near itself: the log-probability of every token of a text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from oneloop import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"
NUM_TOKENS = 1024
TEXT = Path(__file__).parents[2] / "docs/http-api.md"
SCORED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
PERPLEXITY_BOUND = 0.05
"""More than the plain model's, relative. Seen over 4,088 tokens: 0.028 with a scale per row, 0.025 per block."""
NATS_BOUND = 0.3
"""A token's log-probability, on average, either way."""


def scores(**settings) -> list[float]:
    """Log-probabilities of the text's tokens but the first."""
    with LLM("smollm2", device=DEVICE, dtype=DTYPE, max_model_len=2048, use_tqdm=False, **settings) as llm:
        tokens = llm.get_tokenizer().encode(TEXT.read_text())[:NUM_TOKENS]
        (output,) = llm.generate([{"prompt_token_ids": tokens}], SCORED, use_tqdm=False)
    return [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return scores()


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
def test_log_probabilities_are_near_the_plain_models(plain, way):
    found = scores(quantization=way)
    mean, plain_mean = sum(found) / len(found), sum(plain) / len(plain)
    assert math.exp(plain_mean - mean) < 1 + PERPLEXITY_BOUND
    distances = [abs(a - b) for a, b in zip(found, plain, strict=True)]
    assert 0 < sum(distances) / len(distances) < NATS_BOUND
