"""Compiling Triton kernels for sm_90 where no GPU is: what ptxas and the disassembler say about them.

`compile_all_for_hopper` runs this module as a program, because kernels that were defined under Triton's interpreter
cannot be compiled: a JSON list of `KernelSpec` on standard input, one of `KernelReport` on standard output.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oneloop_kernels.testing.sass import disassembled, overwritten_operands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ASSUMED_DIVISIBLE: Final = 16
"""Triton specialises on arguments that are multiples of this; allocations and most strides are."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One compilation.

    module, name: where the kernel is; Triton's or Gluon's. signature: argument → Triton type ("*bf16", "i32", "fp32",
    "tensordesc<bf16[64, 64],…layout…>"; "constexpr" is filled in for the names in constants). constants: constexpr
    arguments. options: num_warps, num_stages, launch_pdl. unaligned: arguments that are no multiple of 16 (bytes for
    pointers); all other pointers and integers are.
    """

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelReport:
    """registers: per thread. spilled: bytes of local memory per thread. shared: bytes per block.

    opcodes: how often each SASS instruction with its modifiers ("LDG.E.128", "HGMMA.64x64x16.F32.BF16") stands in the
    code. overwritten: as `sass.overwritten_operands` tells.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    opcodes: dict[str, int]
    overwritten: list[str]

    def count(self, pattern: str) -> int:
        """How many instructions match the regular expression from their start."""
        return sum(number for opcode, number in self.opcodes.items() if re.match(pattern, opcode))


def spec_of_launch(
    kernel: Any, arguments: Sequence[object], constants: Mapping[str, Any], unaligned: tuple[str, ...] = ()
) -> KernelSpec:
    """What a launch with these arguments compiles, with programmatic dependent launch. Tensors may be on any device."""
    names = list(inspect.signature(kernel.fn).parameters)
    options = {name: constants[name] for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    return KernelSpec(
        kernel.fn.__module__,
        kernel.fn.__name__,
        dict(zip(names, map(_triton_type, arguments), strict=False)),
        {name: value for name, value in constants.items() if name.isupper()} | {"USE_PDL": True},
        options | {"launch_pdl": True},
        unaligned,
    )


def _triton_type(argument: Any) -> str:
    import torch

    types = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.float8_e4m3fn: "fp8e4nv",
        torch.int64: "i64",
        torch.int32: "i32",
        torch.int16: "i16",
    }
    if isinstance(argument, torch.Tensor):
        return f"*{types[argument.dtype]}"
    if isinstance(argument, int | float):
        return "i32" if isinstance(argument, int) else "fp32"
    return f"tensordesc<{types[argument.base.dtype]}{list(argument.block_shape)},{argument.layout!r}>"


def compile_for_hopper(spec: KernelSpec) -> KernelReport:
    """Compile in this process, which must not run under Triton's interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(import_module(spec.module), spec.name)
    signature = dict(spec.signature) | dict.fromkeys(spec.constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    divisible = {
        (index,): [["tt.divisibility", _ASSUMED_DIVISIBLE]]
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or kind in ("i32", "i64")) and name not in spec.unaligned
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, spec.constants, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=spec.options)
    return _inspect(spec.name, compiled.asm["cubin"], int(compiled.metadata.shared))


def compile_all_for_hopper(specs: list[KernelSpec]) -> list[KernelReport]:
    """Compile in a fresh process without the interpreter. RuntimeError with its messages when one does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(spec) for spec in specs]),
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"a kernel does not compile for sm_90:\n{done.stderr[-4000:]}")
    return [KernelReport(**entry) for entry in json.loads(done.stdout)]


def _inspect(name: str, cubin: bytes, shared: int) -> KernelReport:
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        command = [str(tool), "-res-usage", str(path)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers = re.search(r"REG:(\d+)", usage)
    local = re.search(r"LOCAL:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    if registers is None or local is None or stack is None:
        raise RuntimeError(f"cuobjdump reports no resources of {name}: {usage}")
    code = disassembled(cubin)
    opcodes = [re.match(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)", text) for _, text in code]
    return KernelReport(
        name=name,
        registers=int(registers[1]),
        spilled=max(int(local[1]), int(stack[1])),
        shared=shared,
        opcodes=dict(Counter(opcode[1] for opcode in opcodes if opcode is not None)),
        overwritten=overwritten_operands(code),
    )


def main() -> None:
    """Compile what standard input lists."""
    specs = [KernelSpec(**entry) for entry in json.load(sys.stdin)]
    with multiprocessing.get_context("spawn").Pool(
        min(len(specs), len(os.sched_getaffinity(0)))
    ) as processes:
        json.dump([asdict(report) for report in processes.map(compile_for_hopper, specs, 1)], sys.stdout)


if __name__ == "__main__":
    main()
