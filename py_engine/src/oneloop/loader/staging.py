"""Host memory on the way to a parameter: plain for a CPU, pinned and copied asynchronously for a GPU.

One Staging per thread. On a GPU it has two buffers, so that the disk fills one while the bus empties the other, and a
stream of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop.device.cpus import usable_cpus

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

CHUNK_BYTES: Final = 8 << 20
"""Bytes read and copied at once: on PCIe some 160 µs."""
_MAX_GPU_THREADS: Final = 8
"""Each copies some 5 GB/s out of the page cache: together about what the bus takes. Two chunks of memory each."""


def loading_threads(device: torch.device) -> int:
    """How many threads read weights for a device. A CPU's own cores convert them: one is the fastest there."""
    return min(_MAX_GPU_THREADS, usable_cpus()) if device.type == "cuda" else 1


class Staging:
    """Buffers of one thread. A context manager; leaving it waits until everything is in place."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        """device: of the targets. chunk_bytes: of a buffer, until more is asked for."""
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        if self._stream is not None:  # targets may lie where kernels launched before still read or write
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._turn = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], free to be written; valid until the next call but one (on a CPU: the next call)."""
        self._turn = (self._turn + 1) % len(self._buffers)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if self._buffers[self._turn].numel() < num_bytes:
            pinned = self._stream is not None
            self._buffers[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[self._turn][:num_bytes]

    def copy(
        self, values: torch.Tensor, target: torch.Tensor, ready: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Copy a view of the last buffer into a target of the same shape, whatever its type and strides.

        On a GPU the copy is only begun, and its end is returned; types and strides are changed there. ready: from when
        on the target may be written, where that is not since before this Staging was made.
        """
        if self._stream is None:
            target.copy_(values)
            return None
        if ready is not None:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            if values.dtype == target.dtype and target.is_contiguous():
                target.copy_(values, non_blocking=True)
            else:
                target.copy_(values.to(target.device, non_blocking=True))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied[self._turn] = event
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.synchronize()
