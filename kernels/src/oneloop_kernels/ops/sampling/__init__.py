"""Turning logits into tokens: penalties, seeded draws, log-probabilities.

The draw is Gumbel's: argmax of logits / temperature + noise is a sample of their softmax. The noise is a function of
(seed, output index, token id) alone, in 32- and 64-bit integer arithmetic, so that a row draws the same token whatever
else is in the batch and whichever implementation computes it:

    mix(z)  = z ← (z ⊕ z≫30) · BF58476D1CE4E5B9;  z ← (z ⊕ z≫27) · 94D049BB133111EB;  z ⊕ z≫31     (SplitMix64)
    key     = mix(mix(seed) + (output_index + 1) · 9E3779B97F4A7C15)                               (mod 2⁶⁴)
    bits(i) = x ← i · (key≫32 | 1) + key;  x ← x ⊕ x≫16;  x ← x · 7FEB352D;  x ← x ⊕ x≫15;
              x ← x · 846CA68B;  x ⊕ x≫16                                                          (mod 2³², lowbias32)
    E(i)    = −log1p(−min(((bits(i) mod 2³¹) + ½) · 2⁻³¹, 1 − 2⁻²⁴))           float32, exponentially distributed

Tokens race in groups of 128, group = token_id ≫ 7. The smallest of n exponential variates is itself one, divided by n;
whose it is, is uniform; and the others exceed it by exponential variates again (Rényi, 1953). So with own(j) = 2³¹ +
j · 2²⁴ + group the four smallest of a group are

    first₁  = E(own(0)) / 128             place₁ = bits(own(4)) mod 128
    first₂  = first₁ + E(own(1)) / 127    place₂ = place₁ ⊕ step₂,   step₂ = 1 + bits(own(5)) mod 127
    first₃  = first₂ + E(own(2)) / 126    place₃ = place₁ ⊕ step₃,   step₃ = 1 + bits(own(6)) mod 126 …
    first₄  = first₃ + E(own(3)) / 125    place₄ = place₁ ⊕ step₄,   step₄ = 1 + bits(own(7)) mod 125 …

(… and one more for every earlier step, in ascending order, that it reaches: steps differ), and

    noise   = −log(firstₖ)                where token_id mod 128 = placeₖ
              −log(first₄ + E(token_id))  elsewhere

are independent Gumbel variates, of which the largest of each group are known without looking at its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch

NOISE_GROUP: Final = 128
"""Tokens with consecutive ids whose noise is drawn together."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens of each row may be drawn. Applied after the temperature: min_p, then top_k, then top_p.

    top_k: [num_rows] int64, 0 = off. top_p: [num_rows] float32 in (0, 1], 1 = off. Rows use at least one of them.
    max_top_k: the largest of top_k. all_top_k: whether every row uses it.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    max_top_k: int
    all_top_k: bool


@dataclass(frozen=True, slots=True)
class Draws:
    """One random draw per row.

    temperature: [num_rows] float32 > 0. seed: [num_rows] int64. output_index: [num_rows] int64, the token's place in
    its output. min_p: [num_rows] float32 in [0, 1), 0 = off, or None for no row.
    truncation: None where no row has top_k or top_p.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    output_index: torch.Tensor
    min_p: torch.Tensor | None
    truncation: Truncation | None


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of each row and the history they look at.

    repetition, presence, frequency: [num_rows] float32. in_prompt: [num_rows, vocab_size] bool.
    output_counts: [num_rows, vocab_size] int32: how often the row has put out each token.
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    in_prompt: torch.Tensor
    output_counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """ranks: [num_rows] int64, 1 + how many tokens are likelier. token_ids: [num_rows, 1 + num_top] int64 and logprobs
    of the same shape in float32: column 0 is the chosen token, then the most likely ones in order."""

    ranks: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor


class SamplingOps(Protocol):
    """Logits are [num_rows, vocab_size] float32 of any strides. A row with NaN or +∞ gets −1 for a token."""

    def penalize(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """In place. Repetition (Keskar et al., 2019) divides positive and multiplies negative logits of tokens seen in
        prompt or output; then frequency · count and presence · (count > 0) of the output are subtracted."""

    def mask(self, logits: torch.Tensor, masks: torch.Tensor) -> None:
        """In place: −∞ for tokens whose bit is not set. masks: [num_rows, ceil(vocab_size / 32)] int32, lowest bit
        first."""

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[num_rows] int64. The logits are overwritten. Which of equal logits top_k and top_p keep is left open."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64: a token with the largest logit."""

    def draw_among(self, logits: torch.Tensor, token_ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """`draw` where every token but token_ids is −∞. logits: [num_rows, n], of token_ids ([num_rows, n] int64, each
        once, and any id where the logit is −∞); overwritten. Of equal scores the first wins."""

    def noise(self, seed: torch.Tensor, output_index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows, n] float32 Gumbel noise as above. token_ids: [n] or [num_rows, n] int32."""

    def top_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TopLogprobs:
        """Log-softmax of the logits at the chosen token_ids ([num_rows] int64) and at the num_top most likely ones."""


SAMPLING: Family[SamplingOps] = Family(
    "sampling",
    (Implementation("reference", "oneloop_kernels.ops.sampling.reference", "REFERENCE"),),
)
