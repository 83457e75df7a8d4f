"""POST /tokenize and /detokenize: the requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.protocol import unsupported
from oneloop.api.protocol.chat import ChatForm, read_chat_form
from oneloop.api.protocol.fields import Fields, token_ids
from oneloop.api.protocol.messages import read_messages
from oneloop.api.protocol.prompt_fields import (
    AskedTruncation,
    read_documents,
    read_truncation,
)
from oneloop.api.protocol.tools import read_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and how they are rendered."""

    messages: list[dict[str, Any]]
    form: ChatForm
    tools: tuple[dict[str, Any], ...]
    documents: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text or a conversation to tokenise."""

    model: str | None
    prompt: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool
    return_token_offsets: bool
    truncation: AskedTruncation | None
    ignored: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Ids (in range) to turn into text."""

    model: str | None
    token_ids: list[int]
    ignored: list[str]


def read_tokenize(members: Mapping[str, Any], limits: Limits) -> TokenizeRequest:
    """Check a body. ApiError (400) naming the field. An empty prompt is fine here: it has no tokens of its own."""
    fields = Fields(members)
    model = fields.text("model")
    return_token_strs = fields.flag("return_token_strs", False)
    return_token_offsets = fields.flag("return_token_offsets", False)
    truncation = read_truncation(fields, limits)
    ignored: list[str] = []
    prompt: str | Conversation | None = fields.text("prompt")
    if prompt is not None and fields.has("messages"):
        raise fields.refuse("prompt", "and messages exclude each other")
    if prompt is None:
        if not fields.has("messages"):
            raise fields.refuse("prompt", "is missing; send prompt or messages")
        messages = read_messages(fields.given("messages"), ignored)
        prompt = Conversation(
            messages, read_chat_form(fields, limits), read_tools(fields).offered, read_documents(fields)
        )
        add_special_tokens = prompt.form.add_special_tokens
        unsupported.refuse_unsupported(fields, unsupported.TOKENIZE)
    else:
        add_special_tokens = fields.flag("add_special_tokens", True)
    return TokenizeRequest(
        model=model,
        prompt=prompt,
        add_special_tokens=add_special_tokens,
        return_token_strs=return_token_strs,
        return_token_offsets=return_token_offsets,
        truncation=truncation,
        ignored=fields.unread() + ignored,
    )


def read_detokenize(members: Mapping[str, Any], limits: Limits) -> DetokenizeRequest:
    """Check a body. ApiError (400) naming the field. No ids give an empty text."""
    fields = Fields(members)
    model = fields.text("model")
    at_most = limits.max_detokenize_ids
    ids = fields.array("tokens", at_most=at_most)
    if ids is None:
        raise fields.refuse("tokens", "is missing; send a list of token ids")
    checked = token_ids("tokens", ids, limits.vocab_size, at_most=at_most) if ids else []
    return DetokenizeRequest(model=model, token_ids=checked, ignored=fields.unread())
