"""A linear map of few rows on a GPU: the weights are streamed once, everything around the product is done on the way.

Two bodies compute the same tile of sums. `_stream_products`, for one or two rows, multiplies in registers, where the
next weights are always on their way. `_dot_products` feeds the tensor cores W · xᵀ, the weights as their wide side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile

LANE = tl.constexpr(8)
"""Elements that one thread of `_stream_products` reads and adds up at a time: 16 bytes of a short type."""
PREFETCH_PIECES = tl.constexpr(128)
"""Per tile: one for each thread of four warps. A warp asks for its pieces one after the other."""


@triton.jit(do_not_specialize=["num_tokens"])
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    tickets_ptr,
    num_tokens,
    in_size,
    out_size,
    x_stride,
    weight_stride,
    weight_in_stride,
    residual_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    USE_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out (or residual +=) = silu(a) · b where [a; b] = W · norm(x)ᵀ + bias, or that product itself; see the contract.

    Grid: [ceil(out_size / BLOCK_N) · SPLIT_K, ceil(num_tokens / BLOCK_M)]; with SPLIT_K > 1 one tile of rows must do.
    out_size: of the result. out is contiguous.
    partial: float32 [tiles, SPLIT_K, 2 · BLOCK_N · BLOCK_M + BLOCK_M], uninitialised. PREFETCH: bytes of each weight
    row that are asked for before the kernel waits for the one before it (0: none); a multiple of 128.

    The norm's factor 1 / rms belongs to a row of x, so it is applied to the sums; what enters the product is x · weight
    of the norm.
    """
    tile = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    first_token = tl.program_id(1).to(tl.int64) * BLOCK_M
    num_tokens -= first_token.to(tl.int32)
    x_ptr += first_token * x_stride
    out_ptr += first_token * out_size
    residual_ptr += first_token * residual_stride
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows of weights beyond the last are read as the last: their sums are dropped at the end.
    safe_columns = tl.minimum(columns, out_size - 1).to(tl.int64)
    gate_ptr = weight_ptr + safe_columns * weight_stride
    up_ptr = gate_ptr
    if GATED:
        up_ptr = gate_ptr + tl.cast(out_size, tl.int64) * weight_stride
    num_blocks = tl.cdiv(in_size, BLOCK_K)
    per_split = tl.cdiv(num_blocks, SPLIT_K)
    first = split * per_split * BLOCK_K
    last = tl.minimum(in_size, first + per_split * BLOCK_K)
    if USE_DOT:
        gate, up, squares = _dot_products(
            x_ptr, gate_ptr, up_ptr, norm_ptr, num_tokens, first, last, x_stride, weight_in_stride,
            HAS_NORM, GATED, BLOCK_M, BLOCK_N, BLOCK_K, PREFETCH, USE_PDL,
        )  # fmt: skip
    else:
        gate, up, squares = _stream_products(
            x_ptr, gate_ptr, up_ptr, norm_ptr, num_tokens, first, last, x_stride, weight_in_stride,
            HAS_NORM, GATED, BLOCK_M, BLOCK_N, BLOCK_K, USE_PDL,
        )  # fmt: skip
    if SPLIT_K == 1:
        _finish(
            gate, up, squares, bias_ptr, residual_ptr, out_ptr, num_tokens, in_size, out_size, columns,
            residual_stride, eps, HAS_BIAS, HAS_NORM, GATED, HAS_RESIDUAL, BLOCK_M,
        )  # fmt: skip
    else:
        part_size: tl.constexpr = 2 * BLOCK_N * BLOCK_M + BLOCK_M
        partial_ptr += tl.cast(tile, tl.int64) * SPLIT_K * part_size
        _write_part(partial_ptr + split * part_size, gate, up, squares, HAS_NORM, GATED, BLOCK_M, BLOCK_N)
        tl.debug_barrier()  # the whole part is written before its ticket is taken
        if tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(tickets_ptr + tile, 0)
            gate, up, squares = _add_parts(partial_ptr, HAS_NORM, GATED, BLOCK_M, BLOCK_N, SPLIT_K)
            _finish(
                gate, up, squares, bias_ptr, residual_ptr, out_ptr, num_tokens, in_size, out_size, columns,
                residual_stride, eps, HAS_BIAS, HAS_NORM, GATED, HAS_RESIDUAL, BLOCK_M,
            )  # fmt: skip


