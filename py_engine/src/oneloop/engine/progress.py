"""Progress bars for loading and fetching, on stderr."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class LoadBars:
    """A LoadProgress: one bar for each thing that is fetched or read. Callable from any thread; close when done."""

    def __init__(self, *, leave: bool = True) -> None:
        """leave: whether finished bars stay on the screen."""
        self._leave = leave
        self._bars: dict[str, tqdm[Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes."""
        with self._lock:
            if what not in self._bars:
                self._bars[what] = tqdm(
                    desc=what,
                    total=total,
                    unit="B",
                    unit_scale=True,
                    unit_divisor=1024,
                    file=sys.stderr,
                    leave=self._leave,
                )
            bar = self._bars[what]
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()  # ends the line, so that what is logged next gets its own

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for bar in self._bars.values():
                bar.close()
