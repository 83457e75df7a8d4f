"""The one way to a model with weights: shape → empty model → filled from whatever the source is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.gguf import load_gguf_weights
from oneloop.loader.hf import load_hf_weights
from oneloop.loader.progress import Progress, no_progress
from oneloop.loader.staging import loading_threads
from oneloop.models.registry import build_model
from oneloop.start_times import StartTimes

if TYPE_CHECKING:
    from oneloop.loader.resolve import LoadFormat, ModelSource
    from oneloop.models.base import Model


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = no_progress,
    start_times: StartTimes | None = None,
) -> Model:
    """A model ready to run, its parameters on `device` in `dtype`.

    load_format: dummy fills random weights (`seed`) without reading any; else the one that the source was resolved for.
    ModelError names the file that cannot be read.
    """
    times = start_times or StartTimes()
    with times.part("build model"):
        model = build_model(source.spec, dtype=dtype, device=device)
    with times.part("weights"):
        _fill(model, source, load_format, seed, progress)
    return model


def _fill(model: Model, source: ModelSource, load_format: LoadFormat, seed: int, progress: Progress) -> None:
    """Give every parameter its values; they are in place on return."""
    device = model.device
    targets = model.weight_targets()
    num_threads = loading_threads(device)
    with torch.no_grad():
        if load_format == "dummy":
            fill_dummy_weights(targets, seed=seed, progress=progress)
        elif source.gguf is not None:
            load_gguf_weights(source.gguf, source.spec, targets, num_threads=num_threads, progress=progress)
        else:
            assert source.tensors is not None, "the source was resolved without its weights"
            load_hf_weights(source.tensors, targets, num_threads=num_threads, progress=progress)
    if device.type == "cuda":
        # The copies' temporaries, which the allocator keeps: the memory plan does not count them.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
