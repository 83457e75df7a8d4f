"""Random weights from a config alone, for benchmarks: every parameter uniform in ±1e-3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.loader.progress import Progress, no_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

_BOUND = 1e-3


def fill_dummy_weights(
    targets: Mapping[str, torch.Tensor], *, seed: int, progress: Progress = no_progress
) -> None:
    """Fill every target; the same seed gives the same weights (per device kind and type)."""
    total = sum(target.nbytes for target in targets.values())
    done = 0
    generators: dict[torch.device, torch.Generator] = {}
    for name in sorted(targets):
        target = targets[name]
        if target.device not in generators:
            generators[target.device] = torch.Generator(device=target.device).manual_seed(seed)
        target.uniform_(-_BOUND, _BOUND, generator=generators[target.device])
        done += target.nbytes
        progress("making dummy weights", done, total)
