"""The executor protocol: where steps run. The engine loop knows nothing else of the worker.

Imports no torch. Implementations: `cpu` (one step thread), `cuda` (one stream), `null` (no model).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from oneloop.formats.generation import GenerationDefaults
    from oneloop.formats.gguf import GgufFile
    from oneloop_core import SlabLayout

LoadProgress: TypeAlias = "Callable[[str, int, int], None]"
"""(what, done, total): called from any thread while a model is fetched or read."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this machine, with what their headers say outside the weights."""

    path: Path | None
    """The GGUF file, or the folder with config.json. None: there is no model (`null` executor)."""
    generation: GenerationDefaults
    """The model's own sampling defaults and end tokens."""
    gguf: GgufFile | None = None
    """The header, where it is a GGUF file."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of a loaded model."""

    vocab_size: int
    """Rows of the output head: every token id is below it."""
    max_model_len: int
    """Context length in tokens, after the configuration's limits."""
    num_blocks: int
    """KV blocks the memory plan allows."""
    block_size: int
    """Tokens per KV block."""
    hidden_size: int = 0
    """Numbers of a pooled hidden state. 0: this executor has none."""
    short_vectors: tuple[int, ...] | None = None
    """As ModelSpec has it."""
    quick_step_tokens: int | None = None
    """Tokens of a step that streams hardly notice (worker/roofline.py). None: the device's rates are unknown."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One step that ended. error is None, or one line without paths or addresses."""

    slab_index: int
    error: str | None


class Executor(Protocol):
    """Runs steps in the order of submit(). All methods are called from the loop's thread unless they say otherwise."""

    def locate(self, progress: LoadProgress | None = None) -> ModelFiles:
        """Find the model's files, fetching them where needed, and read their headers. Imports nothing heavy.

        Called before start(), so that the tokenizer can be read while start() loads. Blocking (call it in a thread).
        Raises ModelError.
        """

    def start(self, progress: LoadProgress | None = None) -> ModelInfo:
        """Load the model that locate() found and plan memory. Blocking (call it in a thread). Raises ModelError."""

    def attach(self, layout: SlabLayout, num_slabs: int, *, max_num_seqs: int) -> Sequence[memoryview]:
        """Allocate the ring of slabs and the per-slot device state. The views are writable and 64-byte aligned.

        Blocking (call it in a thread).
        """

    def submit(self, slab_index: int) -> None:
        """Launch the step written in that slab: forward and, where no sample has a mask, sampling. Never blocks."""

    def sample(self, slab_index: int) -> None:
        """The masks of a step whose header's num_masked is not 0 are in its slab: let it be sampled. Never blocks.

        Once for each such step, after its submit() and before the next one. A step that has failed meanwhile takes no
        notice. The rows of masks are those of the slab's `sample_mask_row`; a token whose bit is not set is never
        sampled.
        """

    def prepare_in_idle(self) -> bool:
        """Do a little of what makes later steps quicker, as capturing one graph, while no step is in flight.

        Takes at most some 60 ms, in which the loop does nothing else. False: there is no more, until other steps have
        run. Never needed, and never raises for want of memory: a step does without what is not prepared.
        """

    def completion_fd(self) -> int:
        """A descriptor that is readable while completions are waiting."""

    def completions(self) -> list[Completion]:
        """Take all waiting completions, in order, and clear the descriptor. Never blocks."""

    def expert_counts(self) -> dict[int, list[int]] | None:
        """Layer with experts → the tokens that each has been sent. None where nothing is counted (see the setting
        expert_statistics). Blocking (call it in a thread)."""

    def shutdown(self) -> None:
        """Finish the step in flight, drop the rest, free everything. Idempotent; may block a short while."""
