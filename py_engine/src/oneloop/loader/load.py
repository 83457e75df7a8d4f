"""The one way to a model with weights: shape → empty model → filled from whatever the source is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from oneloop.errors import ConfigError
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.gguf import load_gguf_weights
from oneloop.loader.hf import load_hf_weights
from oneloop.loader.progress import Progress, no_progress
from oneloop.loader.staging import loading_threads
from oneloop.models.registry import build_model

if TYPE_CHECKING:
    from oneloop.loader.resolve import ModelSource
    from oneloop.models.base import Model

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = no_progress,
) -> Model:
    """A model ready to run, its parameters on `device` in `dtype`.

    load_format: auto takes what the source is; dummy fills random weights (`seed`) without reading any.
    ModelError names the file that cannot be read; ConfigError a load_format that does not fit the source.
    """
    expected = "gguf" if source.kind == "gguf" else "safetensors"
    if load_format not in ("auto", "dummy", expected):
        raise ConfigError("load_format", f"is {load_format}, but {source.path} is a {expected} model")
    model = build_model(source.spec, dtype=dtype, device=device)
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
        torch.cuda.empty_cache()
    return model
