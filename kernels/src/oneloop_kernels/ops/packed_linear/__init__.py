"""y = x · Wᵀ + b where W's numbers are of 4, 6 or 8 bits, in groups that have a scale each; x and y are of 16 bits.

One layout (`PackedWeight`) that the tensor cores' registers are filled from without a detour, whatever file the weights
came from: `checkpoint` reads AWQ's, GPTQ's and compressed-tensors' layouts, `gguf` the blocks of GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear import Norm

Bits = Literal[4, 6, 8]
Shift = Literal["none", "zero", "offset"]

TILE_ROWS: Final = 64
TILE_COLUMNS: Final = 128
TILE_WORDS: Final = TILE_ROWS * TILE_COLUMNS // 8
"""int32 of a tile's lower four bits."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Numbers u of `bits` bits; with c = 2^(bits − 1) the weight is, by `shift`:

    "none": (u − c) · scale. "zero": (u − zero) · scale. "offset": (u − c) · scale + offset.

    Rows lie in tiles of 64, columns in tiles of 128, as `packing` says; scales, zeros and offsets have the type of x.
    A gated map's halves begin with a tile each. `order`: column j is multiplied by x's column order[j] (None: j).
    """

    words: torch.Tensor
    """int32 [row tiles, column tiles, 1024]: the lower four bits."""
    high: torch.Tensor | None
    """The upper bits: of 8 as words, of 6 int16 [row tiles, column tiles, 1024]."""
    params: torch.Tensor
    """int32 [row tiles, column tiles, 32 · groups, kinds]: pairs of 16-bit scales, beside them of zeros or offsets."""
    bits: Bits
    shift: Shift
    rows: int
    """Of the weight, both halves together."""
    columns: int
    halves: int
    """2: the first half of the rows is the gate, the second up."""
    dtype: torch.dtype
    """Of scales and of x."""
    order: torch.Tensor | None = None
    """int32 or int64 [columns]."""

    @property
    def groups(self) -> int:
        """Scales per row of a tile: 1, 2, 4 or 8."""
        return self.params.shape[2] // 32

    @property
    def num_bytes(self) -> int:
        """Of all that a product must read."""
        tensors = (self.words, self.high, self.params)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


class PackedCall(NamedTuple):
    """One use of a packed linear map: as `linear.LinearCall`, but for the weight. A gated call needs halves = 2."""

    x: torch.Tensor
    """[num_tokens, columns], rows contiguous, of the weight's dtype. Never overwritten."""
    weight: PackedWeight
    bias: torch.Tensor | None = None
    """[rows]."""
    norm: Norm | None = None
    gated: bool = False
    residual: torch.Tensor | None = None
    """[num_tokens, out], rows contiguous: the result is added into it, and it is returned."""
    out: torch.Tensor | None = None
    """[num_tokens, out], rows contiguous: without a residual, what the result is written to."""
    tickets: torch.Tensor | None = None
    """As `linear.LinearCall.tickets`."""

    @property
    def out_size(self) -> int:
        """Columns of the result."""
        return self.weight.rows // 2 if self.gated else self.weight.rows


class PackedLinear(Protocol):
    """A linear map of packed weights with what surrounds it."""

    def __call__(self, call: PackedCall) -> torch.Tensor:
        """Returns the residual, or out, or a new [num_tokens, out] of any strides.

        Each weight is rounded to x's dtype, products are summed in float32.
        """


PACKED_LINEAR: Family[PackedLinear] = Family(
    "packed_linear",
    (
        Implementation("triton", "oneloop_kernels.ops.packed_linear.gpu", "linear", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.packed_linear.reference", "linear"),
    ),
)
