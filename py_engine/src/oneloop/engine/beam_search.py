"""Beam search for scripts: names as vLLM's users know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from oneloop.engine.params import BeamSearch, SamplingParams
from oneloop.errors import GenerationError

if TYPE_CHECKING:
    from oneloop.engine.outputs import FinishReason
    from oneloop.engine.stream import RequestStream
    from oneloop.tokenize.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Of one search."""

    beam_width: int
    """Beams, and texts that are found."""
    max_tokens: int
    """New tokens of a text at most."""
    ignore_eos: bool = False
    """End tokens are ordinary ones."""
    length_penalty: float = 1.0
    """As in BeamSearch."""
    early_stopping: bool | Literal["never"] = False
    """As in BeamSearch."""
    include_stop_str_in_output: bool = False
    """The text of the end token is part of the text."""

    def as_sampling(self) -> SamplingParams:
        """The same as a request's parameters."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            beam_search=BeamSearch(length_penalty=self.length_penalty, early_stopping=self.early_stopping),
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One text, with its prompt."""

    tokens: list[int]
    """Prompt and new tokens, the end token included."""
    cum_logprob: float
    """Of the new tokens."""
    text: str
    """Of all tokens, without special ones."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What one search found, best first."""

    sequences: list[BeamSearchSequence]


async def beam_search_output(stream: RequestStream, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Wait for a request with beam_search. GenerationError when it failed or was aborted."""
    sequences = []
    for delta in sorted(await stream.all_deltas(), key=lambda delta: delta.index):
        reason = delta.finish_reason
        if reason is None or reason in ("error", "abort"):
            raise GenerationError(delta.error or "the request was aborted")
        tokens = [*stream.prompt_token_ids, *delta.token_ids]
        # A model may have more rows than there are tokens.
        known = [token for token in tokens if token < tokenizer.vocab_size]
        sequences.append(
            BeamSearchSequence(
                tokens,
                stream.cumulative_logprobs[delta.index],
                tokenizer.decode(known),
                reason,
                delta.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)
