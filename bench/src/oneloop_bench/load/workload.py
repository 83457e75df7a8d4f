"""What a load test sends: sessions of one turn or several, and how each is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oneloop_bench.load.record import Expected

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    prompt: Prompt
    """Text or token ids; what the user says where it is a chat's."""
    output_len: int | None = None
    """max_tokens; None leaves it to the server."""
    input_len: int | None = None
    """Tokens that the prompt is meant to have; None where nobody knows."""
    messages: list[dict[str, Any]] | None = None
    """A whole conversation instead of a prompt."""
    extra_body: dict[str, Any] | None = None
    """Fields of this request alone."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that go one after another, each with what was said before it."""

    turns: list[Turn]
    system: str | None = None
    think_s: list[float] = field(default_factory=list)
    """Pauses between a reply and the next turn."""
    timestamp: float | None = None
    """Seconds from the start of the run, where the workload says when."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a run have in common."""

    model: str
    path: str = COMPLETIONS_PATH
    is_chat: bool = False
    streams: bool = True
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 3600.0

    def body(self, turn: Turn, said: str | list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The request's JSON. said: what came before this turn, text or messages."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body["messages"] = turn.messages or [*(said or []), {"role": "user", "content": turn.prompt}]
        else:
            body["prompt"] = f"{said}{turn.prompt}" if said else turn.prompt
        if turn.output_len is not None:
            body["max_tokens"] = turn.output_len
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body | (turn.extra_body or {})

    def expected(self, body: dict[str, Any]) -> Expected:
        """What the reply to this body must give."""
        prompt = body.get("prompt")
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        num_choices = body.get("n") or 1
        return Expected(
            prompt_len=len(prompt) if isinstance(prompt, list) else None,
            max_tokens=limit if isinstance(limit, int) else None,
            num_choices=num_choices if isinstance(num_choices, int) else 1,
            ignore_eos=bool(body.get("ignore_eos")),
            echoes=bool(body.get("echo")),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One client's part of a run."""

    url: str
    asking: Asking
    sessions: list[Session]
    starts: list[float]
    """Seconds from the start of the run, one per session, in order."""
    numbers: list[int]
    """The index of each session's first request in the whole run."""
    max_concurrency: int | None = None
    insecure: bool = False
