"""GGUF tensors → weights: dequantised in chunks, so a load costs little more memory than the weights themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from oneloop.errors import ModelError
from oneloop.loader.arrivals import Arrival, Arrivals
from oneloop.loader.gguf_tensors import gguf_place
from oneloop.loader.parallel import in_threads
from oneloop.loader.progress import ByteCount, Progress, no_progress
from oneloop.loader.reader import FileReader
from oneloop.loader.staging import Staging
from oneloop.quant.base import Incoming
from oneloop.quant.verdicts import WeightError, not_finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from oneloop.formats.gguf import GgufFile, GgufTensor
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.quant.base import Target

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time: 1 MiB of float32, so that the dequantiser's intermediates stay in the cache."""

_PLAIN_DTYPES = {"F32": "<f4", "F16": "<f2"}
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a tensor, dequantised and copied at once."""

    name: str
    """Hugging Face's, of which there is one for each expert."""
    tensor: GgufTensor
    offset: int
    num_bytes: int
    target: torch.Tensor
    head_dim: int | None
    """Given where the rows of each head are stored interleaved."""
    arrival: Arrival | None
    """Whose part the target is."""


def load_gguf_weights(
    file: GgufFile,
    spec: ModelSpec,
    targets: Mapping[str, Target],
    *,
    num_threads: int = 1,
    progress: Progress = no_progress,
) -> None:
    """Fill every target (by its Hugging Face name; parameters: any one device, float type and strides).

    file: passed `gguf_tensors.check_gguf`. ModelError when it cannot be read any more, or holds numbers that cannot be
    used.
    """
    if not targets:
        return
    device = next(iter(targets.values())).device
    wanted: dict[str, list[tuple[str, int | None]]] = {}
    for name in targets:
        place, index = gguf_place(name)
        wanted.setdefault(place, []).append((name, index))
    # llama's converter interleaves the rotary halves of queries and keys; qwen's does not
    interleaved = file.metadata.string("general.architecture") == "llama"
    found = [
        (_part(tensor, index, targets[name].shape), name, targets[name])
        for place, tensor in file.tensors.items()
        for name, index in wanted.get(place, ())
    ]
    count = ByteCount(progress, "loading weights", sum(tensor.num_bytes for tensor, _, _ in found))
    arrivals = Arrivals()
    pieces = (
        piece
        for tensor, name, target in found
        for piece in _pieces(
            name, tensor, target, arrivals, spec.head_dim if interleaved and _ROTATED.search(name) else None
        )
    )
    try:
        with FileReader() as reader:
            in_threads(partial(_fill, reader, device, count), pieces, num_threads)
        arrivals.verdicts.look()
    except WeightError as error:
        place, expert = gguf_place(error.tensor)
        message = str(error) if expert is None else f"expert {expert} {error}"
        raise ModelError(str(file.path), message, item=place) from error


def _part(tensor: GgufTensor, index: int | None, shape: tuple[int, ...]) -> GgufTensor:
    """That part along the first dimension, or all of it; a vector may stand for a matrix of one row."""
    if index is None:
        return replace(tensor, shape=(1, *tensor.shape)) if (1, *tensor.shape) == tuple(shape) else tensor
    num_bytes = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor, shape=tensor.shape[1:], offset=tensor.offset + index * num_bytes, num_bytes=num_bytes
    )


def _pieces(
    name: str, tensor: GgufTensor, target: Target, arrivals: Arrivals, head_dim: int | None
) -> Iterator[_Piece]:
    """Whole rows (whole heads, where head_dim is given; whole blocks of a vector)."""
    arrival = None
    if isinstance(target, Incoming):
        raw = target.dtype == torch.uint8  # the bytes of the rows are wanted as they are
        arrival = arrivals.expect(target, target.shape if raw else tensor.shape)
        target = arrival.values
    kind = tensor.type
    assert tensor.shape == tuple(target.shape) or target.dtype == torch.uint8, tensor.name
    row_elements = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    unit = head_dim or (1 if len(tensor.shape) > 1 else kind.block_size)
    rows = max(_CHUNK_ELEMENTS // row_elements // unit, 1) * unit
    for start in range(0, tensor.shape[0], rows):
        part = target[start : start + rows]
        first_block = start * row_elements // kind.block_size
        num_blocks = part.shape[0] * row_elements // kind.block_size
        yield _Piece(
            name,
            tensor,
            tensor.offset + first_block * kind.block_bytes,
            num_blocks * kind.block_bytes,
            part,
            head_dim,
            arrival,
        )


def _fill(reader: FileReader, device: torch.device, count: ByteCount, pieces: Iterator[_Piece]) -> None:
    """One thread's work. What goes to a GPU gets its type and its rows' order on the way into the pinned buffer."""
    if device.type != "cpu":
        torch.set_num_threads(1)  # of this thread: it is one of several, and its pieces are small
    room: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    with torch.no_grad(), Staging(device, 4 * _CHUNK_ELEMENTS) as staging:
        for piece in pieces:
            if room.size < piece.num_bytes:
                room = np.empty(piece.num_bytes, dtype=np.uint8)
            stored = room[: piece.num_bytes]
            reader.read_into(piece.tensor.path, piece.offset, stored)
            raw = piece.target.dtype == torch.uint8
            values: NDArray[Any] = stored if raw else _dequantize(piece.name, piece.tensor, stored)
            values = values.reshape(piece.target.shape)
            copied = None
            if device.type == "cpu":
                _copy_rows(piece.target, values, piece.head_dim)
            else:
                staged = staging.buffer(piece.target.numel() * piece.target.itemsize)
                staged = staged.view(piece.target.dtype).view(piece.target.shape)
                _copy_rows(staged, values, piece.head_dim)
                copied = staging.copy(
                    staged, piece.target, None if piece.arrival is None else piece.arrival.ready
                )
            if piece.arrival is not None:
                piece.arrival.add(piece.target.numel(), copied)
            count.add(piece.num_bytes)


def _copy_rows(target: torch.Tensor, values: NDArray[Any], head_dim: int | None) -> None:
    """Copy whole rows; with head_dim, undo the interleaving of each head's rotary halves.

    numpy does it for float32: chunks are small, and torch would start its thread pool for each.
    """
    if head_dim is not None:
        # stored row 2·i + j of a head is row j·head_dim/2 + i
        heads, rest = len(values) // head_dim, values.shape[1:]
        values = values.reshape(heads, head_dim // 2, 2, *rest)
        target = target.view(heads, 2, head_dim // 2, *rest).transpose(1, 2)
    if target.dtype == torch.float32:
        np.copyto(target.numpy(), values)
    else:
        target.copy_(torch.from_numpy(values))


def _dequantize(name: str, tensor: GgufTensor, raw: NDArray[np.uint8]) -> NDArray[np.floating[Any]]:
    """Flat array of the elements; float32 for every type but F16. WeightError where a block's scale is no number."""
    if tensor.type.name in _PLAIN_DTYPES:
        plain: NDArray[np.floating[Any]] = raw.view(_PLAIN_DTYPES[tensor.type.name])
        return plain
    # as one row: the gguf package loops in Python over groups of 16 rows
    with np.errstate(invalid="ignore", over="ignore"):  # of what is refused below
        values: NDArray[np.floating[Any]] = dequantize(
            raw[None, :], GGMLQuantizationType(tensor.type.type_id)
        )[0]
    if tensor.type.block_size > 1 and not np.isfinite(values).all():
        raise WeightError(name, not_finite("float32"))
    return values
