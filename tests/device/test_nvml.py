"""What is made of NVML's answers; a stand-in for the library writes through the pointers as the real one does."""

from __future__ import annotations

import ctypes

import pytest

from oneloop.device.nvml import Gpu, first_gpu

NAMES = {"0": "NVIDIA H200", "3": "NVIDIA L40S", "GPU-12": "NVIDIA H100 80GB HBM3"}
MEMORY = (143_771 << 20, 143_156 << 20)


class Nvml:
    """The six functions that are called, with their C signatures' conventions."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing = failing
        self.calls: list[str] = []

    def _status(self, name: str) -> int:
        self.calls.append(name)
        return 999 if name == self.failing else 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self._status("init")

    def nvmlShutdown(self) -> int:  # noqa: N802
        return self._status("shutdown")

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:  # noqa: N802
        return self._find(str(index.value), handle)

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:  # noqa: N802
        return self._find(uuid.decode(), handle)

    def _find(self, key: str, handle) -> int:
        if key not in NAMES:
            return 6
        handle._obj.value = list(NAMES).index(key) + 1
        return self._status("handle")

    def nvmlDeviceGetName(self, handle, buffer, length) -> int:  # noqa: N802
        name = list(NAMES.values())[handle.value - 1].encode()
        assert length.value == ctypes.sizeof(buffer) > len(name)
        buffer.value = name
        return self._status("name")

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free = MEMORY
        memory._obj.used = MEMORY[0] - MEMORY[1]
        return self._status("memory")


@pytest.mark.parametrize(
    ("visible", "name"), [(None, "NVIDIA H200"), ("3,0", "NVIDIA L40S"), ("GPU-12", "NVIDIA H100 80GB HBM3")]
)
def test_the_first_visible_gpu(visible, name):
    library = Nvml()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = first_gpu(environment, library)
    assert found == Gpu(name=name, total_bytes=150_754_820_096, free_bytes=MEMORY[1])
    assert library.calls[-1] == "shutdown"


@pytest.mark.parametrize("failing", ["init", "handle", "name", "memory"])
def test_a_refusal_is_no_gpu(failing):
    library = Nvml(failing)
    assert first_gpu({}, library) is None
    assert ("shutdown" in library.calls) == (failing != "init")


def test_hidden_and_unknown_gpus():
    library = Nvml()
    assert first_gpu({"CUDA_VISIBLE_DEVICES": ""}, library) is None
    assert library.calls == []
    assert first_gpu({"CUDA_VISIBLE_DEVICES": "7"}, library) is None


@pytest.mark.gpu
def test_the_gpu_of_this_machine():
    import torch

    found = first_gpu()
    assert found is not None
    assert found.name == torch.cuda.get_device_name(0)
    free, total = torch.cuda.mem_get_info(0)
    assert total <= found.total_bytes < 1.02 * total
    assert abs(found.free_bytes - free) < 0.02 * total
