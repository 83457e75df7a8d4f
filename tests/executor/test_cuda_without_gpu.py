"""CudaExecutor on a machine without a GPU: a clear refusal, before anything heavy."""

from __future__ import annotations

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
