"""From a conversation to what the model reads. One renderer per model, chosen by its tokenizer or by a setting.

A new way of writing prompts is a file in `renderers/` and a line in RENDERERS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from oneloop.errors import ConfigError
from oneloop.tokenize.conversation import ChatForm, Conversation, Rendered, Truncation
from oneloop.tokenize.renderers import harmony, hf, mistral

if TYPE_CHECKING:
    from oneloop.tokenize.renderers.kind import RendererKind
    from oneloop.tokenize.tokenizer import Tokenizer

T = TypeVar("T")
RendererName = Literal["auto", "hf", "mistral", "harmony"]
RENDERERS: tuple[RendererKind, ...] = (harmony.kind, mistral.kind, hf.kind)
"""In the order in which they are asked; the last takes every model."""


class Renderer:
    """Writes prompts for one model. Immutable, thread-safe; slow (up to a second), so it runs off the event loop."""

    def __init__(self, tokenizer: Tokenizer, kind: RendererKind) -> None:
        self.name = kind.name
        self._tokenizer = tokenizer
        self._write = kind.make(tokenizer)

    def render_text(self, conversation: Conversation, form: ChatForm) -> str:
        """The prompt's text, special tokens included. RequestError names the field that is at fault."""
        return self._write(conversation, form)

    def render_chat(
        self, conversation: Conversation, form: ChatForm, truncation: Truncation | None = None
    ) -> Rendered:
        """The prompt's text and its ids. A text has one begin token, whoever writes it."""
        text = self.render_text(conversation, form)
        token_ids = self._tokenizer.encode(text, add_special_tokens=form.add_special_tokens)
        bos_token_id = self._tokenizer.bos_token_id
        return Rendered(text=text, token_ids=kept(token_ids, token_ids, truncation, bos_token_id))


def choose_renderer(
    tokenizer: Tokenizer, name: RendererName = "auto", *, own_template: bool = True
) -> Renderer:
    """The renderer of that name; auto: the first that recognises the model.

    own_template: whether the chat template is the model's: one that was given instead is what is meant to be used.
    ConfigError for a name that there is not.
    """
    if name == "auto":
        if not own_template:
            return Renderer(tokenizer, hf.kind)
        return Renderer(tokenizer, next(kind for kind in RENDERERS if kind.recognises(tokenizer)))
    for kind in RENDERERS:
        if kind.name == name:
            return Renderer(tokenizer, kind)
    raise ConfigError("renderer", f"{name!r} is none of {', '.join(get_args(RendererName))}")


def kept(
    values: list[T], token_ids: list[int], truncation: Truncation | None, bos_token_id: int | None
) -> list[T]:
    """What a truncation leaves of values that belong to the tokens, one each (the ids themselves, say).

    A begin token stays where the left side is cut: models read badly without it.
    """
    if truncation is None or len(token_ids) <= truncation.max_tokens:
        return values
    if truncation.side == "right":
        return values[: truncation.max_tokens]
    first = values[:1] if token_ids[0] == bos_token_id else []
    return first + values[len(values) - truncation.max_tokens + len(first) :]
