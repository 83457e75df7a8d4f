"""Bursts of short requests against the null executor: what is sent."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from oneloop_bench import host_burst, host_load

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def test_no_prompt_is_sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would find it in its prefix cache; those that warm it up are others too."""
    prompts: list[tuple[int, ...]] = []
    bursts: list[int] = []

    def closed_loop(
        port: int, model: str, sessions: list[host_load.Session], at_once: int
    ) -> SimpleNamespace:
        bursts.append(len(sessions))
        prompts.extend(tuple(turn.prompt) for session in sessions for turn in session.turns)
        return SimpleNamespace(records=[])

    @contextmanager
    def null_server(_: object) -> Iterator[host_load.NullServer]:
        yield host_load.NullServer(os.getpid(), 1)

    monkeypatch.setattr(host_burst, "SETTLE_S", 0.0)
    monkeypatch.setattr(host_load, "_tokenizer", lambda _: None)
    monkeypatch.setattr(host_burst, "null_server", null_server)
    for module in (host_burst, host_load):
        monkeypatch.setattr(module, "closed_loop", closed_loop)
    host_burst.measure(host_load.read_options(["--requests", "20", "--streams", "8", "--token-ids"]))
    assert bursts == [host_load.WARM_UP_REQUESTS, 8, 8, 4, 20]
    assert len(set(prompts)) == sum(bursts)
