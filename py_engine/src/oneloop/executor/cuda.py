"""CudaExecutor: the model in this process, its steps on one CUDA stream. Importing this module imports no torch."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from oneloop.device.cards import card_named
from oneloop.device.cpus import usable_cpus
from oneloop.device.detect import sees_gpu
from oneloop.device.nvml import first_gpu
from oneloop.errors import ConfigError, EngineDeadError
from oneloop.executor.device_completion import DeviceCompletions
from oneloop.executor.loading import ModelLoading
from oneloop.start_times import StartTimes
from oneloop_kernels.compiling.mark import StartMark
from oneloop_kernels.compiling.workers import CompileWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from oneloop.config import EngineConfig
    from oneloop.executor.base import Completion, LoadProgress, ModelFiles, ModelInfo
    from oneloop.executor.loading import LoadedModel
    from oneloop.worker.gpu.runner import GpuModelRunner
    from oneloop.worker.gpu.slab import HostSlab
    from oneloop_core import SlabLayout

log = logging.getLogger(__name__)

_NO_GPU = "this process can use no NVIDIA GPU (or its driver is missing); set device to cpu, or to auto"
SHUTDOWN_LIMIT_S = 10.0
"""How long shutdown() waits for the steps in flight."""


class CudaExecutor:
    """Implements `base.Executor` on one GPU. The loop's thread launches; nothing ever waits for the device there."""

    def __init__(self, config: EngineConfig, start_times: StartTimes | None = None) -> None:
        """start_times: where the parts of the start are counted."""
        self._config = config
        self._times = start_times or StartTimes()
        self._loading = ModelLoading(config, self._times)
        self._loaded: LoadedModel | None = None
        self._slabs: list[HostSlab] = []
        self._runner: GpuModelRunner | None = None
        self._stream: torch.cuda.Stream | None = None
        self._completions: DeviceCompletions | None = None
        self._workers: CompileWorkers | None = None
        self._mark: StartMark | None = None
        self._held: tuple[int, int] | None = None
        """Number and slab of the step that waits for its masks."""

    def locate(self, progress: LoadProgress | None = None) -> ModelFiles:
        """As base.Executor. ConfigError where there is no GPU."""
        if not sees_gpu():
            raise ConfigError("device", f"is cuda, but {_NO_GPU}")
        files = self._loading.locate(progress)
        self._begin_compiling()
        return files

    def start(self, progress: LoadProgress | None = None) -> ModelInfo:
        """As base.Executor. ConfigError when the memory does not suffice."""
        try:
            return self._load(progress)
        except BaseException:
            self._end_compiling()
            raise

    def _load(self, progress: LoadProgress | None) -> ModelInfo:
        with self._times.part("import torch"):
            import torch

        if not torch.cuda.is_available():
            raise ConfigError("device", f"is {self._config.worker.device}, but PyTorch finds that {_NO_GPU}")
        from oneloop.worker.memory.free import gpu_memory
        from oneloop.worker.memory.ledger import DeviceMemory

        device = torch.device("cuda", 0)
        # As it is before CUDA's context, which the plan counts, and by the same count as `serve --plan`.
        memory = gpu_memory()
        with self._times.part("CUDA context"):
            free, total = torch.cuda.mem_get_info(device)
        card = card_named(torch.cuda.get_device_name(device))
        memory = memory or DeviceMemory(total=total, free=free)
        self._loaded = self._loading.load(device, memory, progress, card)
        return self._loaded.info

    def attach(self, layout: SlabLayout, num_slabs: int, *, max_num_seqs: int) -> Sequence[memoryview]:
        """As base.Executor. Also loads the kernels and captures the first graphs."""
        import torch

        from oneloop.worker.gpu.runner import GpuModelRunner
        from oneloop.worker.gpu.slab import HostSlab

        assert self._loaded is not None, "start() comes first"
        device = self._loaded.model.device
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))  # what the model was made and filled on
        with self._times.part("slabs"):
            self._slabs = [HostSlab(layout, pinned=True) for _ in range(num_slabs)]
        with torch.cuda.stream(stream):
            with self._times.part("KV cache"):
                self._runner = GpuModelRunner(
                    self._loaded.model,
                    self._loaded.plan,
                    layout,
                    self._slabs,
                    max_num_seqs=max_num_seqs,
                    max_num_tokens=self._config.resolved.step_tokens,
                    enforce_eager=self._config.worker.enforce_eager,
                    orders=self._config.worker.orders,
                )
            try:
                self._runner.warm_up(self._workers, self._times)
            finally:
                self._end_compiling()
            if self._mark is not None:
                self._mark.write()
        with self._times.part("check"):
            self._check_memory(self._loaded, self._runner)
        self._stream = stream
        # Asked of a stream that never captures; a device that has failed says so on any.
        idle: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._completions = DeviceCompletions(self._runner.flag.numpy(), idle.query)
        return [slab.buffer for slab in self._slabs]

    @staticmethod
    def _check_memory(loaded: LoadedModel, runner: GpuModelRunner) -> None:
        import torch

        from oneloop.worker.memory.check import check_peak
        from oneloop.worker.memory.gpu import graph_driver_bytes

        later = graph_driver_bytes(loaded.model.spec, *runner.graphs_left())
        check_peak(loaded.plan, torch.cuda.mem_get_info(loaded.model.device)[0], later)

    def _begin_compiling(self) -> None:
        """Start processes that compile, beside all the rest, unless Triton's cache has what such a start needs."""
        gpu, config = first_gpu(), self._config
        self._mark = StartMark(
            None if gpu is None else gpu.name,
            self._loading.spec,
            config.resolved,
            config.model.dtype,
            config.cache.kv_cache_dtype,
            config.worker.orders,
            config.worker.expert_statistics,
        )
        if self._workers is None and not self._mark.exists():
            self._workers = CompileWorkers.start(usable_cpus())

    def _end_compiling(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def submit(self, slab_index: int) -> None:
        """As base.Executor. EngineDeadError when the device takes no more work."""
        runner, completions = self._runner, self._completions
        assert runner is not None, "attach() comes first"
        assert completions is not None
        number = completions.next_number(slab_index)
        error = self._launch(runner.launch, slab_index)
        if error is None and runner.is_waiting:
            self._held = (number, slab_index)
        else:
            completions.launched(number, error)

    def sample(self, slab_index: int) -> None:
        """As base.Executor. EngineDeadError when the device takes no more work."""
        assert self._runner is not None
        self._release(self._runner.sample)

    def _release(self, launch: Callable[[int], None]) -> None:
        """Let the step that waits end with this. Nothing where none does: its launch has failed."""
        held, self._held = self._held, None
        if held is not None:
            number, slab_index = held
            assert self._completions is not None
            self._completions.launched(number, self._launch(launch, slab_index))

    def _launch(self, launch: Callable[[int], None], slab_index: int) -> str | None:
        """Launch part of a step. When it raises the step is ended, and what to say of it returned."""
        import torch

        runner, completions = self._runner, self._completions
        assert runner is not None
        assert completions is not None
        try:
            with torch.cuda.stream(self._stream):
                launch(slab_index)
        except Exception as caught:  # whatever it was, the step is over and the loop must hear of it
            log.exception("a step could not be launched")
            try:
                if isinstance(caught, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
                with torch.cuda.stream(self._stream):
                    runner.publish(slab_index)
            except Exception as fatal:
                reason = f"the device takes no more work ({type(fatal).__name__})"
                completions.give_up(reason)
                raise EngineDeadError(reason) from fatal
            return f"the model's step failed ({type(caught).__name__})"
        return None

    def prepare_in_idle(self) -> bool:
        """As base.Executor: captures a graph; worker.gpu.captures says how long that takes."""
        import torch

        assert self._runner is not None, "attach() comes first"
        with torch.cuda.stream(self._stream):
            return self._runner.prepare_in_idle()

    def completion_fd(self) -> int:
        """As base.Executor."""
        assert self._completions is not None, "attach() comes first"
        return self._completions.fileno()

    def completions(self) -> list[Completion]:
        """As base.Executor. EngineDeadError when the device has failed."""
        assert self._completions is not None, "attach() comes first"
        return self._completions.take()

    def expert_counts(self) -> dict[int, list[int]] | None:
        """As base.Executor."""
        return None if self._loaded is None else self._loaded.read_expert_counts()

    def shutdown(self) -> None:
        """As base.Executor. Blocks for at most SHUTDOWN_LIMIT_S, or until processes that compile have ended."""
        self._end_compiling()
        if self._completions is not None:
            if self._runner is not None:
                with suppress(EngineDeadError):
                    self._release(self._runner.publish)
            ended = self._completions.wait_idle(SHUTDOWN_LIMIT_S)
            self._completions.close()
            self._completions = None
            if not ended:
                # What a running step writes to must not be handed out again: it is kept with this object.
                log.warning("steps are still running after %g s; their memory is kept", SHUTDOWN_LIMIT_S)
                return
        if self._loaded is None:
            return
        import torch

        self._runner = None
        self._loaded = None
        self._slabs = []
        gc.collect()
        torch.cuda.empty_cache()
