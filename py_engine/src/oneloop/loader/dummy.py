"""Random weights from a config alone, for benchmarks: every parameter uniform in ±1e-3, packed ones any bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from oneloop.loader.progress import Progress, no_progress
from oneloop.quant.base import Incoming
from oneloop.quant.verdicts import Verdicts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.quant.base import Target

_BOUND = 1e-3


def fill_dummy_weights(targets: Mapping[str, Target], *, seed: int, progress: Progress = no_progress) -> None:
    """Fill every target; the same seed gives the same weights (per device kind and type)."""
    sizes = {name: math.prod(target.shape) * target.dtype.itemsize for name, target in targets.items()}
    total, done = sum(sizes.values()), 0
    generators: dict[torch.device, torch.Generator] = {}
    verdicts = Verdicts()
    for name in sorted(targets):
        target = targets[name]
        if target.device not in generators:
            generators[target.device] = torch.Generator(device=target.device).manual_seed(seed)
        generator = generators[target.device]
        if isinstance(target, Incoming) and target.sample is not None:
            _hand_over(target, target.sample(), verdicts)
        elif isinstance(target, Incoming):
            values = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            _randomize(values, generator)
            _hand_over(target, values, verdicts)
        else:
            _randomize(target, generator)
        done += sizes[name]
        progress("making dummy weights", done, total)
    verdicts.look()


def _hand_over(target: Incoming, values: torch.Tensor, verdicts: Verdicts) -> None:
    with verdicts.collecting():
        target.take(values)


def _randomize(values: torch.Tensor, generator: torch.Generator) -> None:
    if not values.dtype.is_floating_point:
        kind = torch.iinfo(values.dtype)
        values.random_(kind.min, kind.max, generator=generator)
    elif values.itemsize == 1:  # numbers that have scales, which are small already
        wide = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        values.copy_(wide.uniform_(-1.0, 1.0, generator=generator))
    else:
        values.uniform_(-_BOUND, _BOUND, generator=generator)
