"""The store of responses: bounds in number, bytes and age, owners, what runs."""

from __future__ import annotations

import random

import pytest

from oneloop.api.errors import ApiError, ErrorKind
from oneloop.api.responses.store import ResponseStore

ENTRY = 1024
"""What is counted of an entry beside its texts."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keep(store: ResponseStore, name: str, size: int = 0, owner: bytes = b"o") -> None:
    store.begin(name, owner, b"", lambda: None)
    store.end(name, b"x" * size, b"")


def test_the_oldest_goes_where_there_are_too_many() -> None:
    store = ResponseStore(3, 1 << 20, 60)
    for name in "abcd":
        keep(store, name)
    assert len(store) == 3
    assert store.find("d", b"o").body == b""
    with pytest.raises(ApiError) as error:
        store.find("a", b"o")
    assert error.value.kind is ErrorKind.NOT_FOUND


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 10 * ENTRY, 60)
    for name in "abc":
        keep(store, name, 3 * ENTRY)
    assert store.num_bytes == 8 * ENTRY
    assert len(store) == 2
    keep(store, "huge", 10 * ENTRY)
    with pytest.raises(ApiError):
        store.find("huge", b"o")
    assert store.num_bytes <= 10 * ENTRY


def test_age() -> None:
    clock = Clock()
    store = ResponseStore(100, 1 << 20, 60, clock)
    keep(store, "a")
    store.begin("running", b"o", b"", lambda: None)
    clock.now = 59
    keep(store, "b")
    assert store.find("a", b"o")
    clock.now = 61
    with pytest.raises(ApiError):
        store.find("a", b"o")
    assert store.find("b", b"o")
    clock.now = 1000
    assert store.find("running", b"o")
    store.end("running", b"", None)
    clock.now = 1059
    assert store.find("running", b"o")
    clock.now = 1060
    with pytest.raises(ApiError):
        store.find("running", b"o")
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_runs_stays_and_leaves_no_room() -> None:
    store = ResponseStore(2, 1 << 20, 60)
    store.begin("a", b"o", b"", lambda: None)
    store.begin("b", b"o", b"", lambda: None)
    with pytest.raises(ApiError) as error:
        store.begin("c", b"o", b"", lambda: None)
    assert error.value.kind is ErrorKind.UNAVAILABLE
    assert error.value.headers["Retry-After"]
    store.end("a", b"", None)
    store.begin("c", b"o", b"", lambda: None)
    with pytest.raises(ApiError):
        store.find("a", b"o")


def test_owners() -> None:
    store = ResponseStore(2, 1 << 20, 60)
    keep(store, "a", owner=b"mine")
    with pytest.raises(ApiError) as theirs:
        store.find("a", b"theirs")
    with pytest.raises(ApiError) as nobodys:
        store.find("b", b"mine")
    assert theirs.value.message.replace("a", "b") == nobodys.value.message.replace("a", "b")


def test_counts_stay_right() -> None:
    """Random operations; the bytes counted are those of what is there, and no bound is ever passed."""
    source, clock = random.Random(1), Clock()
    store = ResponseStore(8, 20 * ENTRY, 60, clock)
    running: list[str] = []
    for number in range(3000):
        clock.now += source.random() * 10
        match source.randrange(3):
            case 0:
                try:
                    store.begin(str(number), b"o", b"x" * source.randrange(ENTRY), lambda: None)
                except ApiError:
                    continue
                running.append(str(number))
            case 1 if running:
                name = running.pop(source.randrange(len(running)))
                store.end(name, b"x" * source.randrange(3 * ENTRY), b"y" * source.randrange(ENTRY))
            case 2:
                name = str(source.randrange(number + 1))
                try:
                    store.delete(store.find(name, b"o"))
                except ApiError:
                    continue
                if name in running:
                    running.remove(name)
        assert len(store) <= 8
        assert store.num_bytes <= 20 * ENTRY
        assert store.num_bytes == sum(entry.num_bytes for entry in store._entries.values())
    assert running
