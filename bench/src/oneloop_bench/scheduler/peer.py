"""The peer's process, seen from the bench."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import oneloop_bench
from oneloop_bench.scheduler.workload import Steps

if TYPE_CHECKING:
    from oneloop_bench.scheduler.workload import Mix

_SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class PeerError(RuntimeError):
    """The peer's process ended; the message has the end of what it printed."""


class PeerSide:
    """See Side: `module` in another interpreter, which finds this package's sources and nothing else of ours."""

    def __init__(self, python: Path, module: str = "oneloop_bench.scheduler.vllm_side") -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close())
        answers, their_end = os.pipe()
        sources = Path(oneloop_bench.__path__[0]).parent
        self._process = subprocess.Popen(
            [str(python), "-m", module, str(their_end)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[their_end],
            env={**os.environ, **_SETTINGS, "PYTHONPATH": str(sources)},
            text=True,
        )
        os.close(their_end)
        self._answers = os.fdopen(answers)

    def load(self, mix: Mix) -> None:
        """See Side."""
        self._ask({"load": mix.to_json()})

    def run(self, num_steps: int) -> Steps:
        """See Side."""
        return Steps(**self._ask({"run": num_steps}))

    def close(self) -> None:
        """See Side."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._log.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._log.seek(0)
            lines = "".join(self._log.readlines()[-20:])
            raise PeerError(f"the peer ended with status {self._process.returncode}:\n{lines}")
        parsed: dict[str, Any] = json.loads(answer)
        return parsed
