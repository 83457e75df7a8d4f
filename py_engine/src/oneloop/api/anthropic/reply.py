"""Whole messages, and what they share with streamed ones: ids, usage, the reason why they ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.blocks import BlockTracker

if TYPE_CHECKING:
    from oneloop.api.blocks import Block
    from oneloop.api.replies import Choice, ReplyHead, Usage
    from oneloop.api.reply_format import BlockSource
    from oneloop.engine.outputs import FinishReason


def usage_wire(usage: Usage) -> dict[str, Any]:
    """The `usage` object: what came from the prefix cache is counted apart from the other tokens of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def stop_members(
    finish_reason: FinishReason | None, stop: int | str | None, *, has_calls: bool, is_full: bool
) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`. is_full: the limit that was met is the context's."""
    match finish_reason, stop:
        case "length", _:
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        case "stop", str():
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        case "abort", _:
            reason = "pause_turn"
        case _:
            reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def message_wire(head: ReplyHead, usage: Usage) -> dict[str, Any]:
    """A message that has not begun."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_wire(usage),
    }


def whole_message(
    head: ReplyHead, choice: Choice, usage: Usage, source: BlockSource, *, is_full: bool
) -> dict[str, Any]:
    """The body of a whole reply."""
    tracker = BlockTracker(source.call_id)
    reason = choice.finish_reason or "stop"
    tracker.add(source.add(choice.text, choice.token_ids, reason))
    tracker.finish(reason)
    ended = stop_members(
        choice.finish_reason, choice.stop_reason, has_calls=tracker.has_calls, is_full=is_full
    )
    content = [_block_wire(block) for block in tracker.blocks]
    return {**message_wire(head, usage), "content": content, **ended}


def _block_wire(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block)}


def _input(block: Block) -> Any:
    """The arguments as the model wrote them; a call that was cut has none that could be read."""
    try:
        is_object = type(orjson.loads(block.text)) is dict
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(block.text) if is_object else {}
