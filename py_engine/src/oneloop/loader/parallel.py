"""The same work in a few threads over one stream of items."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


class _Handout(Generic[T]):
    """An iterator for several threads: each item goes to one of them. Ends early once `stop` was called."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        self._stopped = True


def in_threads(work: Callable[[Iterator[T]], None], items: Iterable[T], num_threads: int) -> None:
    """Call work(iterator) in num_threads threads at once; the iterators hand out each item to one of them.

    Raises the first exception of any of them, after the others have ended with the item they had. With one thread it is
    the caller's. The threads hold up no interpreter's exit.
    """
    handout = _Handout(items)
    if num_threads == 1:
        work(handout)
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(handout)
        except BaseException as error:
            errors.append(error)
            handout.stop()

    threads = [
        threading.Thread(target=run, name=f"oneloop-load-{index}", daemon=True)
        for index in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
