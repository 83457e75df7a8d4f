"""safetensors checkpoints → weights: read by a few threads, converted to the parameters' type while they are copied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from oneloop.errors import ModelError
from oneloop.loader.arrivals import Arrival, Arrivals
from oneloop.loader.parallel import in_threads
from oneloop.loader.progress import ByteCount, Progress, no_progress
from oneloop.loader.reader import FileReader
from oneloop.loader.staging import CHUNK_BYTES, Staging
from oneloop.quant.base import Incoming
from oneloop.quant.verdicts import WeightError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from oneloop.formats.safetensors import SafetensorsTensor
    from oneloop.quant.base import Target

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a tensor, read and copied at once."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    target: torch.Tensor
    arrival: Arrival | None
    """Whose part the target is."""


def load_hf_weights(
    tensors: Mapping[str, SafetensorsTensor],
    targets: Mapping[str, Target],
    *,
    num_threads: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress = no_progress,
) -> None:
    """Fill every target (by its Hugging Face name; parameters: any one device, type and strides).

    tensors: from `checkpoint.read_checkpoint`, in the order of reading. ModelError when a file cannot be read, or holds
    numbers that cannot be used.
    """
    if not targets:
        return
    device = next(iter(targets.values())).device
    missing = [name for name, target in targets.items() if name not in tensors and not _is_optional(target)]
    assert not missing, f"resolved without {missing[0]}"
    found = [tensor for name, tensor in tensors.items() if name in targets]
    count = ByteCount(progress, "loading weights", sum(tensor.num_bytes for tensor in found))
    arrivals = Arrivals()
    pieces = (
        piece for tensor in found for piece in _pieces(tensor, targets[tensor.name], arrivals, chunk_bytes)
    )
    with FileReader() as reader:
        in_threads(partial(_fill, reader, device, chunk_bytes, count), pieces, num_threads)
    try:
        arrivals.verdicts.look()
    except WeightError as error:
        raise ModelError(str(tensors[error.tensor].path), str(error), item=error.tensor) from error


def _is_optional(target: Target) -> bool:
    return isinstance(target, Incoming) and target.optional


def _pieces(
    tensor: SafetensorsTensor, target: Target, arrivals: Arrivals, chunk_bytes: int
) -> Iterator[_Piece]:
    """Whole rows, about chunk_bytes at a time; at least one."""
    arrival = None
    if isinstance(target, Incoming):
        arrival = arrivals.expect(target, tensor.shape or (1,))
        target = arrival.values
    assert tensor.shape in (tuple(target.shape), ()), tensor.name
    dtype, num_rows = _DTYPES[tensor.dtype], target.shape[0]
    row_bytes = tensor.num_bytes // num_rows
    rows = max(chunk_bytes // row_bytes, 1)
    for start in range(0, num_rows, rows):
        part = target[start : start + rows]
        yield _Piece(
            tensor.path, tensor.offset + start * row_bytes, part.shape[0] * row_bytes, dtype, part, arrival
        )


def _fill(
    reader: FileReader, device: torch.device, chunk_bytes: int, count: ByteCount, pieces: Iterator[_Piece]
) -> None:
    """One thread's work: straight into the parameter where type and device allow it, else by way of a buffer."""
    with torch.no_grad(), Staging(device, chunk_bytes) as staging:
        for piece in pieces:
            target, copied = piece.target, None
            if target.dtype == piece.dtype and target.device.type == "cpu" and target.is_contiguous():
                reader.read_into(piece.path, piece.offset, target.view(-1).view(torch.uint8).numpy())
            else:
                raw = staging.buffer(piece.num_bytes)
                reader.read_into(piece.path, piece.offset, raw.numpy())
                copied = staging.copy(
                    raw.view(piece.dtype).view(target.shape),
                    target,
                    None if piece.arrival is None else piece.arrival.ready,
                )
            if piece.arrival is not None:
                piece.arrival.add(target.numel(), copied)
            count.add(piece.num_bytes)
