"""CpuExecutor: the model in this process, its steps in one thread. Importing this module imports no torch."""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

from oneloop.device.cpus import usable_cpus
from oneloop.executor.base import Completion
from oneloop.executor.completion import CompletionQueue
from oneloop.executor.loading import ModelLoading
from oneloop.start_times import StartTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.config import EngineConfig
    from oneloop.executor.base import LoadProgress, ModelFiles, ModelInfo
    from oneloop.executor.loading import LoadedModel
    from oneloop.worker.inputs import SlabViews
    from oneloop.worker.runner import ModelRunner
    from oneloop_core import SlabLayout

log = logging.getLogger(__name__)

SHUTDOWN_LIMIT_S = 10.0
"""How long shutdown() waits for the step in flight; the thread is left behind then (it holds up nothing)."""


class CpuExecutor:
    """Implements `base.Executor` on the CPU. One thread owns torch: it runs the steps, in the order of submit()."""

    def __init__(self, config: EngineConfig, start_times: StartTimes | None = None) -> None:
        """start_times: where the parts of the start are counted."""
        self._times = start_times or StartTimes()
        self._loading = ModelLoading(config, self._times)
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._slabs: list[SlabViews] = []
        self._submitted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._released: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Steps with masks that may be sampled."""
        self._completions = CompletionQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def locate(self, progress: LoadProgress | None = None) -> ModelFiles:
        """As base.Executor."""
        return self._loading.locate(progress)

    def start(self, progress: LoadProgress | None = None) -> ModelInfo:
        """As base.Executor. ConfigError when the memory does not suffice."""
        _let_waiting_threads_sleep()
        with self._times.part("import torch"):
            import torch

        from oneloop.worker.memory.free import machine_memory

        self._loaded = self._loading.load(torch.device("cpu"), machine_memory(), progress)
        return self._loaded.info

    def attach(self, layout: SlabLayout, num_slabs: int, *, max_num_seqs: int) -> Sequence[memoryview]:
        """As base.Executor. Also starts the step thread."""
        from oneloop.worker.inputs import SlabViews, aligned_buffer
        from oneloop.worker.runner import ModelRunner

        assert self._loaded is not None, "start() comes first"
        with self._times.part("KV cache"):
            self._runner = ModelRunner(self._loaded.model, self._loaded.plan, max_num_seqs=max_num_seqs)
        buffers = [aligned_buffer(layout.num_bytes) for _ in range(num_slabs)]
        self._slabs = [SlabViews.over(buffer, layout) for buffer in buffers]
        self._thread = threading.Thread(target=self._run_steps, name="oneloop-step", daemon=True)
        self._thread.start()
        return buffers

    def submit(self, slab_index: int) -> None:
        """As base.Executor."""
        self._submitted.put(slab_index)

    def sample(self, slab_index: int) -> None:
        """As base.Executor."""
        self._released.put(slab_index)

    def prepare_in_idle(self) -> bool:
        """As base.Executor: there is nothing to prepare."""
        return False

    def completion_fd(self) -> int:
        """As base.Executor."""
        return self._completions.fileno()

    def completions(self) -> list[Completion]:
        """As base.Executor."""
        return self._completions.take()

    def expert_counts(self) -> dict[int, list[int]] | None:
        """As base.Executor."""
        return None if self._loaded is None else self._loaded.read_expert_counts()

    def shutdown(self) -> None:
        """As base.Executor. Blocks for at most SHUTDOWN_LIMIT_S."""
        self._stopping = True
        self._submitted.put(None)
        self._released.put(None)
        if self._thread is not None:
            self._thread.join(SHUTDOWN_LIMIT_S)
        self._completions.close()
        self._runner = self._loaded = None
        self._slabs = []

    def _run_steps(self) -> None:
        import torch

        # Per thread, so here: OpenMP keeps the count in the calling thread.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
        runner, slabs = self._runner, self._slabs
        assert runner is not None
        while (slab_index := self._submitted.get()) is not None and not self._stopping:
            slab = slabs[slab_index]
            error = None
            try:
                logits = runner.forward(slab)
            except Exception as caught:  # whatever it was, the step is over and the loop must hear of it
                logits, error = None, _failure(caught)
            # A step that has failed waits too: its release must not be taken for another's.
            if slab.header().num_masked and self._released.get() is None:
                return
            if logits is not None:
                try:
                    runner.sample(slab, logits)
                except Exception as caught:
                    error = _failure(caught)
            self._completions.put(Completion(slab_index, error))


def _failure(caught: Exception) -> str:
    log.error("a step failed", exc_info=caught)
    return f"the model's step failed ({type(caught).__name__})"


def _let_waiting_threads_sleep() -> None:
    """Make OpenMP's threads sleep after a short spin while they wait for each other. Read when torch is first imported.

    The loop's thread needs the same cores. SmolLM2 on 2 cores, one stream, tokens/s alone and beside a busy process:
    sleep at once 31 and 19, spin for 1,000 turns first 47 and 22, spin for ever 57 and 1 to 7. ACTIVE, because under
    PASSIVE libgomp drops the spin as soon as a second thread of the process computes too.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
        os.environ["GOMP_SPINCOUNT"] = "1000"
