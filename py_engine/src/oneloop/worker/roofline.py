"""Step times that a card's limits allow: every byte read once, every FLOP at the full rate. No torch.

Matrix products and attention come one after the other, each bound by memory or by arithmetic. The kernels' own losses,
activations and launches are left out, so this is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from oneloop.formats.expected import linear_maps, num_expert_parameters, num_parameters, num_sparse_layers
from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.worker.memory.sizes import expert_bytes, kv_token_bytes, weight_bytes

if TYPE_CHECKING:
    from oneloop.device.cards import Card
    from oneloop.formats.model_spec import ModelSpec

QUICK_STEP_S: Final = 0.05
"""A gap between two tokens that readers of a stream hardly notice: they read some 20 tokens a second at most."""


RATED_ITEM_BYTES: Final = 2
"""The rates of the cards' table are those of 16 bits."""


def known_roofline(
    spec: ModelSpec, card: Card | None, item_bytes: int, kv_item_bytes: int = RATED_ITEM_BYTES
) -> Roofline | None:
    """None where the rates are unknown: for a CPU, another card (both are no `card`), activations of other sizes."""
    if card is None or item_bytes != RATED_ITEM_BYTES:
        return None
    return Roofline(spec=spec, card=card, kv_item_bytes=kv_item_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on a card: activations of 16 bits, weights as they are kept. Products in 8 bits have twice the rate."""

    spec: ModelSpec
    card: Card
    kv_item_bytes: int = RATED_ITEM_BYTES
    """Of an element of keys and values."""

    def decode_s(self, batch: int, context: int) -> float:
        """Seconds of a step that computes one token for each of `batch` sequences of `context` tokens.

        Products: max(bytes of weights / bandwidth, 2 · a token's weights · batch / rate). Of experts, those that some
        token is sent to are read, in the mean of tokens that go anywhere alike. Attention: max(KV / bandwidth,
        4 · batch · context · query width · layers / rate).
        """
        products = max(
            self._bytes_read(batch) / self.card.bytes_per_s,
            2 * self._work_of_token() * batch / self.card.flops,
        )
        tokens = batch * context
        attention = max(
            tokens * kv_token_bytes(self.spec, self.kv_item_bytes) / self.card.bytes_per_s,
            tokens * self._attention_flops() / self.card.flops,
        )
        return products + attention

    def prefill_tokens_per_s(self, prompt: int) -> float:
        """Prompt tokens a second, computed in steps so large that arithmetic binds.

        Per token 2 · the parameters that it meets in the layers + attention over half the prompt; the head is computed
        once per prompt.
        """
        head = self.spec.vocab_size * self.spec.hidden_size
        layers = self._work_of_token() - head
        flops = 2 * layers + self._attention_flops() * prompt / 2 + 2 * head / prompt
        return self.card.flops / flops

    def quick_step_tokens(self) -> int:
        """Tokens of a step whose products take about QUICK_STEP_S, at least as many as it takes for arithmetic to bind:
        below that another token is nearly free. A power of two, so that products are cut into whole waves of tiles.

        Time: 2 · a token's parameters in the layers · tokens / rate. The bound: rate · bytes of an element /
        (2 · bandwidth), times all parameters per parameter of a token. All as if weights had 16 bits: what smaller
        ones allow has not been measured.
        """
        head = self.spec.vocab_size * self.spec.hidden_size
        layers, met = self._matrix_parameters() - head, self._parameters_of_token() - head
        in_time = QUICK_STEP_S * self.card.flops / (2 * met)
        free = self.card.flops * RATED_ITEM_BYTES / (2 * self.card.bytes_per_s) * layers / met
        return 1 << max(round(math.log2(in_time)), math.ceil(math.log2(free)), 0)

    def _matrix_parameters(self) -> int:
        """All but the input embedding, of which a step reads a few rows; where it is tied, it is the head too."""
        embedding = 0 if self.spec.tie_word_embeddings else self.spec.vocab_size * self.spec.hidden_size
        return num_parameters(self.spec) - embedding

    def _parameters_of_token(self) -> int:
        """Those that one token is multiplied by."""
        moe = self.spec.moe
        idle = 0 if moe is None else moe.num_experts - moe.top_k
        return self._matrix_parameters() - idle * self._expert_parameters()

    def _work_of_token(self) -> float:
        """The same, those in 8 bits counted half: products of these have twice the rate."""
        moe, quantization = self.spec.moe, self.spec.quantization
        if quantization is None:
            return self._parameters_of_token()
        saved = 0.0
        for one in linear_maps(self.spec):
            if isinstance(quantization.scheme_of(one.names), Fp8Scheme):
                share = moe.top_k / moe.num_experts if moe is not None and one.experts else 1
                saved += share * sum(one.out_sizes) * one.in_size / 2
        return self._parameters_of_token() - saved

    def _bytes_read(self, batch: int) -> float:
        """Of the weights. A step reads (1 − top_k / experts)^batch of all experts not at all."""
        spec, moe = self.spec, self.spec.moe
        embedding = num_parameters(spec) - self._matrix_parameters()
        kept, of_experts = _kept_bytes(spec)
        idle = 0.0 if moe is None else (1 - moe.top_k / moe.num_experts) ** batch
        return kept - embedding * RATED_ITEM_BYTES - idle * of_experts

    def _expert_parameters(self) -> int:
        """One expert of each layer that has them."""
        return num_expert_parameters(self.spec) * num_sparse_layers(self.spec)

    def _attention_flops(self) -> int:
        """Per query and key, in all layers: product with the key and sum of the value, 2 FLOP per element each."""
        return 4 * self.spec.num_heads * self.spec.head_dim * self.spec.num_layers


@lru_cache(maxsize=1)  # names of thousands of experts are looked through for each
def _kept_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Of all weights, and of experts'."""
    experts = expert_bytes(spec, RATED_ITEM_BYTES, on_gpu=True)
    return weight_bytes(spec, RATED_ITEM_BYTES, on_gpu=True), experts
