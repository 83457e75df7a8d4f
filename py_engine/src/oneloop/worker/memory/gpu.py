"""What the GPU worker allocates beside weights and KV cache, item by item. For the sizes of the largest step.

T = tokens of the largest step with its padding, R = max_num_seqs, b = bytes of an element of the model's type.
Allowances for what no formula gives (the driver's, cuBLAS's, the graphs') are the constants of this file; `check`
compares a real step with the sum, `python -m oneloop_bench.ledger` item by item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop.formats.quantization.fp8 import BLOCK as FP8_BLOCK
from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.worker.buckets import MAX_CAPTURED_TOKENS, largest_bucket
from oneloop.worker.gpu.captures import GraphSizes
from oneloop.worker.memory.ledger import Reserved
from oneloop.worker.memory.scores import MAX_PICKS_PER_ROW, MAX_SCORES_PER_STEP, device_score_bytes
from oneloop.worker.memory.sizes import (
    longest_context,
    max_blocks_per_seq,
    weight_bytes,
    written_out_bytes,
)

if TYPE_CHECKING:
    from oneloop.config import EngineConfig
    from oneloop.formats.model_spec import ModelSpec, MoeSpec

MIB: Final = 1 << 20

# Measured on one H200 (driver 13.0, torch 2.11, Triton 3.6) with Qwen3-0.6B and Llama 3.1 8B; oneloop_bench.ledger.
CONTEXT_BYTES: Final = 832 * MIB
"""CUDA's context, cuBLAS's and Triton's loaded code: 757 MiB with the kernels of plain steps, 619 of it before any."""
GEMM_WORKSPACE_BYTES: Final = 32 * MIB
"""One for cuBLAS and cuBLASLt together on Hopper; steps outside of graphs and graphs have one each."""
SLACK_SHARE: Final = 0.05
"""Part of the step's own tensors that the allocator's rounding and splitting may add…"""
SLACK_BYTES: Final = 64 * MIB
"""…beside its segments that are never full: three of 20 MiB, and small ones. Seen: 30 to 70 MiB."""
_GRAPH_LAYER_BYTES: Final = 34 * 1024
"""What the driver keeps of one layer's kernels in one graph: 33 KiB; of a sampling's kernels no more."""
NUM_SLABS: Final = 3
"""Of the engine's ring."""
_NUM_VARIANTS: Final = 4
"""Of sampling that are captured whatever requests ask for: greedy or not, with log-probabilities or without.

Those with edits or penalties, eight more, come with requests that ask for them; with 512 sequences about 3 MiB each.
"""

_MAX_MULTIPROCESSORS: Final = 160
"""More than any card of today has."""
_MAX_PROGRAMS: Final = _MAX_MULTIPROCESSORS * 5
"""Programs of split decode attention: multiprocessors times programs on each."""
_LARGEST_TILE: Final = 128 * 256
"""Results of a program of a linear map."""
_MAX_PARTS: Final = 16_384
"""Results of splits of contexts that are kept beside each other in the fixed order."""
_MAX_CHUNKS: Final = 4
"""Parts that a prefix shared by many sequences is read in."""
_SLAB_LISTS: Final = 3 * 16_384
"""Entries of the slab's lists of biases and bans."""
_SLAB_FRAME_BYTES: Final = 8192
"""The slab's header, and its fields' alignment to 64 bytes."""
_SLAB_ROW_WORDS: Final = 42 + 2 * 21
"""Entries of the slab per sequence; as many log-probabilities again are kept on the device."""
_SLOT_LIST_BYTES: Final = 1024 * 8 + 2048 * 4
"""Biases (token and value) and bans that a slot may have."""
_SLOT_PARAMETER_BYTES: Final = 2 * 8 * 4 + 8
_SAMPLE_SCRATCH_BYTES: Final = 256 * 2 * 4 + 2048 * 8 + 8
"""Per sample: partial results of parts of the vocabulary, candidates of top-k and top-p, counters."""
_VOCABULARY_GROUP: Final = 128
"""Tokens that share a maximum."""


