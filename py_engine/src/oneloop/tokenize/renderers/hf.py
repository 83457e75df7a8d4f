"""The usual way: the model's own chat template, or one that the request brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oneloop.errors import ModelError, RequestError
from oneloop.tokenize.messages import template_message
from oneloop.tokenize.renderers.kind import RendererKind, Write
from oneloop.tokenize.templates import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oneloop.tokenize.conversation import ChatForm, Conversation, Message
    from oneloop.tokenize.tokenizer import Tokenizer

MAX_REQUEST_TEMPLATE_CHARS = 1 << 16
"""Of a template in a request."""


def template_writer(
    tokenizer: Tokenizer, adapt: Callable[[Sequence[Message]], Sequence[Message]] | None = None
) -> Write:
    """Writes prompts through templates. adapt: makes the messages those that the template is written for."""

    def write(conversation: Conversation, form: ChatForm) -> str:
        template = tokenizer.chat_template
        if form.chat_template is not None:
            template = _of_request(form.chat_template, tokenizer.special_tokens)
        if template is None:
            raise RequestError(
                "messages",
                "this model has no chat template; give one with --chat-template, or send a plain prompt",
            )
        messages = conversation.messages if adapt is None else adapt(conversation.messages)
        return template.render(
            [template_message(message) for message in messages],
            tools=[tool.wire() for tool in conversation.tools],
            documents=conversation.documents,
            add_generation_prompt=form.add_generation_prompt,
            continue_final_message=form.continue_final_message,
            chat_template_kwargs=form.template_arguments,
        )

    return write


def _of_request(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    if len(source) > MAX_REQUEST_TEMPLATE_CHARS:
        raise RequestError(
            "chat_template",
            f"chat_template may have at most {MAX_REQUEST_TEMPLATE_CHARS} characters, got {len(source)}",
        )
    try:
        return ChatTemplate(source, file="chat_template", special_tokens=special_tokens, compile_limit_s=1.0)
    except ModelError as error:
        raise RequestError("chat_template", str(error)) from error


kind = RendererKind("hf", lambda tokenizer: True, template_writer)
