"""CudaExecutor on a machine without a GPU: a clear refusal, before anything heavy."""

from __future__ import annotations

import pytest

from oneloop.config import EngineConfig
from oneloop.errors import ConfigError
from oneloop.executor.cuda import CudaExecutor


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