def gpu_reserved(spec: ModelSpec, item_bytes: int, config: EngineConfig) -> Reserved:
    """Everything but the KV cache."""
    num_seqs = config.resolved.max_num_seqs
    num_tokens = largest_bucket(config.resolved.step_tokens, num_seqs)
    activations = activation_bytes(spec, item_bytes, num_tokens)
    logits = max(logits_bytes(spec, item_bytes, num_seqs), device_score_bytes(spec, item_bytes))
    narrow = config.cache.kv_cache_dtype != "auto"
    workspaces = (
        attention_workspace_bytes(spec, num_seqs, num_tokens, narrow_kv=narrow) + GEMM_WORKSPACE_BYTES
    )
    workspaces += written_out_bytes(spec, item_bytes)
    if True in config.worker.orders:
        workspaces += ordered_bytes(spec, num_tokens)
    return Reserved(
        context=CONTEXT_BYTES,
        weights=weight_bytes(spec, item_bytes, on_gpu=True),
        activations=activations,
        logits=logits,
        workspaces=workspaces,
        step_buffers=step_buffer_bytes(spec, config),
        sampler=sampler_bytes(spec, num_seqs),
        graphs=0
        if config.worker.enforce_eager
        else graph_bytes(spec, item_bytes, num_tokens, num_seqs, config.worker.orders),
        slack=int(SLACK_SHARE * (activations + logits + workspaces)) + SLACK_BYTES,
    )


def logits_bytes(spec: ModelSpec, item_bytes: int, num_seqs: int) -> int:
    """R · b · (vocabulary, and the sampled rows' hidden states and their norm)."""
    return num_seqs * (spec.vocab_size + 2 * spec.hidden_size) * item_bytes


def graph_bytes(
    spec: ModelSpec, item_bytes: int, num_tokens: int, num_seqs: int, orders: tuple[bool, ...] = (False,)
) -> int:
    """Their pool and the driver's part, once all are captured that no request needs to ask for."""
    captured = min(num_tokens, MAX_CAPTURED_TOKENS)
    sizes = GraphSizes.of(captured, num_seqs, NUM_SLABS, orders)
    driver = graph_driver_bytes(spec, sizes.num_forward, sizes.num_sample(_NUM_VARIANTS))
    return graph_pool_bytes(spec, item_bytes, captured, num_seqs) + driver


