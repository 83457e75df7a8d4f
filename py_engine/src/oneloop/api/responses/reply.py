"""The response object: what was asked, what was generated, how it stands."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from oneloop.api.errors import ErrorKind

if TYPE_CHECKING:
    from oneloop.api.blocks import Block
    from oneloop.api.errors import ApiError
    from oneloop.api.replies import Usage
    from oneloop.engine.outputs import FinishReason

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


def new_response_id() -> str:
    """An id that nobody can guess: who knows it may read what is stored under it."""
    return f"resp_{secrets.token_hex(16)}"


@dataclass(slots=True, kw_only=True)
class ResponseObject:
    """One response, as far as it has come."""

    id: str
    model: str
    echoed: dict[str, Any]
    """Members of the request that are repeated."""
    usage: Usage
    """Filled in by the end."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""
    status: Status = "in_progress"
    output: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, str] | None = None

    def end(self, finish_reason: FinishReason | None) -> None:
        """The sequence has ended."""
        match finish_reason:
            case "length":
                self.status = "incomplete"
            case "abort":
                self.status = "cancelled"
            case _:
                self.status = "completed"

    def fail(self, error: ApiError) -> None:
        """It has failed under way."""
        code = "invalid_prompt" if error.kind is ErrorKind.BAD_REQUEST else "server_error"
        self.status, self.error = "failed", {"code": code, "message": error.message}

    def wire(self) -> dict[str, Any]:
        """As JSON has it."""
        has_ended = self.status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": self.model,
            "output": self.output,
            "usage": usage_wire(self.usage) if has_ended else None,
            **self.echoed,
        }


def usage_wire(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def new_item(block: Block) -> dict[str, Any]:
    """An item of the output that has nothing in it yet."""
    token = secrets.token_hex(12)
    match block.kind:
        case "text":
            return {
                "id": f"msg_{token}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        case "thinking":
            return {
                "id": f"rs_{token}",
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
        case "call":
            return {
                "id": f"fc_{token}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": "",
            }
