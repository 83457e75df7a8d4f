"""Sampling in plain torch. Nothing is sorted as a whole: top_p looks at the likeliest tokens, and where they are not
enough it finds its threshold by a histogram of a histogram's bin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.sampling import Draws, TopLogprobs
from oneloop_kernels.ops.sampling.noise import noise_keys, noise_of_tokens
from oneloop_kernels.ops.sampling.race import draw_from_all, none_without_distribution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oneloop_kernels.ops.sampling import Penalties, Truncation

_NUM_LIKELIEST = 256
"""Tokens that top_p looks at first."""
_NUM_BINS = 4096
"""Of each of the two histograms: together they tell logits apart that differ by a few units in the last place."""
_MAX_SCRATCH_ELEMENTS = 1 << 20
"""Rows are penalized, and wide nuclei drawn from, in parts so that no intermediate array is larger."""


_MASKED_AT_ONCE = 8
"""Rows: what their masks are made into stays in the processor's cache."""


class ReferenceSamplingOps:
    """See the contract."""

    __slots__ = ()

    def penalize(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """See the contract."""
        for part in _parts(*logits.shape):
            rows, counts = logits[part], penalties.output_counts[part]
            in_output = counts > 0
            seen = in_output | penalties.in_prompt[part]
            repetition = penalties.repetition[part, None]
            penalized = torch.where(rows > 0, rows / repetition, rows * repetition)
            rows.copy_(torch.where(seen, penalized, rows))
            rows.sub_(counts * penalties.frequency[part, None])
            rows.sub_(in_output * penalties.presence[part, None])

    def mask(self, logits: torch.Tensor, masks: torch.Tensor) -> None:
        """See the contract."""
        bits = torch.arange(256, device=masks.device)[:, None] >> torch.arange(8, device=masks.device)
        # Of each byte's value the eight booleans in one number: a look-up is many times as fast as shifting.
        bans = (bits & 1 == 0).view(torch.int64).flatten()
        values = masks.contiguous().view(torch.uint8).to(torch.int32)
        for first in range(0, len(masks), _MASKED_AT_ONCE):
            part = slice(first, first + _MASKED_AT_ONCE)
            banned = bans.index_select(0, values[part].flatten()).view(torch.bool)
            rows = logits[part]
            rows.masked_fill_(banned.view(len(rows), -1)[:, : rows.shape[1]], -torch.inf)

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """See the contract."""
        if draws.truncation is None:
            return draw_from_all(logits, draws)
        scaled, best = _scaled(logits, draws)
        values, candidates, enough = _likeliest(scaled, draws.truncation)
        noise = self.noise(draws.seed, draws.output_index, candidates.to(torch.int32))
        tokens = candidates.gather(1, values.add_(noise).argmax(-1, keepdim=True)).squeeze(1)
        if not bool(enough.all()):
            wide = (~enough).nonzero().squeeze(1)
            for part in _parts(len(wide), scaled.shape[1]):
                rows = wide[part]
                nucleus = _nucleus(scaled.index_select(0, rows), draws.truncation.top_p.index_select(0, rows))
                ones = torch.ones_like(draws.temperature[rows])
                tokens[rows] = draw_from_all(
                    nucleus, Draws(ones, draws.seed[rows], draws.output_index[rows], None, None)
                )
        return none_without_distribution(tokens, best)

    def draw_among(self, logits: torch.Tensor, token_ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """See the contract."""
        values, best = _scaled(logits, draws)
        if draws.truncation is not None:
            values, places, _ = _likeliest(values, draws.truncation)
            token_ids = token_ids.gather(1, places)
        values.add_(self.noise(draws.seed, draws.output_index, token_ids.to(torch.int32)))
        tokens = token_ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)
        return none_without_distribution(tokens, best)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        best, tokens = logits.max(-1, keepdim=True)
        return none_without_distribution(tokens.squeeze(1), best)

    def noise(self, seed: torch.Tensor, output_index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        return noise_of_tokens(noise_keys(seed, output_index), token_ids)

    def top_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TopLogprobs:
        """See the contract."""
        chosen = logits.gather(1, token_ids[:, None])
        ranks = (logits > chosen).sum(-1).add_(1)
        values, top_ids = logits.topk(num_top, dim=-1)
        normalizer = logits.logsumexp(-1, keepdim=True)
        return TopLogprobs(
            ranks,
            torch.cat((token_ids[:, None], top_ids), dim=1),
            torch.cat((chosen, values), dim=1).sub_(normalizer),
        )


def _scaled(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, overwritten, over the temperature, −∞ where min_p drops them. The best is 0: nothing overflows.

    And what was the best ([num_rows, 1]).
    """
    best = logits.amax(-1, keepdim=True)
    scaled = logits.sub_(best).div_(draws.temperature[:, None])
    if draws.min_p is not None:
        scaled.masked_fill_(scaled < draws.min_p.log()[:, None], -torch.inf)
    return scaled, best


def _parts(num_rows: int, row_size: int) -> Iterator[slice]:
    """Slices of the rows, of at most _MAX_SCRATCH_ELEMENTS each (but at least one row)."""
    at_once = max(1, _MAX_SCRATCH_ELEMENTS // row_size)
    for first in range(0, num_rows, at_once):
        yield slice(first, first + at_once)


def _likeliest(
    scaled: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and ids ([num_rows, n]) of the likeliest tokens, −∞ where top_k or top_p drops them.

    And [num_rows] bool: whether these are all that the row keeps.
    """
    vocab_size = scaled.shape[1]
    top_k, top_p = truncation.top_k[:, None], truncation.top_p[:, None]
    at_least = truncation.max_top_k if truncation.all_top_k else max(_NUM_LIKELIEST, truncation.max_top_k)
    num_candidates = min(at_least, vocab_size)
    values, token_ids = scaled.topk(num_candidates, dim=-1)
    uses_k = top_k > 0
    beyond_k = torch.arange(num_candidates, device=scaled.device) >= top_k
    values.masked_fill_(beyond_k & uses_k, float("-inf"))
    mass = values.logsumexp(-1, keepdim=True)
    if not truncation.all_top_k:
        mass = torch.where(uses_k, mass, scaled.logsumexp(-1, keepdim=True))
    probabilities = (values - mass).exp_()
    reached = probabilities.cumsum(-1)
    enough = (reached[:, -1:] >= top_p) | uses_k
    if num_candidates == vocab_size:
        enough = torch.ones_like(enough)
    likelier = reached - probabilities  # mass of the tokens before
    likelier[:, 0] = 0.0  # the likeliest always stays
    values.masked_fill_((likelier >= top_p) & (top_p < 1.0), float("-inf"))
    return values, token_ids, enough.squeeze(1)


def _nucleus(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """−∞ but for the fewest likeliest tokens that have the mass top_p ([num_rows], < 1) together.

    scaled: [num_rows, vocab_size] with the best at 0; overwritten. Tokens that fall into the same bin of the second
    histogram count as equal.
    """
    probabilities = scaled.softmax(-1)
    # Tokens below this one's probability, all together, cannot be missed from the mass.
    lowest = scaled.logsumexp(-1, keepdim=True) + ((1 - top_p) / scaled.shape[1]).log()[:, None]
    depth = scaled.neg()
    wanted = top_p[:, None]
    start, width = torch.zeros_like(lowest), -lowest / _NUM_BINS
    for _ in range(2):
        # Bin 0 takes what lies before `start`, the last bin what lies beyond the interval.
        bins = ((depth - start) / width).clamp_(-1, _NUM_BINS).floor_().to(torch.int64)
        bins = bins.add_(1).clamp_(0, _NUM_BINS + 1)
        histogram = torch.zeros(scaled.shape[0], _NUM_BINS + 2, dtype=scaled.dtype, device=scaled.device)
        reached = histogram.scatter_add_(1, bins, probabilities).cumsum(-1) >= wanted
        reached[:, -1] = True
        crossing = reached.to(torch.uint8).argmax(-1, keepdim=True)
        start, width = start + (crossing - 1) * width, width / _NUM_BINS
    return scaled.masked_fill_(bins > crossing, float("-inf"))


REFERENCE: Final = ReferenceSamplingOps()
