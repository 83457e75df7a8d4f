"""Log-probabilities of prompts: in front of the completion's where the prompt is echoed, and of whole replies as the
field `prompt_logprobs`. Encoded in threads: a prompt may have hundreds of thousands of tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.replies import Choice
    from oneloop.engine.logprobs import LogprobsEncoder, PromptLogprobs
    from oneloop.engine.stream import RequestStream
    from oneloop.tokenize.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt whose tokens stand before the completion's."""

    token_ids: list[int]
    num_hidden: int
    """Tokens at its start that are no part of the echoed text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """What a reply shows of its prompts' log-probabilities."""

    echoed: Sequence[EchoedPrompt]
    """One per prompt; none where they do not go before the completion's."""
    num_top: int | None
    """Likeliest tokens in the field `prompt_logprobs`; None where it is null."""


def echoed_prompt(tokenizer: Tokenizer, token_ids: list[int], text: str | None) -> EchoedPrompt:
    """text: as the client sent it; None where it sent ids, all of which are echoed.

    What the tokenizer puts in front of a text (mostly a BOS) is not echoed, unless the text says it itself.
    """
    num_hidden = 0
    while text is not None and num_hidden < len(token_ids):
        token_id = token_ids[num_hidden]
        if token_id not in tokenizer.special_ids or text.startswith(tokenizer.token_str(token_id)):
            break
        num_hidden += 1
    return EchoedPrompt(token_ids, num_hidden)


async def encode_echoes(
    scores: PromptScores, streams: Sequence[RequestStream], encoders: Sequence[LogprobsEncoder]
) -> None:
    """For a streamed reply: wait for what is said of the echoed prompts, and put it in front of what the encoders get.

    streams: one per prompt. encoders: one per choice; nothing was added to them.
    """
    n = len(encoders) // len(streams)
    for prompt, stream in enumerate(streams):
        await stream.wait_news()
        logprobs = stream.take_prompt_logprobs()
        if logprobs is None:  # ended before
            continue
        echoed = scores.echoed[prompt]
        for encoder in encoders[prompt * n : prompt * n + n]:
            await asyncio.to_thread(encoder.add_prompt, echoed.token_ids, logprobs, echoed.num_hidden)


async def encode_prompts(
    scores: PromptScores,
    streams: Sequence[RequestStream],
    choices: Sequence[Choice],
    encoders: Sequence[LogprobsEncoder] | None,
    tokenizer: Tokenizer,
) -> None:
    """Put what is asked of the prompts into their choices and the choices' encoders.

    streams: one per prompt, all ended. encoders: one per choice; nothing was added to them.
    """
    n = len(choices) // len(streams)
    for prompt, stream in enumerate(streams):
        logprobs = stream.take_prompt_logprobs()
        if logprobs is None:  # aborted
            continue
        members = range(prompt * n, prompt * n + n)
        if scores.echoed and encoders is not None:
            echoed = scores.echoed[prompt]
            for index in members:
                await asyncio.to_thread(
                    encoders[index].add_prompt, echoed.token_ids, logprobs, echoed.num_hidden
                )
        if scores.num_top is not None:
            fragment = await _as_json(logprobs, tokenizer, scores.num_top)
            for index in members:
                choices[index].prompt_logprobs = fragment


async def _as_json(logprobs: PromptLogprobs, tokenizer: Tokenizer, num_top: int) -> orjson.Fragment:
    return orjson.Fragment(await asyncio.to_thread(logprobs.json, tokenizer.vocabulary, num_top))
