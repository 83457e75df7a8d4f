"""What the launches of an H200 would compile, where no GPU is: they are recorded, and nothing runs.

For a process of its own, without Triton's interpreter: it changes Triton and the registry for good.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch

import oneloop_kernels.launch
import oneloop_kernels.registry
from oneloop_kernels.launch import Card

if TYPE_CHECKING:
    from collections.abc import Iterable

H200: Final = Card("NVIDIA H200", 9, 132)


class _Driver:
    """As much of a Hopper card's driver as choosing a specialisation takes."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def use_hopper_driver() -> None:
    """From now on Triton takes tensors on the CPU for those of a Hopper card; it must launch nothing."""
    from triton.runtime.driver import driver

    if oneloop_kernels.launch.INTERPRETED:
        raise RuntimeError("kernels are defined under TRITON_INTERPRET=1: nothing would be compiled")
    driver.set_active(_Driver())


def record_compilations() -> list[str]:
    """From now on launches on tensors of the CPU (or of no device) only add what they would have compiled, as a line
    of `compiling.jobs`. To be called before anything asks what the device can do.

    A second launch of the same kind adds nothing, as it would find the kernel. What torch computes, it computes. Under
    `prefer("triton")` the Triton implementations are chosen; the device is taken for an H200, for which kernels are
    chosen and tuned.
    """
    from triton.runtime.jit import JITFunction

    from oneloop_kernels.compiling.jobs import encode

    use_hopper_driver()
    recorded: list[str] = []
    launch = JITFunction.run

    def compile_nothing(
        self: Any,
        key: Any,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        _warmup: bool,
    ) -> object:
        kernels, _, target, *_ = self.device_caches[device]
        job = encode(self.ASTSource(self, signature, constants, attributes), target, vars(options))
        if job is None:
            raise TypeError(
                f"{self.__name__}: has a constant that no worker could be told of, in {constants}"
            )
        recorded.append(job)
        return kernels.setdefault(key, object())

    def launch_nothing(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    JITFunction._do_compile = compile_nothing
    JITFunction.run = launch_nothing
    vars(oneloop_kernels.registry)["INTERPRETED"] = (
        True  # then Triton's implementations take tensors on the CPU
    )
    vars(oneloop_kernels.launch)["_STAND_IN"] = H200
    return recorded


def name_of(job: str) -> str:
    """Of the kernel that a line of `compiling.jobs` compiles."""
    return str(json.loads(job)["kernel"]["kernel"][1])


def names(recorded: Iterable[str]) -> list[str]:
    """Of the kernels."""
    return [name_of(job) for job in recorded]