def graph_pool_bytes(spec: ModelSpec, item_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Tensors of the largest captured step: activations, logits, a workspace of matrix products, a weight written out.

    From one graph to the next they do not share memory of different sizes: the sum was seen.
    """
    activations = activation_bytes(spec, item_bytes, num_tokens)
    weight = written_out_bytes(spec, item_bytes)
    return activations + logits_bytes(spec, item_bytes, num_seqs) + GEMM_WORKSPACE_BYTES + weight


def graph_driver_bytes(spec: ModelSpec, num_forward: int, num_sample: int) -> int:
    """What the driver keeps of so many graphs of forward passes, per layer, and of samplings."""
    return (num_forward * spec.num_layers + num_sample) * _GRAPH_LAYER_BYTES


def activation_bytes(spec: ModelSpec, item_bytes: int, num_tokens: int) -> int:
    """T · b · (residual and its norm, 2 hidden; then the wider of two phases of a layer), plus cos and sin in float32.

    Attention: qkv, attended, projected (hidden). Feed-forward: gate and up, their product, projected (hidden). Of
    experts: see `sparse_bytes`.
    """
    queries = spec.num_heads * spec.head_dim
    attention = queries + 2 * spec.num_kv_heads * spec.head_dim + queries + spec.hidden_size
    feed_forward = 3 * spec.intermediate_size + spec.hidden_size
    widest = max(attention, feed_forward) * item_bytes
    if spec.moe is not None:
        quantized = isinstance(spec.quantization, QuantizationSpec) and isinstance(
            spec.quantization.scheme, Fp8Scheme
        )
        widest = max(widest, sparse_bytes(spec.moe, spec.hidden_size, item_bytes, quantized=quantized))
    rotary = 2 * spec.head_dim * 4
    return num_tokens * (2 * spec.hidden_size * item_bytes + widest + rotary)


def sparse_bytes(moe: MoeSpec, hidden_size: int, item_bytes: int, *, quantized: bool = False) -> int:
    """Per token, k = top_k: b · (the norm, hidden, and of each of k experts the activations and the output), the
    router's logits in float32 (of as many rows as the next power of two), 4 for each expert's bin, 28 · k of routing
    (ids, weights, and the table of tiles and its flags at their largest).

    Small steps have shares of logits, some MiB that slack has room for. A shared expert's output (hidden) is there
    beside them; its gate, up and product before them. quantized: experts have 8 bits, so that either what they are
    given or the activations of k of them are there as e4m3 too, with a scale for each 128 of them at most.
    """
    router_rows = moe.num_experts + bool(moe.shared_intermediate_size)
    routing = 4 * ((1 << (router_rows - 1).bit_length()) + moe.num_experts) + 28 * moe.top_k
    chosen = hidden_size + moe.top_k * (moe.intermediate_size + hidden_size)
    shared = hidden_size if moe.shared_intermediate_size else 0
    if quantized:
        width, blocks = moe.intermediate_size, -(-moe.intermediate_size // FP8_BLOCK)
        routing += max(hidden_size + 4 * -(-hidden_size // FP8_BLOCK), moe.top_k * (width + 4 * blocks))
    return max(
        (chosen + shared) * item_bytes + routing, (3 * moe.shared_intermediate_size + shared) * item_bytes
    )


def attention_workspace_bytes(
    spec: ModelSpec, num_seqs: int, num_tokens: int, *, narrow_kv: bool = False
) -> int:
    """Partial results in float32, each of head size + 2 numbers, and 32 bytes per item of work.

    Split contexts: two per program and query head of a KV head (rounded up to a power of two; with keys of 8 bits of
    several KV heads, 8 in all). Shared prefixes: one per part, sequence and query head.
    """
    group = max(1 << (spec.num_heads // spec.num_kv_heads - 1).bit_length(), 8 if narrow_kv else 1)
    results = 2 * _MAX_PROGRAMS * group + _MAX_CHUNKS * num_seqs * spec.num_heads
    items = num_tokens + (8 + _MAX_CHUNKS) * num_seqs + 2 * _MAX_PROGRAMS
    return results * (spec.head_dim + 2) * 4 + items * 32


def ordered_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """Of the fixed order. Attention: results of splits as above, for each query head of a KV head; an item per few
    tokens. Linear maps of many rows: sums of a piece of the columns, a tile per multiprocessor, within graphs and
    outside of them.
    """
    group = spec.num_heads // spec.num_kv_heads
    splits = _MAX_PARTS * group * (spec.head_dim + 2) * 4 + num_tokens * 32
    return splits + 2 * _MAX_MULTIPROCESSORS * _LARGEST_TILE * 4


def step_buffer_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Slab on the device, the step's inputs (ids, positions, 8-byte cache slots), block tables R · blocks · 4.

    The slab's masks are a bit per token and sequence.
    """
    num_seqs = config.resolved.max_num_seqs
    num_tokens = largest_bucket(config.resolved.step_tokens, num_seqs)
    context = longest_context(spec, config)
    table_width = max_blocks_per_seq(context, config.resolved.block_size)
    deltas = 3 * (2 * num_seqs + min(num_seqs, 8) * table_width)
    history = min(num_seqs * context, max(65_536, 4 * context))
    scores = min(config.resolved.step_tokens, MAX_SCORES_PER_STEP) * (2 + 1 + 2 * 21)
    row_words = _SLAB_ROW_WORDS + 2 * (1 + MAX_PICKS_PER_ROW) + spec.hidden_size + -(-spec.vocab_size // 32)
    rows = num_seqs * row_words
    slab = 4 * (num_tokens + deltas + _SLAB_LISTS + history + scores + rows) + _SLAB_FRAME_BYTES
    inputs = num_tokens * (4 + 4 + 8) + 4 * num_seqs * _SLAB_ROW_WORDS
    return slab + inputs + num_seqs * table_width * 4


def sampler_bytes(spec: ModelSpec, num_seqs: int) -> int:
    """Per slot: 8 · vocabulary (edited logits in float32, counts for penalties), per group of 128 tokens 20 of maxima
    and 16 of marks, and the rest.

    The tables over the vocabulary are made when a request first asks for them; their place is kept from the start.
    """
    groups = -(-spec.vocab_size // _VOCABULARY_GROUP)
    slot = (
        spec.vocab_size * 8 + groups * 36 + _SLOT_LIST_BYTES + _SLOT_PARAMETER_BYTES + _SAMPLE_SCRATCH_BYTES
    )
    return num_seqs * slot
