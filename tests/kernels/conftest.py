"""Where kernels are tested: on the CUDA device if there is one, else on the CPU in Triton's interpreter.

Tests that use `kernel_device` are marked `gpu` where there is a device, so that `make test-gpu` runs them there.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from oneloop_kernels.launch import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable

ON_GPU = torch.cuda.is_available() and not INTERPRETED
KERNEL_DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float32, torch.float16)
"""The interpreter computes bfloat16 wrongly without a word."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_GPU and "kernel_device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _memory_is_recycled(request) -> None:
    """For every kernel in the interpreter; on a GPU for those that ask."""
    if not ON_GPU:
        request.getfixturevalue("recycled_memory")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """attention_cases.py beside this file (the tests' folders are no packages)."""
    path = Path(__file__).with_name("attention_cases.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=KERNEL_DTYPES, ids=str)
def kernel_dtype(request) -> torch.dtype:
    """The dtypes that kernels are tested in, one after the other."""
    return request.param


@pytest.fixture(params=[dtype for dtype in KERNEL_DTYPES if dtype.itemsize == 2], ids=str)
def half_dtype(request) -> torch.dtype:
    """Those of 16 bits among them."""
    return request.param


class RandomInputs:
    """Fresh random tensors on the device of the kernels.

    maker: the device that makes them; the CPU's are the same everywhere, a GPU's are quick.
    """

    def __init__(self, device: torch.device, seed: int, maker: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(maker).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self._generator.device)
        return made.to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """In [low, high)."""
        made = torch.randint(low, high, shape, generator=self._generator, device=self._generator.device)
        return made.to(dtype).to(self.device)

    def permutation(self, size: int) -> torch.Tensor:
        """int64."""
        made = torch.randperm(size, generator=self._generator, device=self._generator.device)
        return made.to(self.device)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """For outputs: an element that nobody writes stays NaN, or the smallest integer."""
        value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        return torch.full(shape, value, dtype=dtype, device=self.device)


def random_inputs(device: torch.device, maker: torch.device) -> RandomInputs:
    """A new seed each time; a failing test's report shows it (captured output)."""
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed of the random inputs: {seed}")
    return RandomInputs(device, seed, maker)


@pytest.fixture
def inputs(kernel_device) -> RandomInputs:
    return random_inputs(kernel_device, torch.device("cpu"))


@pytest.fixture
def device_inputs(kernel_device) -> RandomInputs:
    """For large tensors."""
    return random_inputs(kernel_device, kernel_device)


@pytest.fixture
def cpu_inputs() -> RandomInputs:
    """On the CPU, wherever the kernels are."""
    return random_inputs(torch.device("cpu"), torch.device("cpu"))


@pytest.fixture
def order_dtype(kernel_device) -> torch.dtype:
    """What the fixed order is tested in: float32 in the interpreter, which computes bfloat16 wrongly."""
    return torch.bfloat16 if kernel_device.type == "cuda" else torch.float32


@pytest.fixture
def products_of_tensor_cores(monkeypatch, kernel_device) -> None:
    """The interpreter multiplies by numpy, whose sums depend on a row's place in the tile; a tensor core's do not."""
    if kernel_device.type == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        sums = d.data.copy()
        for k in range(a.data.shape[-1]):
            sums += a.data[:, k, None].astype(sums.dtype) * b.data[None, k, :].astype(sums.dtype)
        return TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session")
def same_bits() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """AssertionError where two results differ."""

    def check(a: torch.Tensor, b: torch.Tensor) -> None:
        assert a.shape == b.shape
        assert not a.isnan().any()
        different = int((a != b).sum())
        assert different == 0, f"{different} of {a.numel()} elements differ"

    return check
