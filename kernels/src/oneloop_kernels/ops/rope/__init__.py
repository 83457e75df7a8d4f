"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's Llama, and what goes with it.

One operation per layer stands between the projection of queries, keys and values and the attention: norms of the heads
(Qwen3), rotation, and the write to the KV cache. The angles of a step are computed once, for all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.packed_linear import PackedCall


class RotaryStep(NamedTuple):
    """Cosines and sines of a step's angles, in the layout of the implementation that made them."""

    cos: torch.Tensor
    sin: torch.Tensor


class HeadNorms(NamedTuple):
    """RMS normalisation of every query and key head before the rotation; see ops.rms_norm for the rounding."""

    weight: torch.Tensor
    """[2, head_dim], contiguous, of the model's dtype: the queries' weight, then the keys'."""
    eps: float


class Angles(Protocol):
    """Positions → cosines and sines, for one model."""

    def __call__(self, positions: torch.Tensor) -> RotaryStep:
        """positions: [num_tokens] integers below 2²⁴, so that float32 holds them exactly."""

    def with_embedding(
        self, positions: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor
    ) -> tuple[RotaryStep, torch.Tensor]:
        """The angles, and the tokens' rows of the table of embeddings ([num_tokens, size], new).

        Both are the beginning of a step; together they cost a GPU one launch. token_ids: [num_tokens] int32 or int64;
        table: [vocab_size, size], rows contiguous. Ids lie in [0, vocab_size). For one that does not, a CPU raises
        IndexError and a GPU gives the nearest row: no implementation ever reads outside the table.
        """


class RopeOps(Protocol):
    """Angles of a step, and their use in each layer."""

    def angles(self, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> Angles:
        """frequencies: radians per position, [head_dim / 2] float32; factor: on cosine and sine; dtype: the model's.

        The angle is the float32 product of position and frequency, as Hugging Face computes it.
        """

    def project_and_store(
        self,
        call: LinearCall | PackedCall,
        rotary: RotaryStep,
        norms: HeadNorms | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor | None:
        """The linear map to queries, keys and values, and rotate_and_store in one; None: nothing done, do one by one.

        call: with norm or bias, without gate and residual. Returns [n, num_heads + 2 · num_kv_heads, head_dim], new and
        contiguous, of which only the queries are defined. The rest as in rotate_and_store.
        """

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep,
        norms: HeadNorms | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Norm and rotate queries, in place, and keys; store keys and values in one layer of the cache.

        Elements i and i + head_dim / 2 of a head are the coordinates of a point that is turned by angle i.
        qkv: [n, num_heads + 2 · num_kv_heads, head_dim] contiguous; afterwards only its queries are defined.
        rotary: for n positions, from the same implementation's `angles`. cache: one layer, see ops.kv_cache.
        slots: [m ≤ n] int64, block · block_size + offset, distinct; −1, and rows from m on, are padding, which is
        rotated or not but never stored.
        """


ROPE: Family[RopeOps] = Family(
    "rope",
    (
        Implementation("triton", "oneloop_kernels.ops.rope.triton", "TRITON", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.rope.reference", "REFERENCE"),
    ),
)
