"""From a checked request to prompts of token ids that fit the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import ApiError, bad_request
from oneloop.errors import RequestError

if TYPE_CHECKING:
    from oneloop.api.limits import Limits
    from oneloop.api.protocol.chat import ChatForm
    from oneloop.api.state import ApiState
    from oneloop.engine.params import ResolvedParams


async def render(state: ApiState, messages: list[dict[str, Any]], form: ChatForm) -> str:
    """The chat template's text for a conversation."""
    return await state.engine.render_chat(
        messages,
        add_generation_prompt=form.add_generation_prompt,
        continue_final_message=form.continue_final_message,
        template_arguments=form.template_arguments or None,
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
        if error.field == "prompt_logprobs":
            raise bad_request(error.field, error.message) from None
        renamed = {"prompt": prompt_field, "max_tokens": max_tokens_field}
        message = error.message.replace("max_tokens", max_tokens_field)
        raise bad_request(
            renamed.get(error.field or "", error.field), f"context_length_exceeded: {message}."
        ) from None


def context_error(param: str, num_prompt_tokens: int, limits: Limits) -> ApiError:
    """The prompt leaves no room for a token."""
    return bad_request(
        param,
        f"context_length_exceeded: this model's maximum context length is {limits.max_model_len} tokens, "
        f"and the prompt has {num_prompt_tokens}, which leaves no room for an answer.",
    )
