"""Sampling in plain torch. Nothing is sorted as a whole: top_p looks at the likeliest tokens, and where they are not
enough it finds its threshold by a histogram of a histogram's bin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.sampling import NOISE_GROUP, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oneloop_kernels.ops.sampling import Draws, Penalties, Truncation

_NUM_LIKELIEST = 256
"""Tokens that top_p looks at first."""
_NUM_BINS = 4096
"""Of each of the two histograms: together they tell logits apart that differ by a few units in the last place."""
_MAX_SCRATCH_ELEMENTS = 1 << 20
"""Rows are penalized and drawn in parts so that no intermediate array is larger."""


def _signed(value: int, bits: int) -> int:
    """The two's complement number with the same bits: torch has no unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX_1 = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_2 = _signed(0x94D049BB133111EB, 64)
_LOWBIAS_1 = _signed(0x7FEB352D, 32)
_LOWBIAS_2 = _signed(0x846CA68B, 32)
_MASKED_AT_ONCE = 8
"""Rows: what their masks are made into stays in the processor's cache."""
_GROUP_BITS = NOISE_GROUP.bit_length() - 1
LARGEST_UNIFORM = 1.0 - 2.0**-24


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
        best = logits.amax(-1, keepdim=True)
        scaled = logits.sub_(best).div_(draws.temperature[:, None])  # the best is 0: nothing overflows
        if draws.min_p is not None:
            scaled.masked_fill_(scaled < draws.min_p.log()[:, None], float("-inf"))
        if draws.truncation is None:
            return self._draw_from_all(scaled, draws.seed, draws.output_index)
        values, candidates, enough = _likeliest(scaled, draws.truncation)
        noise = self.noise(draws.seed, draws.output_index, candidates.to(torch.int32))
        tokens = candidates.gather(1, values.add_(noise).argmax(-1, keepdim=True)).squeeze(1)
        if not bool(enough.all()):
            wide = (~enough).nonzero().squeeze(1)
            for part in _parts(len(wide), scaled.shape[1]):
                rows = wide[part]
                nucleus = _nucleus(scaled.index_select(0, rows), draws.truncation.top_p.index_select(0, rows))
                tokens[rows] = self._draw_from_all(nucleus, draws.seed[rows], draws.output_index[rows])
        return tokens

    def _draw_from_all(
        self, scaled: torch.Tensor, seed: torch.Tensor, output_index: torch.Tensor
    ) -> torch.Tensor:
        """Draw from every token that is not −∞. scaled: overwritten."""
        tokens = torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device)
        for part in _parts(*scaled.shape):
            noise = _noise_of_all(seed[part], output_index[part], scaled.shape[1])
            torch.argmax(scaled[part].add_(noise), -1, out=tokens[part])
        return tokens

    def noise(self, seed: torch.Tensor, output_index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        factor, offset = _noise_key(seed, output_index)
        firsts, places = _firsts_of_race(token_ids >> _GROUP_BITS, factor, offset)
        variates = _exponential(_bits(token_ids, factor, offset)).add_(firsts[-1])
        in_group = token_ids.bitwise_and(NOISE_GROUP - 1)
        for first, place in zip(firsts, places, strict=True):
            variates = torch.where(in_group == place, first, variates)
        return variates.log_().neg_()

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


def _noise_key(seed: torch.Tensor, output_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, offset) [num_rows, 1] int32 of the rows' noise."""
    key = _mix64(_mix64(seed) + (output_index + 1) * _GOLDEN)
    return ((key >> 32) | 1).to(torch.int32)[:, None], ((key << 32) >> 32).to(torch.int32)[:, None]


def _firsts_of_race(
    groups: torch.Tensor, factor: torch.Tensor, offset: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per row and group: the four smallest variates of its tokens in order, and the places of these tokens."""

    def bits(number: int) -> torch.Tensor:
        return _bits(groups | _signed(128 + number << 24, 32), factor, offset)

    def step(number: int, choices: int) -> torch.Tensor:
        return bits(number).to(torch.int64).bitwise_and_(0xFFFFFFFF).remainder_(choices).add_(1)

    firsts = [_exponential(bits(0)).div_(NOISE_GROUP)]
    for number in (1, 2, 3):
        firsts.append(firsts[-1] + _exponential(bits(number)) * (1.0 / (NOISE_GROUP - number)))
    second, third, fourth = (step(number, NOISE_GROUP + 4 - number) for number in (5, 6, 7))
    third += third >= second
    fourth += fourth >= torch.minimum(second, third)
    fourth += fourth >= torch.maximum(second, third)
    place = bits(4).bitwise_and_(NOISE_GROUP - 1)
    return firsts, [place, *(place ^ other.to(torch.int32) for other in (second, third, fourth))]


def _noise_of_all(seed: torch.Tensor, output_index: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[num_rows, vocab_size]: `noise` of all tokens, whose groups lie side by side."""
    factor, offset = _noise_key(seed, output_index)
    num_groups = -(-vocab_size // NOISE_GROUP)
    groups = torch.arange(num_groups, dtype=torch.int32, device=seed.device)
    token_ids = torch.arange(num_groups * NOISE_GROUP, dtype=torch.int32, device=seed.device)
    firsts, places = _firsts_of_race(groups, factor, offset)
    variates = _exponential(_bits(token_ids, factor, offset)).view(-1, num_groups, NOISE_GROUP)
    variates.add_(firsts[-1][:, :, None])
    variates.scatter_(2, torch.stack(places, 2).to(torch.int64), torch.stack(firsts, 2))
    return variates.log_().neg_().view(-1, len(token_ids))[:, :vocab_size]


def _bits(ids: torch.Tensor, factor: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """32 random bits per id and row, int32."""
    hashed = ids * factor
    hashed += offset
    hashed ^= (hashed >> 16).bitwise_and_(0xFFFF)
    hashed *= _LOWBIAS_1
    hashed ^= (hashed >> 15).bitwise_and_(0x1FFFF)
    hashed *= _LOWBIAS_2
    hashed ^= (hashed >> 16).bitwise_and_(0xFFFF)
    return hashed


def _exponential(bits: torch.Tensor) -> torch.Tensor:
    """Exponential variates float32 of the lower 31 bits; overwrites them."""
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=LARGEST_UNIFORM).neg_().log1p_().neg_()


def _parts(num_rows: int, row_size: int) -> Iterator[slice]:
    """Slices of the rows, of at most _MAX_SCRATCH_ELEMENTS each (but at least one row)."""
    at_once = max(1, _MAX_SCRATCH_ELEMENTS // row_size)
    for first in range(0, num_rows, at_once):
        yield slice(first, first + at_once)


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser. The shifts of signed numbers are made logical by masks."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MIX_1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MIX_2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


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
