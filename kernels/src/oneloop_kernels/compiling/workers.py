"""Processes that compile kernels for this one. Triton's front end holds the interpreter's lock: threads do not help it.

Importing this module imports neither torch nor Triton, so that the processes start before those are imported here.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

MAX_WORKERS: Final = 32
"""A start has some hundred kernels; each process takes memory."""
JOB_LIMIT_S: Final = 120.0
"""A worker that does not answer for as long (the first has torch to import) is asked no more."""
END_LIMIT_S: Final = 1.0
"""How long close() waits for workers that are in a job."""
_PROGRAM: Final = "oneloop_kernels.compiling.worker"
_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",  # they take none of the GPU's memory
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class CompileWorkers:
    """Worker processes, each with a socket. `compile` may be called from any thread, as many at a time as there are.

    They end with `close`, and with this process, however it ends. Nothing of the program that runs here is imported
    there. Whatever goes wrong with them costs time only: `compile` then says False, and the caller compiles.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], folder: str, sockets: Sequence[socket.socket]
    ) -> None:
        """For `start`. folder: of the workers' temporary files."""
        self.process = process
        self.number = len(sockets)
        self._folder = folder
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._sockets = sockets
        self._closing = threading.Lock()
        self._closed = False
        for connection in sockets:
            self._free.put(_Worker(connection))
        atexit.register(self.close)

    @classmethod
    def start(cls, number: int) -> CompileWorkers | None:
        """Begin to start that many, at most MAX_WORKERS; waits for nothing. None where the system refuses."""
        pairs: list[tuple[socket.socket, socket.socket]] = []
        folder = None
        try:
            folder = tempfile.mkdtemp(prefix="oneloop-compile-")
            pairs = [socket.socketpair() for _ in range(max(1, min(number, MAX_WORKERS)))]
            theirs = [pair[1].fileno() for pair in pairs]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, folder, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT, "TMPDIR": folder},
                pass_fds=theirs,
                start_new_session=True,  # Ctrl-C is for this process; and all of them can be ended together
            )
        except OSError as error:
            log.debug("no processes to compile in: %s", error)
            for pair in pairs:
                pair[0].close()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return None
        finally:
            for pair in pairs:
                pair[1].close()
        return cls(process, folder, [pair[0] for pair in pairs])

    def compile(self, job: str) -> bool:
        """Have a worker do a job (`jobs.encode`), and wait for it: whether it is in Triton's cache now."""
        worker = self._free.get()
        try:
            return worker.do(job)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End them, in the middle of a job if need be, and wait until they have. Again: nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            for connection in self._sockets:
                with suppress(OSError):  # the worker has ended
                    connection.shutdown(socket.SHUT_RDWR)  # also wakes who waits for an answer
            try:
                self.process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(
                    self.process.pid, signal.SIGKILL
                )  # it is not waited for yet: the number is still its own
                self.process.wait()
            for connection in self._sockets:
                connection.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class _Worker:
    """One end of a socket. One that has failed once is asked no more."""

    __slots__ = ("_connection", "_failed")

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(JOB_LIMIT_S)
        self._connection = connection
        self._failed = False

    def do(self, job: str) -> bool:
        """Whether it was done."""
        if self._failed:
            return False
        try:
            self._connection.sendall(f"{job}\n".encode())
            answer = bytearray()
            while not answer.endswith(b"\n"):
                received = self._connection.recv(1 << 16)
                if not received:
                    raise ConnectionError("it has ended")
                answer += received
        except OSError as error:
            log.debug("a process that compiles kernels: %s", error)
            self._failed = True
            return False
        failure = json.loads(answer)["error"]
        if failure is not None:
            log.debug("a kernel was not compiled beside: %s", failure)
        return failure is None
