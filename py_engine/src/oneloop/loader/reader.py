"""Byte ranges of files, read without mapping them: no mapped pages in the process. Usable from several threads."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from oneloop.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray


class FileReader:
    """Context manager around files that are opened as they are asked for."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_into(self, path: Path, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill the whole of a contiguous uint8 array. ModelError when the file cannot be read or became shorter."""
        descriptor = self._descriptor(path)
        done = 0
        while done < target.size:
            count = os.preadv(descriptor, [target[done:].data], offset + done)
            if count == 0:
                raise ModelError(str(path), "became shorter while it was read")
            done += count

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                try:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise ModelError(str(path), f"cannot be read: {error.strerror or error}") from error
            return self._descriptors[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
