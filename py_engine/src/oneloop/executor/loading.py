"""From a model's name to a loaded model and its memory plan: what every executor of this process does first."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.config import resolve_dtype
from oneloop.errors import ConfigError, ModelError
from oneloop.executor.base import ModelFiles, ModelInfo
from oneloop.formats.expected import linear_maps
from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.formats.quantization.spec import QuantizationSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from oneloop.config import EngineConfig
    from oneloop.device.cards import Card
    from oneloop.executor.base import LoadProgress
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.loader.resolve import ModelSource
    from oneloop.models.base import Model
    from oneloop.start_times import StartTimes
    from oneloop.worker.memory.ledger import DeviceMemory, MemoryPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and how the memory is shared out."""

    model: Model
    plan: MemoryPlan
    card: Card | None = None
    """The device, where its rates are known."""
    expert_counts: Mapping[int, torch.Tensor] | None = None
    """Layer → tokens of each expert so far, on the device; None where nothing is counted."""

    def read_expert_counts(self) -> dict[int, list[int]] | None:
        """As they are now. Blocks, so that it belongs into a thread; on a GPU it waits for no step."""
        if self.expert_counts is None:
            return None
        import torch

        device = self.model.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            return {layer: counts.tolist() for layer, counts in self.expert_counts.items()}

    @property
    def info(self) -> ModelInfo:
        """What the engine must know of it."""
        return ModelInfo(
            vocab_size=self.model.spec.vocab_size,
            max_model_len=self.plan.max_model_len,
            num_blocks=self.plan.num_blocks,
            block_size=self.plan.block_size,
            hidden_size=self.model.spec.hidden_size,
            short_vectors=self.model.spec.short_vectors,
            quick_step_tokens=self._quick_step_tokens(),
        )

    def _quick_step_tokens(self) -> int | None:
        from oneloop.worker.roofline import known_roofline

        roofline = known_roofline(self.model.spec, self.card, self.model.dtype.itemsize)
        return None if roofline is None else roofline.quick_step_tokens()


class ModelLoading:
    """`locate`, then `load`. Making one imports nothing heavy."""

    def __init__(self, config: EngineConfig, start_times: StartTimes) -> None:
        self._config = config
        self._times = start_times
        self._source: ModelSource | None = None

    def locate(self, progress: LoadProgress | None) -> ModelFiles:
        """As base.Executor.locate."""
        from oneloop.loader.progress import no_progress
        from oneloop.loader.resolve import resolve_model

        model = self._config.model
        self._source = source = resolve_model(
            model.model,
            revision=model.revision,
            load_format=model.load_format,
            quantization=model.quantization,
            progress=progress or no_progress,
        )
        refuse_settings(source.spec, self._config)
        return ModelFiles(source.path, source.generation, source.gguf)

    @property
    def spec(self) -> ModelSpec:
        """Of the located model."""
        assert self._source is not None, "locate() comes first"
        return self._source.spec

    def load(
        self,
        device: torch.device,
        memory: DeviceMemory,
        progress: LoadProgress | None,
        card: Card | None = None,
    ) -> LoadedModel:
        """Plan the memory, then load. memory: the device's, before. Raises ConfigError or ModelError."""
        with self._times.part("import model"):
            import torch

            from oneloop.loader.load import load_model
            from oneloop.loader.progress import no_progress
            from oneloop.worker.memory.plan import plan_memory

        assert self._source is not None, "locate() comes first"
        settings, spec = self._config.model, self.spec
        dtype = resolve_dtype(
            settings.dtype, self._config.resolved.device, spec.dtype, gguf=self._source.gguf is not None
        )
        if device.type == "cuda":
            refuse_card(spec, self._config, torch.cuda.get_device_capability(device)[0])
        plan = plan_memory(spec, dtype, self._config, memory)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        model = load_model(
            self._source,
            dtype=dtypes[dtype],
            device=device,
            load_format=settings.load_format,
            seed=settings.seed,
            progress=progress or no_progress,
            start_times=self._times,
        )
        log.info(
            "%d KV blocks of %d tokens (%d MiB), context %d tokens, %s",
            plan.num_blocks, plan.block_size, plan.kv_cache_bytes >> 20, plan.max_model_len, model.dtype,
        )  # fmt: skip
        counts = model.count_experts() if self._config.worker.expert_statistics else None
        return LoadedModel(model, plan, card, counts)


def refuse_settings(spec: ModelSpec, config: EngineConfig) -> None:
    """ConfigError for settings that this model cannot have on any device."""
    if config.worker.expert_statistics and spec.moe is None:
        raise ConfigError(
            "expert_statistics", f"{config.model.model} has no experts to count for; leave it away"
        )


def refuse_card(spec: ModelSpec, config: EngineConfig, generation: int) -> None:
    """What has no kernels on a card of that compute capability (major): ModelError for experts of 8 bits, ConfigError
    where weights of 8 bits are wanted in the fixed order."""
    quantization = spec.quantization
    if not (isinstance(quantization, QuantizationSpec) and isinstance(quantization.scheme, Fp8Scheme)):
        return
    from oneloop_kernels.ops.fp8_linear import LEAST_GENERATION

    if generation >= LEAST_GENERATION:
        return
    if any(one.experts and quantization.scheme_of(one.names) is not None for one in linear_maps(spec)):
        message = (
            f"8-bit experts have kernels from compute capability {LEAST_GENERATION} on, and this card's is "
            f"{generation}; take the model in other numbers"
        )
        raise ModelError(config.model.model, message)
    if True in config.worker.orders:
        raise ConfigError(
            "deterministic" if config.worker.deterministic else "deterministic_requests",
            f"has kernels for 8-bit weights from compute capability {LEAST_GENERATION} on, and this card's is "
            f"{generation}; leave it, or take the model in other numbers",
        )
