"""Typed views on one slab, made once; reading a step allocates nothing but its header."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from oneloop_core import SlabLayout

    Ints = npt.NDArray[np.int32]
    Floats = npt.NDArray[np.float32]

_DTYPES: Final[Mapping[str, type[np.generic]]] = {"i32": np.int32, "i64": np.int64, "f32": np.float32}

LOGPROB_COLUMNS: Final = 21
"""Columns of the output's log-probabilities: the sampled id, then the top 20."""
SLAB_ALIGNMENT: Final = 64


class StepFlag(IntFlag):
    """Bits of the header's `flags`: what any sample of the step needs."""

    RANDOM = 1
    PENALTIES = 2
    BIAS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    FIXED_ORDER = 32


@dataclass(frozen=True, slots=True)
class StepHeader:
    """Entries of the slab's header that the runner reads, under the core's names."""

    step_id: int
    num_rows: int
    num_tokens: int
    num_samples: int
    num_admitted: int
    num_block_deltas: int
    num_cow: int
    num_forks: int
    num_bias: int
    num_banned: int
    num_history: int
    num_single: int
    max_seq_len: int
    max_logprobs: int
    flags: int
    num_widely_shared: int
    num_masked: int
    num_scores: int
    max_score_logprobs: int
    num_pools: int
    num_picked: int
    num_picks: int

    @property
    def looks_at_hidden(self) -> bool:
        """Whether something is wanted of the step's hidden states beside samples."""
        return bool(self.num_scores or self.num_pools or self.num_picked)


@dataclass(frozen=True, slots=True)
class SlabViews:
    """The arrays of one slab, each of its full length; docs/architecture.md says what they mean.

    The two-dimensional outputs have LOGPROB_COLUMNS columns, the masks a row for each of max_num_seqs.
    """

    row_slot: Ints
    row_num_scheduled: Ints
    row_num_computed: Ints
    query_start: Ints
    sample_slot: Ints
    sample_token_index: Ints
    sample_output_index: Ints
    token_ids: Ints
    cow_src: Ints
    cow_dst: Ints
    fork_src: Ints
    fork_dst: Ints
    fork_num_blocks: Ints
    admitted_slot: Ints
    admitted_temperature: Floats
    admitted_top_p: Floats
    admitted_min_p: Floats
    admitted_repetition_penalty: Floats
    admitted_presence_penalty: Floats
    admitted_frequency_penalty: Floats
    admitted_top_k: Ints
    admitted_num_logprobs: Ints
    admitted_min_tokens: Ints
    admitted_num_prompt_tokens: Ints
    admitted_seed: npt.NDArray[np.int64]
    admitted_bias_start: Ints
    admitted_banned_start: Ints
    admitted_history_start: Ints
    delta_slot: Ints
    delta_index: Ints
    delta_block: Ints
    bias_token: Ints
    bias_value: Floats
    banned_token: Ints
    history_token: Ints
    score_token_index: Ints
    score_token: Ints
    pool_start: Ints
    pool_end: Ints
    pick_token_index: Ints
    pick_start: Ints
    pick_token: Ints
    output_token: Ints
    output_rank: Ints
    output_logprob_token: Ints
    output_logprob: Floats
    score_rank: Ints
    score_logprob_token: Ints
    score_logprob: Floats
    pooled: Floats
    pick_logprob: Floats
    sample_mask_row: Ints
    mask_word: npt.NDArray[np.uint32]
    _header: npt.NDArray[np.int64]
    _header_indices: tuple[int, ...]

    @classmethod
    def over(cls, buffer: memoryview, layout: SlabLayout) -> SlabViews:
        """Views on a writable buffer of layout.num_bytes. ValueError when the layout lacks a field."""
        arrays: dict[str, npt.NDArray[Any]] = {
            field.name: np.frombuffer(buffer, _DTYPES[field.dtype], field.length, field.offset)
            for field in layout.fields
        }
        for name in ("output_logprob_token", "output_logprob", "score_logprob_token", "score_logprob"):
            arrays[name] = arrays[name].reshape(-1, LOGPROB_COLUMNS)
        if "mask_word" in arrays and "sample_mask_row" in arrays:
            masks = arrays["mask_word"].view(np.uint32)
            arrays["mask_word"] = masks.reshape(len(arrays["sample_mask_row"]), -1)
        names = [field.name for field in fields(cls) if not field.name.startswith("_")]
        header_names = [field.name for field in fields(StepHeader)]
        missing = [name for name in [*names, "header"] if name not in arrays]
        missing += [f"header.{name}" for name in header_names if name not in layout.header]
        if missing:
            raise ValueError(
                f"the slab layout lacks {', '.join(missing)}: core and engine are of different versions"
            )
        return cls(
            **{name: arrays[name] for name in names},
            _header=arrays["header"],
            _header_indices=tuple(layout.header[name] for name in header_names),
        )

    def header(self) -> StepHeader:
        """The header of the step now in the slab."""
        values = self._header.tolist()
        return StepHeader(*[values[index] for index in self._header_indices])


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed, writable memory for a slab: it starts at a multiple of SLAB_ALIGNMENT."""
    room = np.zeros(num_bytes + SLAB_ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % SLAB_ALIGNMENT
    return memoryview(room[start : start + num_bytes])  # type: ignore[arg-type]  # arrays are buffers
