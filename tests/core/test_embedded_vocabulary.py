"""The detokenizer with the vocabulary of a real model, beside the tokenizers library."""

from __future__ import annotations

import random

import pytest

from oneloop.formats.gguf import read_gguf
from oneloop.loader.embedded import fetch_embedded
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop.tokenize.tokenizer import Tokenizer
from oneloop_bench.micro.core import TEXT
from oneloop_core import StreamDecoder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return gguf_tokenizer(read_gguf(fetch_embedded()).metadata)


def test_text_survives(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    decoder = StreamDecoder(tokenizer.vocabulary)
    assert tokenizer.vocabulary.decode(ids) == TEXT
    assert "".join(map(decoder.push, ids)) + decoder.flush() == TEXT


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_equal_the_tokenizers_library(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(skip)
    vocabulary = tokenizer.vocabulary
    for _ in range(5000):
        ids = [rng.randrange(len(vocabulary)) for _ in range(rng.randrange(12))]
        if rng.random() < 0.3:
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(17))
        expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
        decoder = StreamDecoder(vocabulary, skip_special_tokens=skip)
        assert vocabulary.decode(ids, skip_special_tokens=skip) == expected
        assert "".join(map(decoder.push, ids)) + decoder.flush() == expected
