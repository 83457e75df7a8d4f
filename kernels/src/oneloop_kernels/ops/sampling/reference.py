"""Sampling in plain torch. Sorting is avoided: top_p looks at the likeliest tokens first and at all only if it must."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.sampling import TopLogprobs

if TYPE_CHECKING:
    from oneloop_kernels.ops.sampling import Draws, Penalties, Truncation

_NUM_LIKELIEST = 1024
"""Tokens that top_p looks at before it sorts the vocabulary."""


def _signed(value: int, bits: int) -> int:
    """The two's complement number with the same bits: torch has no unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX_1 = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_2 = _signed(0x94D049BB133111EB, 64)
_LOWBIAS_1 = _signed(0x7FEB352D, 32)
_LOWBIAS_2 = _signed(0x846CA68B, 32)
_LARGEST_UNIFORM = 1.0 - 2.0**-24


class ReferenceSamplingOps:
    """See the contract."""

    __slots__ = ()

    def penalize(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """See the contract."""
        counts = penalties.output_counts
        in_output = counts > 0
        seen = in_output | penalties.in_prompt
        repetition = penalties.repetition[:, None]
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, penalized, logits))
        logits.sub_(counts * penalties.frequency[:, None])
        logits.sub_(in_output * penalties.presence[:, None])

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """See the contract."""
        best = logits.amax(-1, keepdim=True)
        scaled = logits.sub_(best).div_(draws.temperature[:, None])  # the best is 0: nothing overflows
        if draws.min_p is not None:
            scaled.masked_fill_(scaled < draws.min_p.log()[:, None], float("-inf"))
        if draws.truncation is None:
            token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
            return scaled.add_(self.noise(draws.seed, draws.output_index, token_ids)).argmax(-1)
        kept, candidates = _truncate(scaled, draws.truncation)
        noise = self.noise(draws.seed, draws.output_index, candidates.to(torch.int32))
        return candidates.gather(1, kept.add_(noise).argmax(-1, keepdim=True)).squeeze(1)

    def noise(self, seed: torch.Tensor, output_index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        key = _mix64(_mix64(seed) + (output_index + 1) * _GOLDEN)
        factor = ((key >> 32) | 1).to(torch.int32)[:, None]
        offset = ((key << 32) >> 32).to(torch.int32)[:, None]
        hashed = token_ids * factor
        hashed += offset
        hashed ^= (hashed >> 16).bitwise_and_(0xFFFF)
        hashed *= _LOWBIAS_1
        hashed ^= (hashed >> 15).bitwise_and_(0x1FFFF)
        hashed *= _LOWBIAS_2
        hashed ^= (hashed >> 16).bitwise_and_(0xFFFF)
        uniform = hashed.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
        return uniform.clamp_(max=_LARGEST_UNIFORM).neg_().log1p_().neg_().log_().neg_()

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


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser. The shifts of signed numbers are made logical by masks."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MIX_1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MIX_2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def _truncate(scaled: torch.Tensor, truncation: Truncation) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and ids ([num_rows, n]) of the likeliest tokens, −∞ where top_k or top_p drops them."""
    vocab_size = scaled.shape[1]
    top_k = truncation.top_k[:, None]
    top_p = truncation.top_p[:, None]
    limit = torch.where(top_k > 0, top_k, vocab_size)
    num_candidates = min(truncation.max_top_k or _NUM_LIKELIEST, vocab_size)
    full_mass = None if truncation.max_top_k else scaled.logsumexp(-1, keepdim=True)
    while True:
        values, token_ids = scaled.topk(num_candidates, dim=-1)
        beyond_k = torch.arange(num_candidates, device=scaled.device) >= limit
        values = values.masked_fill_(beyond_k, float("-inf"))
        mass = values.logsumexp(-1, keepdim=True)
        if full_mass is not None:
            mass = torch.where(limit <= num_candidates, mass, full_mass)
        probabilities = (values - mass).exp_()
        reached = probabilities.cumsum(-1)
        enough = (reached[:, -1:] >= top_p) | (limit <= num_candidates)
        if num_candidates == vocab_size or truncation.max_top_k or bool(enough.all()):
            break
        num_candidates = vocab_size
    likelier = reached - probabilities  # mass of the tokens before; the first has none and always stays
    likelier[:, 0] = 0.0
    return values.masked_fill_((likelier >= top_p) & (top_p < 1.0), float("-inf")), token_ids


REFERENCE: Final = ReferenceSamplingOps()
