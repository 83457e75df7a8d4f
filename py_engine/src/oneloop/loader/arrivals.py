"""Tensors that are handed over whole (quant.base.Incoming), put together from pieces that several threads read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from oneloop.quant.verdicts import Verdicts

if TYPE_CHECKING:
    from oneloop.quant.base import Incoming


class Arrivals:
    """Those of one load. They are taken one at a time, so that the memory it takes to do so is needed once.

    verdicts: what is said of their numbers, to be looked at when all have come.
    """

    def __init__(self) -> None:
        self.verdicts = Verdicts()
        self._taking = threading.Lock()

    def expect(self, incoming: Incoming, shape: tuple[int, ...]) -> Arrival:
        """shape: the file's."""
        return Arrival(incoming, shape, self.verdicts, self._taking)


class Arrival:
    """One of them. values: where its pieces go, once `ready` is reached (None: at once).

    The allocator hands out memory that kernels of the device's current stream may still use, since whatever they are
    launched by has let go of it: what is taken is full of such. Copies on other streams must wait for them.
    """

    def __init__(
        self, incoming: Incoming, shape: tuple[int, ...], verdicts: Verdicts, taking: threading.Lock
    ) -> None:
        self.values = torch.empty(shape, dtype=incoming.dtype, device=incoming.device)
        self.ready = (
            torch.cuda.current_stream(incoming.device).record_event() if self.values.is_cuda else None
        )
        self._incoming = incoming
        self._missing = self.values.numel()
        self._copied: list[torch.cuda.Event] = []
        self._verdicts = verdicts
        self._counting, self._taking = threading.Lock(), taking

    def add(self, num_elements: int, copied: torch.cuda.Event | None) -> None:
        """So many elements are in values, or will be once the event is reached. The last piece is followed by the
        taking, on the device's current stream, which has ended on return."""
        with self._counting:
            self._missing -= num_elements
            if copied is not None:
                self._copied.append(copied)
            if self._missing:
                return
        with self._taking, torch.no_grad():
            stream = torch.cuda.current_stream(self.values.device) if self._copied else None
            for event in self._copied:
                event.wait(stream)
            with self._verdicts.collecting():
                self._incoming.take(self.values)
            if stream is not None:
                stream.synchronize()
        self.values = torch.empty(0)
