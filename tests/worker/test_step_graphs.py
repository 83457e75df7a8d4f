"""When launches are captured, and what becomes of captures that fail. On a device: tests/gpu/test_out_of_memory.py."""

import gc
from types import SimpleNamespace

import pytest
import torch

from oneloop.worker.gpu.graphs import MAX_ATTEMPTS, RETRY_AFTER, StepGraphs


class Allocator:
    """As torch's keeps the books of pools: one is dead for good with its last user, and records one graph at a time."""

    def __init__(self):
        self.users = {}
        self.recording = []

    def begin(self, pool):
        if pool is None:
            pool = (len(self.users) + 1, 0)
            self.users[pool] = 0
        else:
            assert self.users[pool] > 0, "INTERNAL ASSERT FAILED"
        assert pool not in self.recording, "already recording to mempool_id"
        self.users[pool] += 1
        self.recording.append(pool)
        return pool

    def end(self, _device, pool):
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove(pool)

    @property
    def pools(self):
        """Those in use."""
        return {pool for pool, users in self.users.items() if users}


@pytest.fixture
def device(monkeypatch):
    """A stand-in for CUDA's capture. `spoiled`: the capture under way cannot be ended in order."""
    state = SimpleNamespace(
        allocator=Allocator(), spoiled=False, capturing=None, replayed=[], instantiable=True
    )

    class Graph:
        def __init__(self):
            self._pool = None
            self._ended = False

        def capture_begin(self, pool, capture_error_mode):
            assert state.capturing is None
            assert capture_error_mode == "thread_local"
            self._pool = state.allocator.begin(pool)
            state.capturing = self

        def capture_end(self):
            if state.capturing is not self:
                raise RuntimeError("not capturing")
            state.capturing = None
            if state.spoiled:
                state.spoiled = False
                raise RuntimeError("operation failed due to a previous error during capture")
            state.allocator.end(0, self._pool)
            self._ended = True
            if not state.instantiable:
                raise torch.OutOfMemoryError

        def pool(self):
            return self._pool

        def replay(self):
            state.replayed.append(self)

        def __del__(self):
            if self._ended:
                state.allocator.users[self._pool] -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", state.allocator.end, raising=False)
    return state


@pytest.fixture
def graphs(device):
    return StepGraphs(SimpleNamespace(device=torch.device("cpu"), device_index=0), enabled=True)


class Body:
    """Counts its launches and its captures; raises in the next capture what it is told to."""

    def __init__(self, device):
        self._device = device
        self.launched = self.captured = 0
        self.fails_with = None
        self.spoils = False

    def __call__(self):
        if self._device.capturing is None:
            self.launched += 1
            return
        self.captured += 1
        self._device.spoiled = self.spoils
        if self.fails_with is not None:
            raise self.fails_with


@pytest.fixture
def body(device):
    return Body(device)


def launch(graphs, body, times, key="key"):
    for _ in range(times):
        graphs.launch(key, body)


def test_a_key_is_captured_at_its_second_use_and_replayed_from_then_on(graphs, body, device):
    launch(graphs, body, 1)
    assert (body.launched, body.captured) == (1, 0)
    launch(graphs, body, 4)
    assert (body.launched, body.captured, len(device.replayed)) == (1, 1, 4)
    graphs.launch("other", body, capturable=False)
    graphs.launch("other", body, capturable=False)
    assert (body.launched, body.captured) == (3, 1)


def test_what_was_captured_ahead_is_replayed_at_its_first_use(graphs, body, device):
    assert graphs.wants("key")
    assert graphs.try_capture("key", body)
    assert not graphs.wants("key")
    launch(graphs, body, 2)
    assert (body.launched, body.captured, len(device.replayed)) == (0, 1, 2)


def test_a_capture_ahead_that_fails_is_wanted_no_more_and_harms_no_other(graphs, body, device):
    body.fails_with = torch.OutOfMemoryError()
    assert not graphs.try_capture("key", body)
    assert not graphs.wants("key")
    body.fails_with = None
    launch(graphs, body, 2)
    assert (body.launched, device.replayed) == (2, []), "it is launched as it is; later it is tried again"
    launch(graphs, body, RETRY_AFTER)
    assert device.replayed
    assert body.captured == 2
    assert len(device.allocator.pools) == 1


def test_without_a_stream_every_launch_is_made_as_it_is(body, device):
    graphs = StepGraphs(None, enabled=True)
    launch(graphs, body, 4)
    graphs.capture("key", body)
    assert not graphs.wants("key")
    assert (body.launched, body.captured, device.allocator.users) == (4, 0, {})


def test_all_graphs_share_one_pool_which_outlives_them(graphs, body, device):
    for key in range(5):
        launch(graphs, body, 2, key)
    graphs._graphs.clear()
    launch(graphs, body, 2, "new")
    assert body.captured == 6
    assert len(device.allocator.pools) == 1


def test_short_of_memory_it_is_tried_again_a_few_times(graphs, body, device, caplog):
    body.fails_with = torch.OutOfMemoryError()
    launch(graphs, body, 2)
    assert (body.launched, body.captured) == (2, 1)
    launch(graphs, body, 2, "other")
    assert body.captured == 2
    body.captured = 0
    launch(graphs, body, RETRY_AFTER)
    assert body.captured == 0 or MAX_ATTEMPTS == 1
    launch(graphs, body, 10 * MAX_ATTEMPTS * RETRY_AFTER)
    assert body.captured == MAX_ATTEMPTS - 1
    assert "for the next" in caplog.text
    body.fails_with = None
    launch(graphs, body, 10 * RETRY_AFTER, "other")
    assert device.replayed, "the one that has attempts left is captured once there is memory"
    assert len(device.allocator.pools) == 1


def test_what_else_fails_stays_as_it_is(graphs, body, device):
    body.fails_with = ValueError("no kernel for this shape")
    launch(graphs, body, 10 * RETRY_AFTER)
    assert (body.launched, body.captured) == (10 * RETRY_AFTER, 1)
    body.fails_with = None
    launch(graphs, body, 3, "other")
    assert len(device.replayed) == 2


@pytest.mark.parametrize("fails_with", [None, torch.OutOfMemoryError()])
def test_after_a_capture_that_cannot_be_ended_in_order_others_are_captured(graphs, body, device, fails_with):
    launch(graphs, body, 2, "before")
    body.spoils, body.fails_with = True, fails_with
    launch(graphs, body, 2)
    assert device.allocator.recording == []
    body.spoils, body.fails_with = False, None
    for key in range(3):
        launch(graphs, body, 2, key)
    assert len(device.replayed) == 4
    assert len(device.allocator.pools) == 2, "the books of the first are not to be trusted"


def test_a_graph_that_the_driver_has_no_memory_for_leaves_the_pool_as_it_was(graphs, body, device):
    launch(graphs, body, 2, "before")
    device.instantiable = False
    launch(graphs, body, 2)
    device.instantiable = True
    launch(graphs, body, 2, "after")
    assert len(device.replayed) == 2
    assert len(device.allocator.pools) == 1


def test_nothing_is_collected_while_a_graph_is_recorded(graphs, device, monkeypatch):
    seen = []
    launch(graphs, lambda: seen.append(gc.isenabled()), 2)
    assert seen == [True, False]
    assert gc.isenabled()


def test_who_collects_nothing_does_not_after_a_graph_either(graphs, body):
    gc.disable()
    try:
        launch(graphs, body, 2)
        assert not gc.isenabled()
    finally:
        gc.enable()
