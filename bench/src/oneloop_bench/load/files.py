"""Workloads that come from a file: prompts of one's own, and traces of when how much was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from oneloop_bench.load.prompts import IdPrompts
from oneloop_bench.load.workload import Session, Turn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from oneloop_bench.load.prompts import PromptSource


MAX_LENGTH: Final = 1 << 24
"""Tokens of a trace's prompt or reply."""


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file. ValueError that names the line; OSError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = orjson.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
            if not isinstance(found, dict):
                raise ValueError(f"{path}, line {number}: a line is one JSON object")
            yield number, found


def _is_whole(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _are_ids(value: object, low: int) -> bool:
    return isinstance(value, list) and all(_is_whole(one, low) for one in value)


@dataclass(frozen=True, slots=True)
class CustomPrompts:
    """Prompts from a JSONL file, used over again where more are wanted than it has.

    A line has "prompt" (text or token ids) or "messages" (for chat), and may have "output_tokens" (max_tokens),
    "timestamp" (seconds) and "extra_body" (more fields of the request).
    """

    path: Path
    output_len: int | None = None
    """max_tokens of lines that do not say."""
    shuffles: bool = True

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """One turn each."""
        lines = [self._session(number, found) for number, found in read_lines(self.path)]
        if not lines:
            raise ValueError(f"{self.path} has no prompts")
        if all(line.timestamp is not None for line in lines):
            lines.sort(key=lambda line: line.timestamp or 0.0)
            return lines[:count]  # a trace happens once
        order = rng.permutation(len(lines)) if self.shuffles else np.arange(len(lines))
        return [lines[order[place % len(lines)]] for place in range(count)]

    def _session(self, number: int, found: dict[str, Any]) -> Session:
        prompt, messages = found.get("prompt"), found.get("messages")
        has_prompt = bool(prompt) and (isinstance(prompt, str) or _are_ids(prompt, 0))
        has_messages = isinstance(messages, list) and all(isinstance(one, dict) for one in messages or [None])
        more, timestamp = found.get("extra_body"), found.get("timestamp")
        output_len = found.get("output_tokens", self.output_len)
        faults = {
            '"prompt" (text or token ids) or "messages" (objects) is needed': not has_prompt
            and not has_messages,
            '"output_tokens" is a whole number above 0': output_len is not None
            and not _is_whole(output_len, 1),
            '"timestamp" is in seconds, 0 or more': timestamp is not None and not _is_time(timestamp),
            '"extra_body" is an object': not isinstance(more, dict | None),
        }
        for fault in (text for text, is_so in faults.items() if is_so):
            raise ValueError(f"{self.path}, line {number}: {fault}")
        input_len = len(prompt) if isinstance(prompt, list) else None
        turn = Turn(
            prompt if prompt and has_prompt else "",
            output_len,
            input_len,
            messages if has_messages else None,
            more,
        )
        return Session([turn], timestamp=timestamp)


@dataclass(frozen=True, slots=True)
class TimedTrace:
    """Requests of a trace: when, how long, and what they share with others.

    A line of the JSONL file has "timestamp", "input_length", "output_length" and may have "hash_ids": one id per block
    of the prompt; blocks of one id hold the same tokens, so prompts share prefixes as those of the trace did. This is
    the format of the Mooncake traces (timestamps in ms, blocks of 512).
    """

    path: Path
    seconds_per_unit: float = 1.0
    block_len: int = 16

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """The first `count` requests, the first of them at 0 s."""
        found = []
        for number, line in read_lines(self.path):
            try:
                found.append(self._request(line))
            except KeyError as error:
                raise ValueError(f"{self.path}, line {number}: {error} is missing") from None
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from None
            if len(found) == count:
                break
        if not found:
            raise ValueError(f"{self.path} has no requests")
        found.sort(key=lambda request: request[0])
        seed = int(rng.integers(1 << 62))
        return [
            Session(
                [Turn(self._prompt(source, rng, seed, input_len, hash_ids), output_len, input_len)],
                timestamp=timestamp - found[0][0],
            )
            for timestamp, input_len, output_len, hash_ids in found
        ]

    def _request(self, line: dict[str, Any]) -> tuple[float, int, int, list[int]]:
        """(seconds, tokens in, tokens out, hash ids). KeyError, ValueError."""
        timestamp, *lengths = (line[name] for name in ("timestamp", "input_length", "output_length"))
        hash_ids = line.get("hash_ids") or []
        if not all(_is_whole(length, 1, MAX_LENGTH) for length in lengths):
            raise ValueError(f"lengths must be 1 or more, whole numbers up to {MAX_LENGTH}")
        if not _is_time(timestamp) or not _is_time(timestamp * self.seconds_per_unit):
            raise ValueError('"timestamp" is a number, 0 or more')
        if not _are_ids(hash_ids, 0):
            raise ValueError('"hash_ids" are whole numbers, 0 or more')
        return timestamp * self.seconds_per_unit, lengths[0], lengths[1], hash_ids

    def _prompt(
        self, source: PromptSource, rng: np.random.Generator, seed: int, length: int, hash_ids: list[int]
    ) -> Any:
        """Blocks by their ids; what they do not cover is drawn."""
        blocks = hash_ids[: -(-length // self.block_len)]
        prompt: Any = [] if isinstance(source, IdPrompts) else ""
        left = length
        for block in blocks:
            tokens = source.draw(np.random.default_rng((seed, block)), self.block_len)
            # The last block of a prompt may be cut, which only ids and exact words allow to the token.
            size = min(left, self.block_len)
            prompt = source.join(prompt, tokens if size == self.block_len else _cut(source, tokens, size))
            left -= size
        return source.join(prompt, source.draw(rng, left)) if left else prompt


def _cut(source: PromptSource, tokens: Any, size: int) -> Any:
    """The first tokens; of words, the first words."""
    if isinstance(source, IdPrompts):
        return tokens[:size]
    return "".join(f" {word}" for word in tokens.split()[:size])
