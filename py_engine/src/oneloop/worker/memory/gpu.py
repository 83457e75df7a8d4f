"""What the GPU worker allocates beside weights and KV cache, item by item. For the sizes of the largest step.

T = tokens of a step, R = max_num_seqs, b = bytes of an element of the model's type. Allowances for what no formula
gives (the driver's, cuBLAS's, the graphs') are the constants of this file; `check` compares a real step with the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop.worker.memory.ledger import Reserved
from oneloop.worker.memory.sizes import longest_context, max_blocks_per_seq, weight_bytes

if TYPE_CHECKING:
    from oneloop.config import EngineConfig
    from oneloop.formats.model_spec import ModelSpec

MIB: Final = 1 << 20

CONTEXT_BYTES: Final = 768 * MIB
"""CUDA's context, cuBLAS's and Triton's loaded code."""
GRAPH_BYTES: Final = 512 * MIB
"""All captured graphs: nodes and parameters in the driver, and private pools beyond the tensors of eager steps."""
GEMM_WORKSPACE_BYTES: Final = 64 * MIB
"""cuBLAS and cuBLASLt, 32 MiB each on Hopper."""
SLACK_SHARE: Final = 0.05
"""Part of the step's own tensors that the allocator's rounding and splitting may add."""

_MAX_MULTIPROCESSORS: Final = 160
"""More than any card of today has."""
_SPLITS_PER_MULTIPROCESSOR: Final = 8
"""Parts of long contexts in flight on one multiprocessor."""
_MIN_GROUP: Final = 16
"""Query heads of one KV head are padded to so many rows: the smallest tile of the tensor cores."""
_LIST_ENTRIES: Final = 3 * 16_384
"""Entries of the slab's lists of biases and bans."""
_SLAB_FRAME_BYTES: Final = 8192
"""The slab's header, and its fields' alignment to 64 bytes."""
_PARAMETER_COLUMNS: Final = 16
"""Sampling parameters per slot, 4 or 8 bytes each."""


def gpu_reserved(spec: ModelSpec, item_bytes: int, config: EngineConfig) -> Reserved:
    """Everything but the KV cache."""
    num_tokens, num_seqs = config.resolved.step_tokens, config.resolved.max_num_seqs
    activations = activation_bytes(spec, item_bytes, num_tokens)
    logits = num_seqs * spec.vocab_size * item_bytes
    workspaces = attention_workspace_bytes(spec, num_seqs) + GEMM_WORKSPACE_BYTES
    return Reserved(
        context=CONTEXT_BYTES,
        weights=weight_bytes(spec, item_bytes),
        activations=activations,
        logits=logits,
        workspaces=workspaces,
        step_buffers=step_buffer_bytes(spec, config),
        sampler=sampler_bytes(spec, num_seqs),
        graphs=0 if config.worker.enforce_eager else GRAPH_BYTES,
        slack=int(SLACK_SHARE * (activations + logits + workspaces)),
    )


def activation_bytes(spec: ModelSpec, item_bytes: int, num_tokens: int) -> int:
    """T · b · (residual and its norm, 2 hidden; then the wider of two phases of a layer), plus cos and sin in float32.

    Attention: qkv, attended, projected (hidden). Feed-forward: gate and up, their product, projected (hidden).
    """
    queries = spec.num_heads * spec.head_dim
    attention = queries + 2 * spec.num_kv_heads * spec.head_dim + queries + spec.hidden_size
    feed_forward = 3 * spec.intermediate_size + spec.hidden_size
    rotary = 2 * spec.head_dim * 4
    return num_tokens * ((2 * spec.hidden_size + max(attention, feed_forward)) * item_bytes + rotary)


def attention_workspace_bytes(spec: ModelSpec, num_seqs: int) -> int:
    """Partial results of split contexts, float32: a tile of padded query heads · (head size + maximum and sum).

    At most one tile per sequence and KV head beside what is in flight on the multiprocessors.
    """
    group = max(_MIN_GROUP, spec.num_heads // spec.num_kv_heads)
    tiles = num_seqs * spec.num_kv_heads + _MAX_MULTIPROCESSORS * _SPLITS_PER_MULTIPROCESSOR
    return tiles * group * (spec.head_dim + 2) * 4


def step_buffer_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Slab on the device, the step's inputs (ids, positions, 8-byte cache slots), block tables R · blocks · 4."""
    num_tokens, num_seqs = config.resolved.step_tokens, config.resolved.max_num_seqs
    context = longest_context(spec, config)
    table_width = max_blocks_per_seq(context, config.resolved.block_size)
    deltas = 3 * (2 * num_seqs + min(num_seqs, 8) * table_width)
    history = min(num_seqs * context, max(65_536, 4 * context))
    slab = 4 * (num_tokens + deltas + _LIST_ENTRIES + history + num_seqs * (40 + 2 * 21)) + _SLAB_FRAME_BYTES
    inputs = num_tokens * (4 + 4 + 8) + num_seqs * 16
    return slab + inputs + num_seqs * table_width * 4


def sampler_bytes(spec: ModelSpec, num_seqs: int) -> int:
    """R · (vocabulary counts of 4 bytes for penalties + parameters), and the lists of biases and bans."""
    return num_seqs * (spec.vocab_size * 4 + _PARAMETER_COLUMNS * 8) + _LIST_ENTRIES * 8
