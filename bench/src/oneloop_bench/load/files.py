"""Workloads that come from a file: prompts of one's own, and traces of when how much was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from oneloop_bench.load.prompts import IdPrompts
from oneloop_bench.load.workload import Session, Turn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from oneloop_bench.load.prompts import PromptSource


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
        is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not (isinstance(prompt, str) or is_ids or isinstance(messages, list)):
            raise ValueError(
                f'{self.path}, line {number}: "prompt" (text or token ids) or "messages" is needed'
            )
        output_len = found.get("output_tokens", self.output_len)
        input_len = len(prompt) if isinstance(prompt, list) else None
        turn = Turn(prompt or "", output_len, input_len, messages, found.get("extra_body"))
        return Session([turn], timestamp=found.get("timestamp"))


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
                timestamp, input_len, output_len = (
                    line[name] for name in ("timestamp", "input_length", "output_length")
                )
            except KeyError as error:
                raise ValueError(f"{self.path}, line {number}: {error} is missing") from None
            if input_len < 1 or output_len < 1:
                raise ValueError(f"{self.path}, line {number}: lengths must be 1 or more")
            found.append(
                (timestamp * self.seconds_per_unit, input_len, output_len, line.get("hash_ids") or [])
            )
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
