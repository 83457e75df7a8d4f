"""What every API's encoder of streamed replies gives to whoever sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from oneloop.api.errors import ApiError
    from oneloop.engine.outputs import Added
    from oneloop.engine.relay import TextFrame


class EventEncoder(Protocol):
    """Turns each choice's deltas into the events of one reply."""

    @property
    def num_choices(self) -> int:
        """Sequences that the reply is made of."""

    @property
    def continuous_usage(self) -> bool:
        """Whether the next events show the usage, so that it must be right before they are made."""

    def encode(self, choice: int, delta: Added) -> bytes:
        """The events of this delta, b"" for none; what comes once before all text goes with the first."""

    def text_frame(self, choice: int) -> TextFrame | None:
        """What stands around text in each of this choice's events but the last; None: they are not to be relayed."""

    def closing(self) -> bytes:
        """What ends a reply of which every choice has ended; the usage is right by now."""

    def failure(self, error: ApiError) -> bytes:
        """What ends a reply that has failed."""
