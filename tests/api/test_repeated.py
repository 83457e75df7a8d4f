"""What clients ask beside their prompts is read once, and never taken for something else."""

from __future__ import annotations

from typing import Any

import pytest

from oneloop.api.errors import ApiError, bad_request
from oneloop.api.protocol.repeated import MAX_REMEMBERED, Repeated


class Reader:
    """Counts what is really read."""

    def __init__(self) -> None:
        self.repeated: Repeated[object] = Repeated()
        self.count = 0

    def read(self, members: dict[str, Any], num_prompts: int = 1) -> object:
        def read() -> object:
            self.count += 1
            return object()

        return self.repeated.read(members, num_prompts, read)


def test_the_same_is_read_once() -> None:
    reader = Reader()
    first = reader.read({"max_tokens": 3, "stop": ["a"]})
    assert reader.read({"max_tokens": 3, "stop": ["a"]}) is first
    assert reader.count == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n": 1}, {"n": 1.0}),
        ({"n": 1}, {"n": True}),
        ({"a": 0}, {"a": False}),
        ({"a": None}, {}),
        ({"a": "1"}, {"a": 1}),
        ({"a": [1]}, {"a": {"1": 1}}),
    ],
)
def test_what_json_tells_apart_is_told_apart(one: Any, other: Any) -> None:
    reader = Reader()
    assert reader.read(one) is not reader.read(other)


def test_the_number_of_prompts_counts() -> None:
    reader = Reader()
    assert reader.read({"n": 2}, 1) is not reader.read({"n": 2}, 2)


def test_refusals_are_not_remembered() -> None:
    repeated: Repeated[int] = Repeated()

    def refuse() -> int:
        raise bad_request("n", "n is wrong")

    for _ in range(2):
        with pytest.raises(ApiError):
            repeated.read({"n": 0}, 1, refuse)
    assert repeated.read({"n": 0}, 1, lambda: 7) == 7


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "members",
    [{"user": "x" * 65}, {"stop": ["x" * 60] * 20}, {"a": nested(500)}, {f"k{i}": i for i in range(99)}],
)
def test_what_is_long_or_deep_is_read_anew(members: Any) -> None:
    reader = Reader()
    reader.read(members)
    reader.read(members)
    assert reader.count == 2


def test_what_is_remembered_is_bounded() -> None:
    reader = Reader()
    num_read = 2 * MAX_REMEMBERED + 1
    for seed in range(num_read):
        reader.read({"seed": seed})
    assert len(reader.repeated._known) == MAX_REMEMBERED
    reader.read({"seed": num_read - MAX_REMEMBERED})
    assert reader.count == num_read, "the oldest goes, the others stay"
    reader.read({"seed": num_read - MAX_REMEMBERED - 1})
    assert reader.count == num_read + 1
