"""The program behind `workers`: imports torch, Triton and all kernels once, then forks a process per socket.

    python -m oneloop_kernels.compiling.worker FOLDER DESCRIPTOR…

A process reads jobs, one a line, from its socket, compiles each into Triton's cache with the launcher that its first
launch would build, and answers with a line of JSON. It ends when its socket is closed at the other end, as it is when
the process that started it ends, however it ends. The folder, for temporary files, goes with the last of them.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import shutil
import socket
import sys
from contextlib import suppress
from importlib import import_module


def main() -> None:
    """Returns when all processes have ended."""
    from oneloop_kernels.compiling.keys import definite_keys

    folder, *arguments = sys.argv[1:]
    descriptors = [int(argument) for argument in arguments]
    _import_all()
    gc.freeze()  # what is here already is not looked at again, so that its pages stay shared
    children = []
    for descriptor in descriptors:
        child = os.fork()
        if not child:
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            try:
                with definite_keys():
                    _serve(descriptor)
            finally:
                os._exit(0)
        children.append(child)
    for descriptor in descriptors:
        os.close(descriptor)
    for child in children:
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _import_all() -> None:
    """Everything a compilation takes, and what Triton's keys begin with: a hash of Triton itself."""
    from triton.runtime.cache import triton_key

    from oneloop_kernels import ops

    triton_key()
    import_module("oneloop_kernels.compiling.jobs")
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if "triton" in module.name.split("."):
            import_module(module.name)


def _serve(descriptor: int) -> None:
    with (
        suppress(ConnectionError),
        socket.socket(fileno=descriptor) as connection,
        connection.makefile("r", encoding="utf-8") as jobs,
    ):
        for line in jobs:
            answer = json.dumps({"error": _compile(line)})
            connection.sendall(f"{answer}\n".encode())


def _compile(line: str) -> str | None:
    """What went wrong, if anything did."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    from oneloop_kernels.compiling.jobs import decode

    try:
        source, target, options = decode(line)
        compiled = triton.compile(source, target=target, options=options)
        CudaLauncher(source, compiled.metadata)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()
