"""A conversation as every API hands it to the renderer: plain checked values, no wire format's own shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made earlier."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    """Text only where it is a model's own malformed call."""
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn."""

    role: Role
    content: str | tuple[str, ...] = ""
    """Text, or several parts of text. Never None: a turn without text is ""."""
    name: str | None = None
    """Of the speaker; of the function, in what a tool answered."""
    reasoning: str | None = None
    """What an assistant thought before its text."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool's answer: the call that it answers."""

    @property
    def text(self) -> str:
        """The content as one text, parts on lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments, an object. None: it takes none."""
    strict: bool | None = None

    def wire(self) -> dict[str, Any]:
        """As chat's `tools` has it, which is what templates read. What was not given is left out."""
        given = {
            "description": self.description,
            "parameters": None if self.parameters is None else dict(self.parameters),
            "strict": self.strict,
        }
        shown = {key: value for key, value in given.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **shown}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything that a prompt is made of."""

    messages: tuple[Message, ...]
    """At least one."""
    tools: tuple[Tool, ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends inside the last message. Excludes add_generation_prompt."""
    add_special_tokens: bool = False
    """Also what the tokenizer puts around a plain text, although templates write their own."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`: no reserved names, bounded."""
    chat_template: str | None = None
    """A template to use instead of the model's own. Only where the server trusts its clients with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt, as text and as what the model reads."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """How many tokens of a prompt are kept, and which."""

    max_tokens: int
    """At least 1."""
    side: TruncationSide = "left"
    """Where tokens are dropped."""
