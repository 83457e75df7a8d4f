"""Prompts of a wanted length: token ids, words that are one token each in a tokenizer, or plain English words."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_bench.load.workload import Prompt

TOKEN_IDS = (1_000, 30_000)
"""Ids drawn where no tokenizer is known: ordinary ones in every vocabulary of 32,000 tokens and more."""
_LEAST_VOCABULARY = 32_000


def ordinary_range(vocab_size: int | None) -> tuple[int, int]:
    """Which ids to draw for a server whose model has so many tokens; None: nobody knows.

    In a smaller vocabulary the range keeps its place: special tokens stand at the beginning or at the end.
    """
    if vocab_size is None or vocab_size >= _LEAST_VOCABULARY:
        return TOKEN_IDS
    low, high = (bound * vocab_size // _LEAST_VOCABULARY for bound in TOKEN_IDS)
    return low, max(high, low + 1)


def common_words() -> list[str]:
    """Frequent English words; with a space before it nearly each is one token in vocabularies of 30,000 and more."""
    return resources.files("oneloop_bench.load").joinpath("words.txt").read_text(encoding="ascii").split()


class PromptSource(Protocol):
    """Makes prompts."""

    is_exact: bool
    """Whether a server counts as many tokens as were asked for."""

    def draw(self, rng: np.random.Generator, length: int) -> Prompt:
        """A prompt of `length` tokens."""

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        """One after the other."""


class IdPrompts:
    """Prompts as token ids, for /v1/completions."""

    is_exact = True

    def __init__(self, ids: tuple[int, int] | list[int]) -> None:
        """ids: the range to draw from, its end not included; or a list of ids."""
        self._range = ids if isinstance(ids, tuple) else (0, len(ids))
        self._ids = None if isinstance(ids, tuple) else ids

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """See PromptSource."""
        drawn: list[int] = rng.integers(*self._range, length).tolist()
        return drawn if self._ids is None else [self._ids[place] for place in drawn]

    def join(self, first: Prompt, second: Prompt) -> list[int]:
        """See PromptSource."""
        assert isinstance(first, list)
        assert isinstance(second, list)
        return first + second


class WordPrompts:
    """Prompts as text. Words with the space before them."""

    def __init__(self, words: list[str], *, is_exact: bool) -> None:
        """is_exact: whether each word is one token, and stays one beside the others."""
        self._words = words
        self.is_exact = is_exact

    def draw(self, rng: np.random.Generator, length: int) -> str:
        """See PromptSource."""
        return "".join(self._words[place] for place in rng.integers(0, len(self._words), length).tolist())

    def join(self, first: Prompt, second: Prompt) -> str:
        """See PromptSource."""
        return f"{first}{second}"


def prompt_source(
    tokenizer: Tokenizer | None, *, as_ids: bool, token_ids: tuple[int, int] = TOKEN_IDS
) -> PromptSource:
    """Without a tokenizer: ids of the range, or common words."""
    if tokenizer is None:
        return (
            IdPrompts(token_ids)
            if as_ids
            else WordPrompts([f" {word}" for word in common_words()], is_exact=False)
        )
    clean = whole_words(tokenizer)
    if as_ids:
        return IdPrompts(clean)
    return WordPrompts([tokenizer.token_bytes(token).decode() for token in clean], is_exact=True)


def whole_words(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that are a space and two ASCII letters or more: any text of them is tokenised as it was made."""
    clean = []
    for token in range(tokenizer.vocab_size):
        word = tokenizer.token_bytes(token)
        if word[:1] == b" " and len(word) > 2 and word.isascii() and word[1:].isalpha():
            clean.append(token)
    if not clean:
        raise ValueError(
            "--tokenizer: it has no tokens that are words with a space before them; leave it out"
        )
    return clean


def named_tokenizer(name: str) -> Tokenizer:
    """Of a model folder, a GGUF file, or "smollm2" (the embedded model). ValueError, ModelError when there is none."""
    from oneloop.loader.embedded import embedded_path
    from oneloop.tokenize.load import load_tokenizer

    path = embedded_path() if name == "smollm2" else Path(name)
    if path is None:
        raise ValueError("the tokenizer of smollm2 is not on this machine; `make model` fetches it")
    return load_tokenizer(path)
