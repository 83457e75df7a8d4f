"""Replies of tokens: what /inference/v1/generate answers, whole or streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.chunks import DONE, event, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.errors import ApiError
    from oneloop.api.protocol.sampling import StreamOptions
    from oneloop.api.replies import Choice, Logprobs, ReplyHead, Usage
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import Added


def generate_reply(
    head: ReplyHead,
    choices: Sequence[Choice],
    usage: Usage,
    logprobs: Sequence[Logprobs],
    *,
    with_text: bool,
) -> dict[str, Any]:
    """The body of a whole one. with_text: each choice has its text beside its tokens."""
    return {
        "request_id": head.id,
        "model": head.model,
        "created": head.created,
        "choices": [
            {
                "index": index,
                **({"text": choice.text} if with_text else {}),
                "token_ids": choice.token_ids,
                "logprobs": logprobs[index],
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage.wire(),
        "prompt_logprobs": choices[0].prompt_logprobs,
        "kv_transfer_params": None,
    }


class TokenChunks:
    """Each choice's deltas as events, an EventEncoder. Nothing goes by the relay, which knows texts alone."""

    __slots__ = ("_head", "_logprobs", "_options", "_usage", "_with_text", "continuous_usage", "num_choices")

    def __init__(
        self,
        head: ReplyHead,
        *,
        num_choices: int,
        options: StreamOptions,
        usage: Usage,
        logprobs: Sequence[LogprobsEncoder] | None,
        with_text: bool,
    ) -> None:
        """logprobs: one per choice. with_text: chunks have the text beside the tokens."""
        self.num_choices = num_choices
        self.continuous_usage = options.continuous_usage
        self._head = {"request_id": head.id, "model": head.model, "created": head.created}
        self._options = options
        self._usage = usage
        self._logprobs = logprobs
        self._with_text = with_text

    def encode(self, choice: int, delta: Added) -> bytes:
        """The event of this delta; none for one that brings neither tokens nor an end."""
        ids, finish_reason = delta.token_ids, delta.finish_reason
        logprobs = None
        if self._logprobs is not None:
            self._logprobs[choice].add(delta.logprobs or ())
            logprobs = orjson.Fragment(self._logprobs[choice].take())
        if finish_reason is None and not ids:
            return b""
        shown: dict[str, Any] = {"index": choice, "token_ids": ids, "logprobs": logprobs}
        if self._with_text:
            shown["text"] = delta.text
        ended = {"finish_reason": finish_reason, "stop_reason": delta.stop_reason}
        return self._event([shown | ended], self._usage.wire() if self.continuous_usage else None)

    def text_frame(self, choice: int) -> None:
        """As EventEncoder: never relayed."""

    def closing(self) -> bytes:
        """As EventEncoder: the end mark, behind the event with the usage and no choices where one is asked for."""
        return self._event([], self._usage.wire()) + DONE if self._options.include_usage else DONE

    def failure(self, error: ApiError) -> bytes:
        """As EventEncoder."""
        return failure(error)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        return event({**self._head, "choices": choices, "usage": usage})
