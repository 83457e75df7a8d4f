"""Launches that compile and run nothing, several at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from oneloop_kernels.compiling.jobs import encode
from oneloop_kernels.compiling.keys import definite_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from oneloop_kernels.compiling.workers import CompileWorkers


@contextmanager
def launches_compile(num_threads: int, workers: CompileWorkers | None) -> Iterator[None]:
    """See launch.compiling_ahead."""
    run, do_compile, thread = JITFunction.run, JITFunction._do_compile, threading.get_ident()
    pending: list[_Pending] = []
    threads = ThreadPoolExecutor(num_threads if workers is None else max(num_threads, workers.number))
    # A hash of Triton itself, which every kernel's key begins with. Triton remembers it, but threads that ask for it
    # before it is there each compute it, much of that under the interpreter's lock.
    key_of_triton = threads.submit(triton_key)

    def run_nothing(self: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> object:
        if threading.get_ident() == thread:  # others launch as ever
            warmup = True
        return run(self, *arguments, grid=grid, warmup=warmup, **options)

    def compile_soon(
        self: Any,
        key: Any,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        warmup: bool,
    ) -> object:
        if threading.get_ident() != thread:
            return do_compile(self, key, signature, device, constants, options, attributes, warmup)
        kernels, _, target, *_ = self.device_caches[device]
        _ = self.cache_key  # computed once per kernel, here rather than by several threads
        source = self.ASTSource(self, signature, constants, attributes)
        made = threads.submit(_make, self.compile, source, target, vars(options), workers, key_of_triton)
        kernels[key] = _Pending(made, kernels, key)
        pending.append(kernels[key])
        return kernels[key]

    JITFunction.run, JITFunction._do_compile = run_nothing, compile_soon
    try:
        with definite_keys(), threads:
            try:
                yield
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        for kernel in pending:
            kernel.settle()


class _Pending:
    """In a kernel's place among the compiled ones until it is; another thread that launches it asks for its result."""

    __slots__ = ("_future", "_kernels", "_key")

    def __init__(self, future: Future[Any], kernels: dict[Any, Any], key: Any) -> None:
        self._future = future
        self._kernels = kernels
        self._key = key

    def result(self) -> Any:
        """The kernel, when it is compiled."""
        return self._future.result()

    def settle(self) -> None:
        """Put the kernel in this one's place, or leave it to the launch that needs it, which says why it cannot be."""
        del self._kernels[self._key]
        with suppress(Exception):
            self._kernels[self._key] = self._future.result()


def _make(
    compile_: Any,
    source: Any,
    target: Any,
    options: dict[str, Any],
    workers: CompileWorkers | None,
    key_of_triton: Future[str],
) -> Any:
    """Compile, here or in a worker, then do what a first launch would: make its launcher, in C, and load its code."""
    key_of_triton.result()
    job = None if workers is None else encode(source, target, options)
    if workers is not None and job is not None:
        workers.compile(job)  # which leaves it in Triton's cache, or it is compiled here after all
    kernel = compile_(source, target=target, options=options)
    with suppress(Exception):  # one that does not fit the device says so when it is launched
        _ = kernel.run
    return kernel
