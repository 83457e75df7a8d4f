"""What is asked and what is seen of one request. Records travel between processes as bytes."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Expected:
    """What one request must give, as far as it is known before."""

    prompt_len: int | None = None
    """Tokens of the prompt, where exactly known: it was sent as token ids."""
    max_tokens: int | None = None
    num_choices: int = 1
    ignore_eos: bool = False
    echoes: bool = False
    """Whether each choice begins with the prompt's text."""


@dataclass(slots=True)
class Usage:
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(slots=True)
class Choice:
    """What was seen of one choice."""

    num_roles: int = 0
    has_text_before_role: bool = False
    finish_reason: str | None = None
    num_after_finish: int = 0
    """Events of the choice after the one with its finish_reason."""


@dataclass(slots=True)
class Seen:
    """What was seen of one reply, for the checks."""

    is_stream: bool = True
    is_chat: bool = False
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Usage | None = None
    num_texts: int = 0
    """Events with text, each of which holds a token at least."""
    num_ids: int | None = None
    """Tokens counted by their ids or log-probabilities; None where the reply has neither."""
    is_done: bool = False
    num_after_done: int = 0
    """Events after [DONE]."""
    num_malformed: int = 0


@dataclass(slots=True)
class Record:
    """One request's times (seconds of perf_counter, which all processes of a machine share) and result."""

    index: int
    scheduled: float
    """When it was to be sent."""
    sent: float = 0.0
    end: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    """When the events with output came; one that held several tokens is one event."""
    status: int = 0
    error: str | None = None
    problems: list[str] = field(default_factory=list)
    """Checks that failed."""
    expected_len: int | None = None
    """What the prompt's length was meant to be, for servers that do not tell usage."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    text: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the reply came whole. Its checks may have failed all the same."""
        return self.error is None

    @property
    def input_len(self) -> int:
        """Prompt tokens by the server's count, else by ours."""
        return self.prompt_tokens if self.prompt_tokens is not None else self.expected_len or 0

    @property
    def output_len(self) -> int:
        """New tokens by the server's count, else the number of events."""
        return self.completion_tokens if self.completion_tokens is not None else len(self.times)


def pack(records: list[Record]) -> bytes:
    """As bytes: a line of JSON, then all times as float64."""
    plain: list[dict[str, Any]] = []
    for record in records:
        times, record.times = record.times, array("d")
        fields = asdict(record)
        record.times = times
        plain.append({**fields, "times": len(times)})
    return orjson.dumps(plain) + b"\n" + b"".join(record.times.tobytes() for record in records)


def unpack(data: bytes) -> list[Record]:
    """What pack() was given."""
    line, _, block = data.partition(b"\n")
    records, begin = [], 0
    for fields in orjson.loads(line):
        end = begin + 8 * fields["times"]
        fields["times"] = array("d", block[begin:end])
        records.append(Record(**fields))
        begin = end
    return records
