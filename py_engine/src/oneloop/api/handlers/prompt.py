"""From a checked request to prompts of token ids that fit the context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from oneloop.api.errors import ApiError, bad_request
from oneloop.api.limits import MAX_TOLD_BYTES
from oneloop.errors import RequestError
from oneloop.tokenize.messages import read_conversation
from oneloop.tokenize.renderer import kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.limits import Limits
    from oneloop.api.protocol.prompt_fields import ToldBack
    from oneloop.api.state import TextState
    from oneloop.engine.params import ResolvedParams
    from oneloop.tokenize.conversation import ChatForm, Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the model reads it, and what may be told of it."""

    token_ids: list[int]
    text: str | None = None
    """Where it was a text."""
    offsets: list[tuple[int, int]] | None = None
    """Per token the characters [start, end) of the text, where they were asked for."""

    def told(self, wanted: ToldBack) -> dict[str, Any]:
        """What a reply has of it."""
        found: dict[str, Any] = {}
        if wanted.token_ids:
            found["prompt_token_ids"] = self.token_ids
        if wanted.prompt_text:
            found["prompt_text"] = self.text
        if wanted.offsets:
            found["prompt_token_offsets"] = self.offsets
        return found


async def render(
    state: TextState,
    messages: list[dict[str, Any]],
    form: ChatForm,
    tools: Sequence[dict[str, Any]] | None = None,
    documents: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The prompt's text for a conversation. messages, tools: as templates read them."""
    return await state.engine.render_chat(partial(read_conversation, messages, tools, documents), form)


async def tokenized(
    state: TextState,
    param: str,
    text: str,
    *,
    add_special_tokens: bool,
    truncation: Truncation | None = None,
    offsets: bool = False,
) -> Prompt:
    """The text's tokens, or those of them that are kept. ApiError (400) where it cannot fit whatever its tokens are.

    param: the client's word for the text. offsets: whether they are asked for.
    """
    limits, skipped = state.limits, 0
    if truncation is None:
        check_text_len(param, text, limits)
    elif len(text) > limits.max_prompt_chars:
        # What is kept fits in so many characters; what is left out of the rest cannot change it but at the cut itself.
        skipped = len(text) - limits.max_prompt_chars if truncation.side == "left" else 0
        text = text[skipped:] if skipped else text[: limits.max_prompt_chars]
    engine, bos = state.engine, state.engine.tokenizer.bos_token_id
    if not offsets:
        ids = await engine.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(token_ids=kept(ids, ids, truncation, bos), text=text)
    ids, places = await engine.encode_with_offsets(text, add_special_tokens=add_special_tokens)
    moved = [(start + skipped, end + skipped) for start, end in places] if skipped else places
    return Prompt(
        token_ids=kept(ids, ids, truncation, bos), text=text, offsets=kept(moved, ids, truncation, bos)
    )


def check_text_len(param: str, text: str, limits: Limits) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before any time goes into tokenising it."""
    if len(text) > limits.max_prompt_chars:
        raise bad_request(
            param,
            f"context_length_exceeded: the prompt has {len(text)} characters, and this model's maximum context "
            f"length of {limits.max_model_len} tokens holds at most {limits.max_prompt_chars}.",
        )


def check_context(
    params: ResolvedParams,
    num_prompt_tokens: int,
    limits: Limits,
    *,
    prompt_field: str,
    max_tokens_field: str,
) -> None:
    """Refuse, before any prompt is queued, what the engine will refuse: more than the context holds. ApiError with both
    numbers.

    prompt_field, max_tokens_field: the client's words for them.
    """
    try:
        params.behind(num_prompt_tokens, limits.max_model_len)
    except RequestError as error:
        if error.field in ("prompt_logprobs", "logprobs"):
            raise bad_request(error.field, error.message) from None
        renamed = {"prompt": prompt_field, "max_tokens": max_tokens_field}
        message = error.message.replace("max_tokens", max_tokens_field)
        raise bad_request(
            renamed.get(error.field or "", error.field), f"context_length_exceeded: {message}."
        ) from None


def check_repeated(num_bytes: int, n: int) -> None:
    """Refuse a reply that repeats too much of its prompts. ApiError.

    num_bytes: about what it has of them in all choices together. n: choices per prompt.
    """
    if num_bytes > MAX_TOLD_BYTES:
        raise bad_request(
            "prompt" if n == 1 else "n",
            f"the reply would repeat some {num_bytes >> 20} MiB of what is said of its prompts, at most "
            f"{MAX_TOLD_BYTES >> 20} MiB are sent; ask for fewer choices, fewer prompts at a time, or less of them",
        )


def context_error(param: str, num_prompt_tokens: int, limits: Limits) -> ApiError:
    """The prompt leaves no room for a token."""
    return bad_request(
        param,
        f"context_length_exceeded: this model's maximum context length is {limits.max_model_len} tokens, "
        f"and the prompt has {num_prompt_tokens}, which leaves no room for an answer.",
    )
