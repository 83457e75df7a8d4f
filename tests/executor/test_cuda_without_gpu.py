"""CudaExecutor on a machine without a GPU: a clear refusal, before anything heavy."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from oneloop.config import EngineConfig
from oneloop.errors import ConfigError
from oneloop.executor.cuda import CudaExecutor
from oneloop_kernels.compiling.workers import CompileWorkers


class Located:
    """Of ModelLoading, what is known once the model is located."""

    spec = "a model"


@pytest.fixture
def executor(monkeypatch):
    monkeypatch.setattr("oneloop.executor.cuda.sees_gpu", lambda: False)
    return CudaExecutor(EngineConfig.from_flat({"device": "cuda"}))


def test_the_missing_gpu_is_named(executor):
    with pytest.raises(ConfigError, match="device: is cuda, but this process can use no NVIDIA GPU"):
        executor.locate()
    executor.shutdown()


def test_a_gpu_that_torch_cannot_use_is_named(executor, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="set device to cpu"):
        executor.start()
    executor.shutdown()


def test_processes_that_compile_end_with_a_start_that_fails(executor, monkeypatch):
    """They begin with locate, beside the loading."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    workers = CompileWorkers.start(1)
    monkeypatch.setattr(executor, "_workers", workers)
    with pytest.raises(ConfigError, match="set device to cpu"):
        executor.start()
    assert workers.process.poll() is not None


@pytest.mark.parametrize("is_warm", [False, True])
def test_they_begin_where_the_cache_has_no_mark(executor, monkeypatch, tmp_path, is_warm):
    """A start that is through leaves one; another of the same model and sizes then compiles nothing."""
    monkeypatch.setattr(executor, "_loading", Located())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    executor._begin_compiling()
    if is_warm:
        executor._mark.write()
        executor.shutdown()
        executor._begin_compiling()
    assert (executor._workers is None) == is_warm
    executor.shutdown()
    assert executor._workers is None


class Runner:
    """Notes what is launched; fails where it is told to."""

    def __init__(self, *, masked, fails=()):
        self.calls = []
        self._masked = masked
        self._fails = fails

    def launch(self, slab_index):
        self.is_waiting = slab_index in self._masked
        self._call("launch", slab_index)

    def sample(self, slab_index):
        self._call("sample", slab_index)

    def publish(self, slab_index):
        self._call("publish", slab_index)

    def _call(self, name, slab_index):
        self.calls.append((name, slab_index))
        if name in self._fails:
            raise RuntimeError("no")


class Completions:
    """Of DeviceCompletions, what launching needs."""

    def __init__(self):
        self.expected = []

    def next_number(self, slab_index):
        return slab_index + 10

    def launched(self, number, error=None):
        self.expected.append((number, error))

    def give_up(self, reason):
        self.expected.append(reason)

    def wait_idle(self, limit_s):
        return True

    def close(self):
        pass


def attached(executor, monkeypatch, runner):
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())
    monkeypatch.setattr(executor, "_runner", runner)
    completions = Completions()
    monkeypatch.setattr(executor, "_completions", completions)
    return completions


def test_a_step_with_masks_is_sampled_when_they_are_there(executor, monkeypatch):
    runner = Runner(masked={1})
    completions = attached(executor, monkeypatch, runner)
    executor.submit(0)
    executor.submit(1)
    assert completions.expected == [(10, None)]
    executor.sample(1)
    assert runner.calls == [("launch", 0), ("launch", 1), ("sample", 1)]
    assert completions.expected == [(10, None), (11, None)]


@pytest.mark.parametrize("fails", ["launch", "sample"])
def test_a_step_with_masks_that_cannot_be_launched_ends_once(executor, monkeypatch, fails):
    runner = Runner(masked={1}, fails={fails})
    completions = attached(executor, monkeypatch, runner)
    executor.submit(1)
    executor.sample(1)
    error = "the model's step failed (RuntimeError)"
    assert completions.expected == [(11, error)]
    assert runner.calls.count(("publish", 1)) == 1
    assert runner.calls.count(("sample", 1)) == (fails == "sample")


def test_a_step_that_waits_for_masks_ends_with_a_shutdown(executor, monkeypatch):
    runner = Runner(masked={1})
    completions = attached(executor, monkeypatch, runner)
    executor.submit(1)
    executor.shutdown()
    assert runner.calls == [("launch", 1), ("publish", 1)]
    assert completions.expected == [(11, None)]


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 32},
        {"max_num_seqs": 8},
        {"max_num_batched_tokens": 1024},
        {"deterministic": True},
        {"deterministic_requests": True},
        {"expert_statistics": True},
    ],
)
def test_settings_that_kernels_depend_on_have_marks_of_their_own(monkeypatch, tmp_path, settings):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompileWorkers, "start", lambda num_threads: None)
    marks = set()
    for chosen in ({}, settings):
        other = CudaExecutor(EngineConfig.from_flat({"device": "cuda", **chosen}))
        monkeypatch.setattr(other, "_loading", Located())
        other._begin_compiling()
        marks.add(other._mark.path)
    assert len(marks) == 2
