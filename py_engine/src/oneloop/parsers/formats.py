"""What a format says of itself. Each is one file in `reasoning/` or `tools/` that ends in one of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The request's functions: name → JSON schema of the parameters."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way in which models write."""

    name: str
    """As users pass it to --tool-call-parser or --reasoning-parser."""
    aliases: tuple[str, ...] = ()
    recognises: Callable[[str], bool]
    """Whether a chat template is of a model that writes so."""
    markers: tuple[str, ...] = ()
    """Tokens that must be visible to the parser; where the tokenizer calls them special they would be dropped."""


def json_arguments(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Arguments written as the JSON of an object."""
    return {"type": "json_schema", "json_schema": schema}


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a model writes calls, in elements of structural tags. Special tokens stand as their text."""

    begin: str
    """In front of a call's arguments; NAME stands for the function's name."""
    end: str
    """Behind them."""
    separator: str = ""
    """Between two calls."""
    before_all: str = ""
    after_all: str = ""
    marks: tuple[str, ...] = ()
    """Texts with one of which everything begins that the parser takes for a call, what the form begins with first;
    empty for forms in which calls are known by their place."""
    looks: Callable[[Collection[str]], str] | None = None
    """Where there are no marks: the pattern of what a text begins with that the parser takes for calls of functions of
    these names."""
    bare_marks: tuple[str, ...] = ()
    """Beside `looks`, at least one: texts behind which calls stand as well."""
    arguments: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = json_arguments
    """The element of a call's arguments by their schema, which is of objects; None: it cannot be said in this form."""
    names: re.Pattern[str] = re.compile(".+")
    """Names of functions that can be called in it."""
    read: Callable[[Scanner, Tools], Steps[None]] | None = None
    """Reads what the elements let through, where the format's own reader takes some of it for something else."""


NAME = "{name}"
"""In CallForm.begin: the function's name."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat(Format):
    """How a model writes calls."""

    read: Callable[[Scanner, Tools], Steps[None]]
    """Reads content and calls to the end of the text."""
    call_id: Callable[[str], str] = field(default=lambda number: f"call_{number}")
    """A call's id where the model writes none, of 32 random hexadecimal digits."""
    form: Callable[[str], CallForm] | None = None
    """How calls are written that must come, by the chat template; None: they are written as no model does."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat(Format):
    """How a model marks its thinking."""

    read: Callable[[Scanner, bool], Steps[None]]
    """Reads the thinking in front of the answer, if there is one. The flag: it is open from the first character on."""
    start: str = ""
    """A prompt that ends with it has opened the thinking."""
    end: str = ""
    """What ends the thinking: in a prompt, it is over; to end a running one, these are the tokens to go on with."""
    starts_open: bool = False
    """The model thinks at once, without a mark of its own, unless the prompt or the client says no."""
    also_ends: bool = False
    """Markup other than `end` ends the thinking as well."""
    read_all: Callable[[Scanner, Tools], Steps[None]] | None = None
    """For a format whose thinking and calls are of one piece: it reads all of the text, whatever the tool format."""

    def is_open(self, prompt_end: str, is_on: bool | None) -> bool:
        """Whether the thinking is open when the model begins.

        prompt_end: the last characters of the prompt. is_on: what the client said about thinking, None for nothing.
        """
        tail = prompt_end.rstrip()
        if self.start and tail.endswith(self.start):
            return True
        if self.end and tail.endswith(self.end):
            return False
        return self.starts_open and is_on is not False

    def is_over(self, prompt_end: str) -> bool:
        """Whether the prompt has closed the thinking, so that all of the text is the answer."""
        return bool(self.end) and prompt_end.rstrip().endswith(self.end)
