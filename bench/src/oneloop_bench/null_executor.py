"""An executor whose steps cost nothing: what is left is the host's work per step and per token."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop.executor.base import Completion, ModelFiles, ModelInfo
from oneloop.formats.generation import GenerationDefaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.executor.base import LoadProgress
    from oneloop_core import SlabLayout

_DTYPES: dict[str, np.dtype[Any]] = {
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f32": np.dtype(np.float32),
}


class Slab:
    """One slab of a ring: the aligned allocation and the views that making up samples needs."""

    def __init__(self, layout: SlabLayout) -> None:
        raw = np.zeros(layout.num_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self._bytes = raw[start : start + layout.num_bytes]
        self.buffer = self._bytes.data
        self._fields = {field.name: field for field in layout.fields}
        self._places = layout.header
        self._header = self.view("header")
        self._slots = self.view("sample_slot")
        self._indices = self.view("sample_output_index")
        self._tokens = self.view("output_token")

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """A field of the slab, writable."""
        field = self._fields[name]
        dtype = _DTYPES[field.dtype]
        return self._bytes[field.offset : field.offset + field.length * dtype.itemsize].view(dtype)

    def header(self, name: str) -> int:
        """An entry of the header."""
        return int(self._header[self._places[name]])

    def execute(self, text: np.ndarray[Any, Any]) -> None:
        """Every slot "samples" the text from a place of its own, token after token."""
        count = self.header("num_samples")
        places = self._slots[:count] * 37 + self._indices[:count]
        self._tokens[:count] = text[places % len(text)]


class NullExecutor:
    """Steps are told one per turn of the loop, as a device's steps come in."""

    def __init__(
        self,
        text: np.ndarray[Any, Any],
        info: ModelInfo,
        step_s: float = 0.0,
        token_s: float = 0.0,
        row_s: float = 0.0,
    ) -> None:
        """text: the ids that the sequences "sample".

        step_s, token_s, row_s: how long each step takes, and how much longer for each of its tokens and rows. It
        costs no CPU time.
        """
        self._text = text
        self._info = info
        self._step_s, self._token_s, self._row_s = step_s, token_s, row_s
        self._last_end = 0.0
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._done: deque[int] = deque()
        self._slabs: list[Slab] = []
        self._is_open = True

    def locate(self, progress: LoadProgress | None = None) -> ModelFiles:
        """No files."""
        return ModelFiles(Path("null"), GenerationDefaults())

    def start(self, progress: LoadProgress | None = None) -> ModelInfo:
        """The sizes it was given."""
        return self._info

    def attach(self, layout: SlabLayout, num_slabs: int, *, max_num_seqs: int) -> Sequence[memoryview]:
        """The ring."""
        self._slabs = [Slab(layout) for _ in range(num_slabs)]
        return [slab.buffer for slab in self._slabs]

    def submit(self, slab_index: int) -> None:
        """Sample, and complete when the step's time is over, which begins when the one before has ended."""
        slab = self._slabs[slab_index]
        slab.execute(self._text)
        takes_s = self._step_s + self._token_s * slab.header("num_tokens")
        takes_s += self._row_s * slab.header("num_rows")
        if not takes_s:
            self._complete(slab_index)
            return
        loop = asyncio.get_running_loop()
        self._last_end = max(self._last_end, loop.time()) + takes_s
        loop.call_at(self._last_end, self._complete, slab_index)

    def _complete(self, slab_index: int) -> None:
        if self._is_open:
            self._done.append(slab_index)
            os.eventfd_write(self._fd, 1)

    def prepare_in_idle(self) -> bool:
        """Nothing to prepare."""
        return False

    def completion_fd(self) -> int:
        """Readable while a step is to be told."""
        return self._fd

    def completions(self) -> list[Completion]:
        """The oldest step that was not told."""
        if not self._done:
            return []
        os.eventfd_read(self._fd)
        return [Completion(self._done.popleft(), None)]

    def shutdown(self) -> None:
        """Closes the descriptor."""
        if self._is_open:
            self._is_open = False
            os.close(self._fd)
