"""From a checked request to prompts of token ids that fit the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import ApiError, bad_request

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
    max_tokens_field: str | None,
) -> None:
    """Refuse what the context cannot hold. ApiError with both numbers.

    max_tokens_field: the field by which the client chose max_tokens; more than the prompt leaves is refused then. None:
    max_tokens is a default, which the engine cuts to what is left.
    """
    left = limits.max_model_len - num_prompt_tokens
    if left < 1:
        raise context_error(prompt_field, num_prompt_tokens, limits)
    if max_tokens_field is not None and params.max_tokens is not None and params.max_tokens > left:
        raise bad_request(
            max_tokens_field,
            f"context_length_exceeded: this model's maximum context length is {limits.max_model_len} tokens; "
            f"the prompt has {num_prompt_tokens} and {max_tokens_field} asks for {params.max_tokens} more. "
            "Shorten either.",
        )
    if params.min_tokens > left:
        raise bad_request(
            "min_tokens", f"min_tokens ({params.min_tokens}) is above what the context leaves ({left})"
        )


def context_error(param: str, num_prompt_tokens: int, limits: Limits) -> ApiError:
    """The prompt leaves no room for a token."""
    return bad_request(
        param,
        f"context_length_exceeded: this model's maximum context length is {limits.max_model_len} tokens, "
        f"and the prompt has {num_prompt_tokens}, which leaves no room for an answer.",
    )
