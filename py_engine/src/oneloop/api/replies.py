"""Whole replies, and what they share with streamed ones: identity and usage."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

import oneloop
from oneloop.api.logprobs import encode_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.api.chat_replies import Answer
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import Added, FinishReason, TokenLogprobs

SYSTEM_FINGERPRINT = f"oneloop-{oneloop.__version__}"


def new_request_id() -> str:
    """An id for a request that brings none: nobody can guess it, for who knows it may control the request."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The same in every chunk of one reply."""

    id: str
    created: int
    """Unix time; the only thing here that follows the wall clock."""
    model: str

    @classmethod
    def make(cls, prefix: str, request_id: str, model: str) -> ReplyHead:
        """prefix: "chatcmpl" or "cmpl"."""
        return cls(f"{prefix}-{request_id}", int(time.time()), model)

    @classmethod
    def named(cls, reply_id: str, model: str) -> ReplyHead:
        """With an id that was chosen already."""
        return cls(reply_id, int(time.time()), model)


@dataclass(slots=True)
class Usage:
    """Token counts of one reply; a prompt counts once whatever n, cached tokens included."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """None: the model has no thinking that we know."""

    def wire(self) -> dict[str, Any]:
        """The `usage` object."""
        wire: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            wire["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return wire


@dataclass(frozen=True, slots=True)
class Told:
    """What a reply tells of tokens beside texts."""

    token_ids: bool
    """Whether each choice has the ids of its tokens."""
    prompts: Sequence[Mapping[str, Any]]
    """Per choice (of chat: the one of all) what is told of its prompt: `prompt_token_ids` and the like, or nothing."""


@dataclass(slots=True)
class Choice:
    """One sequence, added up."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: orjson.Fragment | None = None
    """The field of that name, encoded."""

    def add(self, delta: Added) -> None:
        """Append what a delta brings."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


Logprobs: TypeAlias = "orjson.Fragment | None"
"""A choice's `logprobs`, encoded; None where none were asked for."""


async def encode_logprobs(
    choices: Sequence[Choice], encoders: Sequence[LogprobsEncoder] | None
) -> list[Logprobs]:
    """Per choice. encoders: one per choice, or None."""
    if encoders is None:
        return [None] * len(choices)
    return [
        orjson.Fragment(await encode_whole(encoder, choice.logprobs))
        for encoder, choice in zip(encoders, choices, strict=True)
    ]


def chat_reply(
    head: ReplyHead,
    choices: Sequence[Choice],
    answers: Sequence[Answer],
    usage: Usage,
    logprobs: Sequence[Logprobs],
    *,
    echo: str = "",
    told: Told | None = None,
) -> dict[str, Any]:
    """The body of a chat completion. answers, logprobs: per choice. echo: text that goes before each answer."""
    ids = told is not None and told.token_ids
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            _chat_choice(index, choice, answers[index], logprobs[index], echo) | _ids(choice, ids)
            for index, choice in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": usage.wire(),
        "prompt_logprobs": choices[0].prompt_logprobs,
        "kv_transfer_params": None,
        **({} if told is None else told.prompts[0]),
    }


def _ids(choice: Choice, asked: bool) -> dict[str, Any]:
    return {"token_ids": choice.token_ids} if asked else {}


def _chat_choice(index: int, choice: Choice, answer: Answer, logprobs: Logprobs, echo: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": echo + (answer.content or "") if echo else answer.content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": answer.reasoning,
    }
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def completion_reply(
    head: ReplyHead,
    choices: Sequence[Choice],
    usage: Usage,
    *,
    echoes: Sequence[str],
    logprobs: Sequence[Logprobs],
    told: Told | None = None,
) -> dict[str, Any]:
    """The body of a completion. echoes, logprobs: per choice; an echo is the prompt text in front, "" for none."""
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            _completion_choice(index, choice, echoes[index], logprobs[index]) | _told(index, choice, told)
            for index, choice in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": usage.wire(),
        "kv_transfer_params": None,
    }


def _told(index: int, choice: Choice, told: Told | None) -> dict[str, Any]:
    return {} if told is None else {**_ids(choice, told.token_ids), **told.prompts[index]}


def _completion_choice(index: int, choice: Choice, echo: str, logprobs: Logprobs) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prompt_logprobs": choice.prompt_logprobs,
    }
