"""What every renderer is to the registry: a name, a test, and a maker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.tokenize.conversation import ChatForm, Conversation

if TYPE_CHECKING:
    from oneloop.tokenize.tokenizer import Tokenizer

Write = Callable[[Conversation, ChatForm], str]
"""The prompt's text. RequestError names the field. Runs off the event loop, in any number of threads at once."""


@dataclass(frozen=True, slots=True)
class RendererKind:
    """A way of writing prompts."""

    name: str
    recognises: Callable[[Tokenizer], bool]
    """Whether it is the right one for a model, by its tokenizer and template."""
    make: Callable[[Tokenizer], Write]
