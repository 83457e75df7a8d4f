"""What the whole-engine tests compare with: transformers on the same device, asked about whole answers at once.

A greedy answer is right when every one of its tokens is the reference's best, given the prompt and the answer's own
tokens before; where two logits lie within the rounding of the dtype, either is. One forward pass judges all tokens of
an answer, so every answer of every way to run it is judged, not only the tokens before a first difference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOLDEN = Path(__file__).parents[1] / "e2e" / "data" / "greedy.json"
TIE = {torch.float32: 1e-3, torch.float16: 0.04, torch.bfloat16: 0.2}
"""Gap, in standard deviations of the position's logits, under which two tokens tie: some times the error seen of
whole models in that dtype. A wrong block or position is several deviations off, and not once."""
MAX_TIES = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Share of the judged answers that may hold a tie; more of them would hide an error."""
BATCH = 32


@dataclass
class Judge:
    """Judges greedy answers by a model of transformers. What was judged once is remembered."""

    model: Any
    dtype: torch.dtype
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = field(default_factory=dict)

    def check(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """AssertionError naming the first answer with a token that is not the best, or too many ties."""
        keys = [(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True)]
        new = sorted({key for key in keys if key not in self.seen and key[1]}, key=lambda key: len(key[0]))
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            self.seen |= dict(zip(batch, self._worst_gaps(batch), strict=True))
        gaps = [self.seen[key] for key in keys if key[1]]
        for key, gap in zip((key for key in keys if key[1]), gaps, strict=True):
            assert gap < TIE[self.dtype], f"{gap:.3f} deviations off: prompt {key[0][:8]}…, answer {key[1]}"
        ties = sum(gap > 0 for gap in gaps)
        print(f"{len(gaps)} answers, {ties} with a tie, worst {max(gaps, default=0):.4f} deviations")
        assert ties <= max(1, MAX_TIES[self.dtype] * len(gaps)), f"{ties} of {len(gaps)} answers hold ties"

    @torch.inference_mode()
    def _worst_gaps(self, batch: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[float]:
        """Per answer the largest (best logit − its token's logit) / deviation; 0 where every token is the best.

        Padding stands on the right, where causal attention never looks.
        """
        device = next(self.model.parameters()).device
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        token_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, (prompt, answer) in enumerate(batch):
            token_ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        hidden = self.model.model(token_ids.to(device), use_cache=False).last_hidden_state
        gaps = []
        for row, (prompt, answer) in enumerate(batch):
            places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            logits = self.model.lm_head(hidden[row, places]).float()
            chosen = logits.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0]
            gaps.append(float(((logits.max(1).values - chosen) / logits.std(1)).max()))
        return gaps


@pytest.fixture(scope="session")
def golden_prompts() -> list[list[int]]:
    """The 64 prompts of tests/e2e, as token ids of SmolLM2."""
    return [entry["prompt"] for entry in json.loads(GOLDEN.read_text())["entries"]]


@pytest.fixture(scope="session")
def make_judge() -> Callable[[Any, torch.dtype], Judge]:
    """Factory: a transformers model, the dtype that the engine ran in → a Judge."""
    return Judge


@dataclass(frozen=True)
class Mode:
    """One way for the engine to drive the device."""

    name: str
    enforce_eager: bool
    steps_in_flight: int


MODES = (Mode("graphs", False, 2), Mode("eager", True, 2), Mode("graphs, one step at a time", False, 1))


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mode:
    """Graphs on and off, overlap on and off."""
    monkeypatch.setattr("oneloop.engine.assembly.MAX_STEPS_IN_FLIGHT", request.param.steps_in_flight)
    return request.param
