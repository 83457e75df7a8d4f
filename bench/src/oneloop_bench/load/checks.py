"""What must hold of every reply. A server that is fast but wrong is told apart here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oneloop_bench.load.record import Choice, Expected, Seen

CHECKS: Final = {
    "role": "a chat stream has one delta with a role per choice, the first",
    "finish_reason": "every choice has one finish_reason, and nothing after it",
    "done": "a stream ends with one `data: [DONE]`",
    "choices": "every choice that was asked for is there, and no other",
    "usage": "usage is told, adds up, and equals what was counted: ids sent, ids or log-probabilities received, "
    "max_tokens where it was the end, a token at least for each event with text",
    "malformed": "every event is JSON of the protocol's shape",
}
"""Name → what must hold."""


def find_problems(seen: Seen, expected: Expected) -> list[str]:
    """Names of the checks that fail for a reply that came whole."""
    failed = {
        "role": seen.is_chat and any(not _role_is_right(seen, choice) for choice in seen.choices.values()),
        "finish_reason": any(
            choice.finish_reason is None or choice.num_after_finish for choice in seen.choices.values()
        ),
        "done": seen.is_stream and (not seen.is_done or seen.num_after_done > 0),
        "choices": sorted(seen.choices) != list(range(expected.num_choices)),
        "usage": not _usage_is_right(seen, expected),
        "malformed": seen.num_malformed > 0,
    }
    return [name for name in CHECKS if failed[name]]


def _role_is_right(seen: Seen, choice: Choice) -> bool:
    return choice.num_roles == 1 and not (seen.is_stream and choice.has_text_before_role)


def _usage_is_right(seen: Seen, expected: Expected) -> bool:
    usage, limit = seen.usage, expected.max_tokens
    if usage is None:
        return False
    told = usage.completion_tokens
    if usage.total_tokens != usage.prompt_tokens + told:
        return False
    if expected.prompt_len is not None and usage.prompt_tokens != expected.prompt_len:
        return False
    if told < seen.num_texts - expected.echoes * expected.num_choices or seen.num_ids not in (None, told):
        return False
    if limit is None:
        return True
    all_by_length = all(choice.finish_reason == "length" for choice in seen.choices.values())
    if all_by_length or expected.ignore_eos:
        return told == limit * expected.num_choices
    return told <= limit * expected.num_choices
