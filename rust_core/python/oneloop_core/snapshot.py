"""What `Core.snapshot()` returns: plain dictionaries, with these keys."""

from typing import Literal, TypedDict


class RunningSequence(TypedDict):
    """A sequence in a slot."""

    request: int
    """Handle of its request."""
    index: int
    """Which of the request's sequences."""
    priority: int
    slot: int
    num_prompt_tokens: int
    num_output_tokens: int
    """Known ones; one more may be on its way."""
    max_tokens: int
    """Output tokens at most."""
    num_computed_tokens: int
    """Tokens with KV after the steps in flight."""
    num_owed_tokens: int
    """Tokens to compute before the next one can be sampled: 1 decodes, more is a prompt (or a recomputation) under
    way, 0 has all that it may get."""
    num_blocks: int
    num_cached_blocks: int
    """Of them found in the prefix cache."""
    num_preemptions: int
    age_s: float
    """Since it was submitted."""


class WaitsFor(TypedDict):
    """Why a sequence does not run."""

    what: Literal["next_step", "results", "slots", "blocks", "prefix", "turn"]
    """next_step: nothing is in its way. results: a token of it is still being computed. slots: rows of the batch.
    blocks: room in the KV cache, a margin included. prefix: a running sequence that is about to compute what it needs
    too. turn: it stands behind the first in the queue."""
    of_request: int | None
    """prefix: whose. turn: who is first."""
    of_index: int | None
    needed: int | None
    """slots, blocks: so many. prefix: blocks that the two share."""
    available: int | None


class WaitingSequence(TypedDict):
    """A sequence without a slot."""

    request: int
    index: int
    priority: int
    num_sequences: int
    """Sequences that start with it."""
    num_prompt_tokens: int
    num_output_tokens: int
    """More than 0: it was preempted."""
    max_tokens: int
    num_preemptions: int
    age_s: float
    waits_for: WaitsFor


class StepSummary(TypedDict):
    """One step."""

    step_id: int
    num_rows: int
    num_decodes: int
    """Rows of one token."""
    num_tokens: int
    num_samples: int
    num_admitted: int
    num_preempted: int
    """Since the step before it."""
    num_finished: int
    """Sequences that ended since the step before it."""
    age_s: float
    """Since it was scheduled."""
    took_s: float | None
    """From its schedule to its commit or failure; None in flight."""


class Snapshot(TypedDict):
    """What the core holds."""

    running: list[RunningSequence]
    """Most important first: who is last loses its blocks first."""
    waiting: list[WaitingSequence]
    """In order of admission. Of a request that has not run, only sequence 0."""
    steps: list[StepSummary]
    """The last 64 or fewer, oldest first."""
    kv_map: str
    """The blocks by number, a letter for so many of them: what most of these are. "." free, "c" cached, "u" used,
    "s" used by several."""
    blocks_per_letter: int
