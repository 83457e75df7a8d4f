"""Tensors that are handed over whole (quant.base.Incoming), put together from pieces that several threads read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from oneloop.quant.base import Incoming


class Arrivals:
    """Those of one load. They are taken one at a time, so that the memory it takes to do so is needed once."""

    def __init__(self) -> None:
        self._taking = threading.Lock()

    def expect(self, incoming: Incoming, shape: tuple[int, ...]) -> Arrival:
        """shape: the file's."""
        return Arrival(incoming, shape, self._taking)


class Arrival:
    """One of them. values: where its pieces go."""

    def __init__(self, incoming: Incoming, shape: tuple[int, ...], taking: threading.Lock) -> None:
        self.values = torch.empty(shape, dtype=incoming.dtype, device=incoming.device)
        self._incoming = incoming
        self._missing = self.values.numel()
        self._copied: list[torch.cuda.Event] = []
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
            for event in self._copied:
                event.wait()
            self._incoming.take(self.values)
            if self.values.is_cuda:
                torch.cuda.current_stream(self.values.device).synchronize()
        self.values = torch.empty(0)
