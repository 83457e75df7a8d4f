"""Responses that can be asked for again and gone on from: in memory, bounded in number, bytes and age."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.api.errors import ApiError, ErrorKind
from oneloop.api.protocol.fields import shown

if TYPE_CHECKING:
    from collections.abc import Callable

_ENTRY_BYTES = 1024
"""What an entry takes beside its texts."""


@dataclass(slots=True)
class StoredResponse:
    """One of them."""

    id: str
    owner: bytes
    """Whose it is; nobody else finds it."""
    body: bytes
    """The response object as JSON, as far as it has come."""
    conversation: bytes | None
    """All of it, this reply included, as JSON messages; None where it cannot be gone on from, as while it runs."""
    expires: float
    """On the store's clock; while it runs it is kept beyond that."""
    cancel: Callable[[], None] | None
    """Ends what still runs; None once it has ended."""
    cache_salt: str
    """What goes on from it has this one, if none of its own: its tokens are found under no other."""

    @property
    def num_bytes(self) -> int:
        """What is counted of it."""
        return _ENTRY_BYTES + len(self.body) + len(self.conversation or b"")


class ResponseStore:
    """What is kept, oldest first. Where room is needed the oldest that have ended go; what runs stays."""

    __slots__ = ("_clock", "_entries", "_max_bytes", "_max_entries", "_ttl_s", "num_bytes")

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """max_entries: 0 keeps nothing. ttl_s: for so many seconds behind its end one is kept. clock: in seconds."""
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[str, StoredResponse] = {}
        self.num_bytes = 0
        """Of all entries."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_entries > 0

    def begin(
        self, response_id: str, owner: bytes, body: bytes, cancel: Callable[[], None], cache_salt: str = ""
    ) -> None:
        """Keep one that runs now. ApiError (503) where those that run leave no room."""
        entry = StoredResponse(
            response_id, owner, body, None, self._clock() + self._ttl_s, cancel, cache_salt
        )
        self._make_room(entry.num_bytes)
        if len(self._entries) >= self._max_entries or self.num_bytes + entry.num_bytes > self._max_bytes:
            raise ApiError(
                ErrorKind.UNAVAILABLE,
                "Too many stored responses are under way; try again later, or send store: false.",
                None,
                {"Retry-After": "1"},
            )
        self._entries[response_id] = entry
        self.num_bytes += entry.num_bytes

    def end(self, response_id: str, body: bytes, conversation: bytes | None) -> None:
        """It has ended. Not kept where it was deleted meanwhile, or is larger than all that may be kept."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return
        self.num_bytes -= entry.num_bytes
        entry.body, entry.conversation, entry.cancel = body, conversation, None
        entry.expires = self._clock() + self._ttl_s
        self._make_room(entry.num_bytes)
        if self.num_bytes + entry.num_bytes <= self._max_bytes:
            self._entries[response_id] = entry
            self.num_bytes += entry.num_bytes

    def find(self, response_id: str, owner: bytes, param: str | None = None) -> StoredResponse:
        """The one with this id. ApiError (404), alike for what was never there, is gone, or is somebody else's.

        param: the field that names it.
        """
        self._drop_expired()
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise ApiError(ErrorKind.NOT_FOUND, f"There is no response {shown(response_id)}.", param)
        return entry

    def delete(self, entry: StoredResponse) -> None:
        """Forget it."""
        if self._entries.pop(entry.id, None) is not None:
            self.num_bytes -= entry.num_bytes

    def _drop_expired(self) -> None:
        now = self._clock()
        while (oldest := self._oldest_ended()) is not None and oldest.expires <= now:
            self.delete(oldest)

    def _make_room(self, num_bytes: int) -> None:
        """Drop the oldest that have ended until one more with so many bytes fits, as far as that goes."""
        self._drop_expired()
        while len(self._entries) >= self._max_entries or self.num_bytes + num_bytes > self._max_bytes:
            oldest = self._oldest_ended()
            if oldest is None:
                return
            self.delete(oldest)

    def _oldest_ended(self) -> StoredResponse | None:
        """Entries stand in the order in which they began or ended; only few run."""
        return next((entry for entry in self._entries.values() if entry.cancel is None), None)
