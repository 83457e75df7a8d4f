"""The draw from all tokens, in plain torch: only groups of tokens that can win are looked at.

No token of a group can have more than the group's largest logit with the group's largest noise, which is known without
its tokens. So a few groups that promise most are looked at first, then all that promise more than the best token found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from oneloop_kernels.ops.sampling import NOISE_GROUP
from oneloop_kernels.ops.sampling.noise import NoiseKeys, largest_of_groups, noise_keys, noise_of_groups

if TYPE_CHECKING:
    from oneloop_kernels.ops.sampling import Draws

_NUM_FIRST_GROUPS = 8
"""Groups of each row that are looked at first."""
_GROUPS_AT_ONCE = 2048
"""So that what is made of them stays in the processor's cache."""
_FEW_ROWS = 8
"""So few are read quicker if they are copied first, where their tokens do not lie side by side."""
_SLACK = 1e-4
"""A group may have a little more than its bound says: logarithms are monotone only up to their rounding."""


class Race(NamedTuple):
    """Rows to draw from. logits: [num_rows, vocab_size]; the rest [num_rows, 1], as scores are made of logits.

    best: the row's largest logit. temperature > 0. log_min_p: None where no row has min_p.
    """

    logits: torch.Tensor
    best: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor | None
    keys: NoiseKeys


def draw_from_all(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """[num_rows] int64, drawn without truncation but by min_p, as the contract's draw. logits: left as they are."""
    largest = _largest_of_groups(logits)
    best = largest.amax(-1, keepdim=True)
    log_min_p = None if draws.min_p is None else draws.min_p.log()[:, None]
    keys = noise_keys(draws.seed, draws.output_index)
    race = Race(logits, best, draws.temperature[:, None], log_min_p, keys)
    limits = _scaled(largest, race).add_(largest_of_groups(keys, largest.shape[1]))
    num_rows, num_groups = limits.shape
    num_first = min(_NUM_FIRST_GROUPS, num_groups)
    first = limits.topk(num_first, sorted=False).indices
    rows = torch.arange(num_rows, device=logits.device)
    scores, tokens = _run(race, rows.repeat_interleave(num_first), first.flatten())
    scores, place = scores.view(num_rows, num_first).max(-1)
    tokens = tokens.view(num_rows, num_first).gather(1, place[:, None]).squeeze(1)
    limits.scatter_(1, first, -torch.inf)
    rows, groups = (limits > scores[:, None] - _SLACK).nonzero(as_tuple=True)
    if len(rows):
        later_scores, later_tokens = _run(race, rows, groups)
        before = scores.clone()
        scores.scatter_reduce_(0, rows, later_scores, "amax")
        wins = (later_scores == scores.index_select(0, rows)) & (later_scores > before.index_select(0, rows))
        tokens[rows[wins]] = later_tokens[wins]
    return none_without_distribution(tokens, best)


def none_without_distribution(tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """The tokens, overwritten: −1 where the row's largest logit ([num_rows, 1]) is +∞, or NaN as any makes it."""
    return tokens.masked_fill_(~(best.squeeze(1) < torch.inf), -1)


def _largest_of_groups(logits: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_groups]: the largest logit in each, NaN where one is; the last group may be short."""
    num_rows, vocab_size = logits.shape
    num_whole = vocab_size // NOISE_GROUP
    whole = num_whole * NOISE_GROUP
    if logits.stride(1) == 1 or num_rows < _FEW_ROWS:
        largest = logits[:, :whole].reshape(num_rows, num_whole, NOISE_GROUP).amax(-1)
    else:
        largest = _largest_of_columns(logits[:, :whole].T, num_whole).T
    if whole == vocab_size:
        return largest
    return torch.cat((largest, logits[:, whole:].amax(-1, keepdim=True)), 1)


def _largest_of_columns(values: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[num_groups, n] of [num_groups · NOISE_GROUP, n]. By halves: torch's amax is several times as slow where n
    is no multiple of 32."""
    halves = values.reshape(num_groups, NOISE_GROUP, values.shape[1])
    while (width := halves.shape[1] // 2) > 0:
        halves = torch.maximum(halves[:, :width], halves[:, width:])
    return halves[:, 0]


def _scaled(logits: torch.Tensor, race: Race) -> torch.Tensor:
    """Logits without their noise: the best is 0, so that nothing overflows."""
    scaled = logits.sub(race.best).div_(race.temperature)
    if race.log_min_p is not None:
        scaled.masked_fill_(scaled < race.log_min_p, -torch.inf)
    return scaled


def _run(race: Race, rows: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(score, token) [n] of the best token of each group ([n] int64) of a row ([n] int64)."""
    scores = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    places = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for start in range(0, len(rows), _GROUPS_AT_ONCE):
        part = slice(start, start + _GROUPS_AT_ONCE)
        row, group = rows[part], groups[part]
        of_rows = Race(
            _logits_of_groups(race.logits, row, group),
            race.best.index_select(0, row),
            race.temperature.index_select(0, row),
            None if race.log_min_p is None else race.log_min_p.index_select(0, row),
            race.keys.rows(row),
        )
        scored = _scaled(of_rows.logits, of_rows)
        scored.add_(noise_of_groups(of_rows.keys, group.to(torch.int32)))
        torch.max(scored, -1, out=(scores[part], places[part]))
    return scores, groups * NOISE_GROUP + places


def _logits_of_groups(logits: torch.Tensor, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[n, NOISE_GROUP]: those of one group ([n] int64) of a row ([n] int64) each, −∞ beyond the vocabulary."""
    vocab_size = logits.shape[1]
    if vocab_size % NOISE_GROUP == 0:
        # Several times as fast as by the single tokens' places.
        return logits.reshape(len(logits), -1, NOISE_GROUP)[rows, groups]
    token_ids = groups[:, None] * NOISE_GROUP + torch.arange(NOISE_GROUP, device=groups.device)
    gathered = logits[rows[:, None], token_ids.clamp(max=vocab_size - 1)]
    return gathered.masked_fill_(token_ids >= vocab_size, -torch.inf)
