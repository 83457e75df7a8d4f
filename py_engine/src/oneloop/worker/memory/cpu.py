"""What a step takes on a CPU, beside weights and KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop.layers.limits import MLP_TOKENS_AT_ONCE
from oneloop.worker.memory.ledger import Reserved
from oneloop.worker.memory.scores import score_bytes
from oneloop.worker.memory.sizes import longest_context, weight_bytes, widened_bytes
from oneloop_kernels.padding import padded_num_tokens

if TYPE_CHECKING:
    from oneloop.config import EngineConfig
    from oneloop.formats.model_spec import ModelSpec

_DEFAULT_SHARE: Final = 4
"""By default the cache takes one part in so many of the free memory…"""
_DEFAULT_LIMIT: Final = 4 << 30
"""…but no more bytes than this."""


def cpu_reserved(spec: ModelSpec, item_bytes: int, config: EngineConfig) -> Reserved:
    """Everything but the KV cache."""
    return Reserved(
        weights=weight_bytes(spec, item_bytes, on_gpu=False),
        activations=activation_bytes(spec, item_bytes, config),
        logits=logits_bytes(spec, config),
    )


def activation_bytes(spec: ModelSpec, item_bytes: int, config: EngineConfig) -> int:
    """T tokens · (4 hidden + 2 qkv + 2 queries) + tokens of one MLP part · 4 intermediate (of experts: the chosen ones'
    outputs, hidden, and 4 hidden + 4 of the wider inner size) + one gathered context + one widened weight."""
    num_tokens = padded_num_tokens(config.resolved.step_tokens)
    query_size = spec.num_heads * spec.head_dim
    kv_size = 2 * spec.num_kv_heads * spec.head_dim
    per_token = 4 * spec.hidden_size + 2 * (query_size + kv_size) + 2 * query_size
    wide = 4 * spec.intermediate_size
    if spec.moe is not None:
        inner = 4 * max(spec.moe.intermediate_size, spec.moe.shared_intermediate_size)
        wide = max(wide, (spec.moe.top_k + 4) * spec.hidden_size + inner + spec.moe.num_experts)
    feed_forward = wide * min(num_tokens, MLP_TOKENS_AT_ONCE)
    elements = num_tokens * per_token + feed_forward + kv_size * longest_context(spec, config)
    return elements * item_bytes + widened_bytes(spec)


def logits_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """2 · max_num_seqs · vocabulary in float32: as the model gives them, and converted; or what prompts' scores take.
    They do not exist at the same time.
    """
    sampled = 2 * padded_num_tokens(config.resolved.max_num_seqs) * spec.vocab_size * 4
    return max(sampled, score_bytes(spec, 4))


def default_kv_bytes(free_after_weights: int, step_bytes: int) -> int:
    """A quarter of what is free beside the weights, at most 4 GiB, and never what a step needs."""
    return min(free_after_weights // _DEFAULT_SHARE, free_after_weights - step_bytes, _DEFAULT_LIMIT)