@triton.jit
def _dot_products(
    x_ptr, gate_ptr, up_ptr, norm_ptr, num_tokens, first, last, x_stride, weight_in_stride,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sums over [first, last) by tensor cores: gate, up [BLOCK_N, BLOCK_M], Σ x² [BLOCK_M]."""
    k = first + tl.arange(0, BLOCK_K)
    scale_next = tl.zeros([BLOCK_K], tl.float32)
    if HAS_NORM:
        scale_next = tl.load(norm_ptr + k, mask=k < last, other=0.0).to(tl.float32)
    if USE_PDL:
        if PREFETCH > 0:
            _prefetch(gate_ptr + first * weight_in_stride, PREFETCH, BLOCK_N)
            if GATED:
                _prefetch(up_ptr + first * weight_in_stride, PREFETCH, BLOCK_N)
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel asks for its weights while this one runs
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_M)
    live = tokens[None, :] < num_tokens
    x_ptr += tokens[None, :].to(tl.int64) * x_stride
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        within = k < last
        gate_tile = tl.load(
            gate_ptr[:, None] + k[None, :].to(tl.int64) * weight_in_stride, mask=within[None, :], other=0.0
        )
        x = tl.load(x_ptr + k[:, None], mask=live & within[:, None], other=0.0)
        if HAS_NORM:
            scale, following = scale_next, k + BLOCK_K
            scale_next = tl.load(norm_ptr + following, mask=following < last, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * scale[:, None]).to(x.dtype)
        gate = tl.dot(gate_tile, x, gate, input_precision="ieee")
        if GATED:
            up_tile = tl.load(
                up_ptr[:, None] + k[None, :].to(tl.int64) * weight_in_stride, mask=within[None, :], other=0.0
            )
            up = tl.dot(up_tile, x, up, input_precision="ieee")
    return gate, up, tl.sum(squares, 0)


@triton.jit
def _prefetch(row_ptr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ask for the next BYTES of each row [BLOCK_N] to be brought into the L2 cache."""
    parts: tl.constexpr = 1 if BLOCK_N >= PREFETCH_PIECES else PREFETCH_PIECES // BLOCK_N
    part: tl.constexpr = BYTES // parts
    places = row_ptr.to(tl.int64)[:, None] + (tl.arange(0, parts) * part)[None, :]
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [places, tl.full([BLOCK_N, parts], part, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _stream_products(
    x_ptr, gate_ptr, up_ptr, norm_ptr, num_tokens, first, last, x_stride, weight_in_stride,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sums over [first, last) in registers: gate, up [BLOCK_N, BLOCK_M], Σ x² [BLOCK_M].

    Each thread adds up LANE neighbours at once, so that only BLOCK_K / LANE sums per row stay until the end.
    """
    lanes: tl.constexpr = BLOCK_K // LANE
    gate_next = _load_weights(gate_ptr, first, last, weight_in_stride, BLOCK_K)
    up_next = gate_next
    if GATED:
        up_next = _load_weights(up_ptr, first, last, weight_in_stride, BLOCK_K)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel asks for its weights while this one runs
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_M)
    live = tokens[:, None] < num_tokens
    x_ptr += tokens[:, None].to(tl.int64) * x_stride
    gate = tl.zeros([BLOCK_N, BLOCK_M, lanes], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M, lanes], tl.float32)
    squares = tl.zeros([BLOCK_M, lanes], tl.float32)
    for start in range(first, last, BLOCK_K):
        gate_tile, up_tile = gate_next, up_next
        gate_next = _load_weights(gate_ptr, start + BLOCK_K, last, weight_in_stride, BLOCK_K)
        if GATED:
            up_next = _load_weights(up_ptr, start + BLOCK_K, last, weight_in_stride, BLOCK_K)
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k[None, :], mask=live & (k < last)[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum((x * x).reshape(BLOCK_M, lanes, LANE), 2)
            x *= tl.load(norm_ptr + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
        x = x.reshape(1, BLOCK_M, lanes, LANE)
        gate += tl.sum(gate_tile.to(tl.float32).reshape(BLOCK_N, 1, lanes, LANE) * x, 3)
        if GATED:
            up += tl.sum(up_tile.to(tl.float32).reshape(BLOCK_N, 1, lanes, LANE) * x, 3)
    return tl.sum(gate, 2), tl.sum(up, 2), tl.sum(squares, 1)


@triton.jit
def _load_weights(row_ptr, start, last, weight_in_stride, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] from column `start`, zero from `last` on."""
    k = start + tl.arange(0, BLOCK_K)
    return tl.load(
        row_ptr[:, None] + k[None, :].to(tl.int64) * weight_in_stride,
        mask=(k < last)[None, :],
        other=0.0,
        eviction_policy="evict_first",  # of the first-level cache, where x stays
    )


@triton.jit
def _write_part(
    part_ptr, gate, up, squares,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tokens = tl.arange(0, BLOCK_M)
    places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
    tl.store(part_ptr + places, gate)
    if GATED:
        tl.store(part_ptr + BLOCK_N * BLOCK_M + places, up)
    if HAS_NORM:
        tl.store(part_ptr + 2 * BLOCK_N * BLOCK_M + tokens, squares)


@triton.jit
def _add_parts(
    part_ptr,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """The sum of all parts in the order of their index, whoever came last. Past the first-level cache: others wrote."""
    tokens = tl.arange(0, BLOCK_M)
    places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for _ in tl.static_range(SPLIT_K):
        gate += tl.load(part_ptr + places, cache_modifier=".cg")
        if GATED:
            up += tl.load(part_ptr + BLOCK_N * BLOCK_M + places, cache_modifier=".cg")
        if HAS_NORM:
            squares += tl.load(part_ptr + 2 * BLOCK_N * BLOCK_M + tokens, cache_modifier=".cg")
        part_ptr += 2 * BLOCK_N * BLOCK_M + BLOCK_M
    return gate, up, squares


@triton.jit
def _finish(
    gate, up, squares, bias_ptr, residual_ptr, out_ptr, num_tokens, in_size, out_size, columns, residual_stride, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Norm factor, bias, gate, residual; then the result is written. columns: [BLOCK_N] of the result."""
    tokens = tl.arange(0, BLOCK_M)
    mask = (columns[:, None] < out_size) & (tokens[None, :] < num_tokens)
    if HAS_NORM:
        inverse = tl.rsqrt(squares / in_size + eps)
        gate *= inverse[None, :]
        up *= inverse[None, :]
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=columns < out_size, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + out_size + columns, mask=columns < out_size, other=0.0).to(tl.float32)[
                :, None
            ]
    if GATED:
        gate = silu_mul_tile(gate, up)
    rows = tokens[None, :].to(tl.int64)
    if HAS_RESIDUAL:
        places = residual_ptr + rows * residual_stride + columns[:, None]
        gate += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, gate, mask=mask)
    else:
        tl.store(out_ptr + rows * out_size + columns[:, None], gate, mask=mask)
