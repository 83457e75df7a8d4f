"""Byte ranges of a file, read into a buffer that is used again and again: no mapped pages in the process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from oneloop.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class RangeReader:
    """Context manager around one open file. ModelError when the file became shorter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> RangeReader:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(str(self._path), f"cannot be read: {error.strerror or error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes], valid until the next call."""
        if self._buffer.size < num_bytes:
            self._buffer = np.empty(num_bytes, dtype=np.uint8)
        view = self._buffer[:num_bytes]
        self.read_into(offset, view)
        return view

    def read_into(self, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill the whole of a contiguous uint8 array."""
        done = 0
        while done < target.size:
            count = os.preadv(self._descriptor, [target[done:].data], offset + done)
            if count == 0:
                raise ModelError(str(self._path), "became shorter while it was read")
            done += count
