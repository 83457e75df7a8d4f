"""Results beside tokens on a GPU: computed from a step's hidden states, copied into the pinned slab, then published.

Few requests want any: plain torch, launched kernel by kernel. Nothing waits for the device; counts and ranges are read
from the slab on the host, indices and ids from its copy on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.worker.memory.scores import DEVICE_SCORES_AT_ONCE
from oneloop.worker.prompt_results import PromptResults

if TYPE_CHECKING:
    from oneloop.models.base import Model
    from oneloop.worker.gpu.slab import DeviceSlab, HostSlab
    from oneloop.worker.inputs import SlabViews, StepHeader


class DeviceResults:
    """Launches them for one model."""

    __slots__ = ("_model", "_results")

    def __init__(self, model: Model) -> None:
        self._model = model
        self._results = PromptResults(model, DEVICE_SCORES_AT_ONCE)

    def launch(
        self, hidden: torch.Tensor, slab: DeviceSlab, host: HostSlab, views: SlabViews, header: StepHeader
    ) -> None:
        """hidden: [≥ num_tokens, hidden_size] of this step's forward. slab, host, views: the step's, on the device, in
        pinned memory, and as numpy sees it."""
        if count := header.num_scores:
            scores = self._results.score(
                hidden,
                slab["score_token_index"][:count],
                slab["score_token"][:count],
                header.max_score_logprobs,
            )
            _write(host, "score_rank", scores.ranks)
            _write(host, "score_logprob_token", scores.token_ids)
            _write(host, "score_logprob", scores.logprobs)
        if count := header.num_pools:
            ranges = zip(views.pool_start[:count].tolist(), views.pool_end[:count].tolist(), strict=True)
            _write(host, "pooled", self._results.pool(hidden, ranges))
        if count := header.num_picks:
            picked = header.num_picked
            starts = views.pick_start[: picked + 1].tolist()
            picks = self._results.pick(
                hidden, slab["pick_token_index"][:picked], starts, slab["pick_start"][: picked + 1],
                slab["pick_token"][:count],
            )  # fmt: skip
            _write(host, "pick_logprob", picks)

    def warm_up(self) -> None:
        """Compile and load what is launched: a request that is the first to want scores holds up no stream."""
        spec, device = self._model.spec, self._model.device
        hidden = torch.zeros(DEVICE_SCORES_AT_ONCE, spec.hidden_size, dtype=self._model.dtype, device=device)
        rows = torch.zeros(DEVICE_SCORES_AT_ONCE, dtype=torch.int32, device=device)
        self._results.score(hidden, rows, rows, 1)
        self._results.pool(hidden, [(0, DEVICE_SCORES_AT_ONCE)])
        starts = torch.arange(2, dtype=torch.int32, device=device)
        self._results.pick(hidden, rows[:1], [0, 1], starts, rows[:1])


def _write(host: HostSlab, field: str, values: torch.Tensor) -> None:
    """Copy to the first elements of a field, in the order of the stream."""
    host.fields[field][: values.numel()].copy_(values.reshape(-1), non_blocking=True)
