"""The experts' products: every program has a tile of one expert's pairs times a block of its results.

Whichever of the two is the wider side feeds the tensor cores' wide side: weights where experts have few tokens each,
tokens where they have many. Pairs that share an expert share a tile, and so its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.moe.triton.routing import TABLE
from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def experts_kernel(
    x_ptr, weight_ptr, out_ptr, ids_ptr, factors_ptr, bins_ptr, tiles_ptr,
    sum_ptr, shared_ptr, logits_ptr, slots_ptr, counters_ptr,
    out_size, x_stride, num_tokens, num_slots, sum_stride, shared_stride, shared_in_stride,
    IN_SIZE: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    FEW: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, TOKENS_WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, COMBINED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Of each pair: silu(gate · x) · (up · x) if GATED, else weight · x multiplied by the pair's factor.

    weight: [experts, 2 · out_size if GATED else out_size, IN_SIZE]. out has a row per pair; so has x unless GATED, when
    it has one per token. BLOCK_N: results of a program, a multiple of 8. Grid: [tiles · ceil(out_size / BLOCK_N)].

    FEW: all tokens fit a tile. With BY_PAIR there is one for each pair, of which the first of an expert's has them all,
    else one for each expert. Rows are in the order of pairs.
    Else tiles are those of the table, as many as there could be, and what lies between the two products is by expert:
    see `routing`.

    COMBINED: 0, or a power of two that holds all tokens: who comes last of a block of columns adds them up into sum,
    as `combine_kernel` does, for which counters (see MoeCall) has a ticket. With FEW, not GATED.

    PREFETCH: bytes of each row of weights that are asked for before the kernel's turn has come: for the kernel behind
    one that has itself waited for the routing.
    """
    num_blocks = tl.cdiv(out_size, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    if USE_PDL and PREFETCH == 0:
        tl.extra.cuda.gdc_wait()
    is_tile, expert, tokens, rows, live, pairs_ptr = tile_of(
        tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens, TOP_K, TOP_K_PAD, FEW, BY_PAIR, ONE_TOKEN, BLOCK_M
    )
    weight_rows = _rows_of(weight_ptr, expert, block, out_size, IN_SIZE, GATED, BLOCK_N)
    if USE_PDL and PREFETCH > 0:
        if is_tile:
            prefetch(weight_rows, PREFETCH, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: who comes next may rely on the routing
    if is_tile:
        _compute(
            x_ptr, x_stride, weight_rows, out_ptr, factors_ptr, pairs_ptr, tokens, rows, live, block, out_size,
            IN_SIZE, GATED, TOP_K, FEW, TOKENS_WIDE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    if COMBINED > 0:
        combine_if_last(
            tl.num_programs(0) // num_blocks, block, out_ptr, shared_ptr, logits_ptr, slots_ptr, sum_ptr, counters_ptr,
            num_tokens, num_slots, out_size, sum_stride, shared_stride, shared_in_stride,
            NUM_EXPERTS, EXPERTS_PAD, TOP_K, HAS_GATE, HAS_SHARED, HAS_SLOTS, BLOCK_N, COMBINED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_tiles"])
def both_kernel(
    x_ptr, gate_up_ptr, inner_ptr, down_ptr, out_ptr, ids_ptr, factors_ptr, bins_ptr, tiles_ptr, flags_ptr,
    sum_ptr, shared_ptr, logits_ptr, slots_ptr, counters_ptr,
    num_tiles, num_tokens, num_slots, sum_stride, shared_stride, shared_in_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    FEW: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr,
    GATE_WIDE: tl.constexpr, GATE_N: tl.constexpr, GATE_K: tl.constexpr, GATE_STAGES: tl.constexpr,
    DOWN_WIDE: tl.constexpr, DOWN_N: tl.constexpr, DOWN_K: tl.constexpr, DOWN_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, COMBINED: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Both products of `experts_kernel`: programs of down behind those of gate and up. Each waits for its tile.

    Hopper begins the programs of a grid in their order, so that those that are waited for run; CUDA does not promise
    it, so only plans measured on a card have this kernel. flags: int32, a zero per tile, counted up.
    Grid: [num_tiles · (ceil(WIDTH / GATE_N) + ceil(HIDDEN / DOWN_N))].
    """
    GATE_BLOCKS: tl.constexpr = (WIDTH + GATE_N - 1) // GATE_N
    DOWN_BLOCKS: tl.constexpr = (HIDDEN + DOWN_N - 1) // DOWN_N
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    num_gates = num_tiles * GATE_BLOCKS
    is_gate = index < num_gates
    index = tl.where(is_gate, index, index - num_gates)
    tile = index // tl.where(is_gate, GATE_BLOCKS, DOWN_BLOCKS)
    block = index % tl.where(is_gate, GATE_BLOCKS, DOWN_BLOCKS)
    is_tile, expert, tokens, rows, live, pairs_ptr = tile_of(
        tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens, TOP_K, TOP_K_PAD, FEW, BY_PAIR, ONE_TOKEN, BLOCK_M
    )
    if is_gate:
        if is_tile:
            _compute(
                x_ptr, HIDDEN, _rows_of(gate_up_ptr, expert, block, WIDTH, HIDDEN, True, GATE_N), inner_ptr,
                factors_ptr, pairs_ptr, tokens, rows, live, block, WIDTH,
                HIDDEN, True, TOP_K, FEW, GATE_WIDE, BLOCK_M, GATE_N, GATE_K, GATE_STAGES,
            )  # fmt: skip
            tl.debug_barrier()  # all of it is written before it is counted
            tl.atomic_add(flags_ptr + tile, 1, sem="release")
    else:
        if is_tile:
            weight_rows = _rows_of(down_ptr, expert, block, HIDDEN, WIDTH, False, DOWN_N)
            if USE_PDL and PREFETCH > 0:
                prefetch(weight_rows, PREFETCH, DOWN_N)
            done = tl.atomic_add(flags_ptr + tile, 0, sem="acquire")
            while done < GATE_BLOCKS:
                done = tl.atomic_add(flags_ptr + tile, 0, sem="acquire")
            _compute(
                inner_ptr, WIDTH, weight_rows, out_ptr, factors_ptr, pairs_ptr, tokens, rows, live, block, HIDDEN,
                WIDTH, False, TOP_K, FEW, DOWN_WIDE, BLOCK_M, DOWN_N, DOWN_K, DOWN_STAGES,
            )  # fmt: skip
        if COMBINED > 0:
            combine_if_last(
                num_tiles, block, out_ptr, shared_ptr, logits_ptr, slots_ptr, sum_ptr, counters_ptr,
                num_tokens, num_slots, HIDDEN, sum_stride, shared_stride, shared_in_stride,
                NUM_EXPERTS, EXPERTS_PAD, TOP_K, HAS_GATE, HAS_SHARED, HAS_SLOTS, DOWN_N, COMBINED,
            )  # fmt: skip


@triton.jit
def tile_of(
    tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, FEW: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Whether there is such a tile; its expert; tokens (if FEW), rows, and which of them are live; where its pairs are
    (unless FEW, when rows are pairs)."""
    if FEW:
        is_tile, expert, tokens, rows, live = _few(
            tile, ids_ptr, num_tokens, TOP_K, TOP_K_PAD, BY_PAIR, ONE_TOKEN, BLOCK_M
        )
        pairs_ptr = bins_ptr
    else:
        place = tiles_ptr + TABLE + 4 * tile  # at once, though it may be beyond the last
        is_tile = tile < tl.load(tiles_ptr, cache_modifier=".cg")
        expert = tl.load(place, cache_modifier=".cg")
        rows = tl.load(place + 1, cache_modifier=".cg") + tl.arange(0, BLOCK_M)
        live = rows < tl.load(place + 2, cache_modifier=".cg")
        pairs_ptr = bins_ptr + tl.load(place + 3, cache_modifier=".cg")
        tokens = rows
    return is_tile, expert, tokens, rows, live, pairs_ptr


@triton.jit
def _rows_of(
    weight_ptr, expert, block, out_size, IN_SIZE: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers to a block's rows of weights. Eight of the gate, then eight of up, and so on: a thread of the tensor
    cores has both of a result."""
    halves: tl.constexpr = 2 if GATED else 1
    index = tl.arange(0, halves * BLOCK_N)
    if GATED:
        column = block * BLOCK_N + index // 16 * 8 + index % 8
        row = tl.minimum(column, out_size - 1) + index // 8 % 2 * out_size
    else:
        row = tl.minimum(block * BLOCK_N + index, out_size - 1)
    return weight_ptr + (expert.to(tl.int64) * (halves * out_size) + row) * IN_SIZE


@triton.jit
def _compute(
    x_ptr, x_stride, weight_rows, out_ptr, factors_ptr, pairs_ptr, tokens, rows, live, block, out_size,
    IN_SIZE: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr, FEW: tl.constexpr, TOKENS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile's block of results; see experts_kernel."""
    if FEW:
        pairs = rows
    else:
        pairs = tl.load(pairs_ptr + tl.arange(0, BLOCK_M), mask=live, other=0, cache_modifier=".cg")
        tokens = pairs // TOP_K
    sources = tokens if GATED else rows
    sums = _products(
        x_ptr + sources.to(tl.int64) * x_stride, live, weight_rows, IN_SIZE, TOKENS_WIDE, BLOCK_M,
        (2 if GATED else 1) * BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = live[:, None] & (columns < out_size)[None, :]
    if GATED:
        sums = sums.reshape(BLOCK_M, BLOCK_N // 8, 2, 8).permute(0, 1, 3, 2).reshape(BLOCK_M, BLOCK_N, 2)
        gate, up = tl.split(sums)
        out = silu_mul_tile(gate, up)
        targets = rows
    else:
        factors = tl.load(factors_ptr + pairs, mask=live, other=0.0, cache_modifier=".cg")
        out = sums * factors[:, None]
        targets = pairs
    places = out_ptr + targets.to(tl.int64)[:, None] * out_size + columns[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_if_last(
    num_comers, block, out_ptr, shared_ptr, logits_ptr, slots_ptr, sum_ptr, counters_ptr,
    num_tokens, num_slots, out_size, sum_stride, shared_stride, shared_in_stride,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """The sum of a block of columns, by the last of its num_comers programs."""
    tl.debug_barrier()  # all of the results are written before the ticket is taken
    ticket_ptr = counters_ptr + NUM_EXPERTS + 1 + block
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == num_comers - 1:
        tl.store(ticket_ptr, 0)
        _combine(
            out_ptr, shared_ptr, logits_ptr, slots_ptr, sum_ptr, tl.arange(0, COMBINED),
            block * BLOCK_N + tl.arange(0, BLOCK_N),
            num_tokens, num_slots, out_size, sum_stride, shared_stride, shared_in_stride,
            NUM_EXPERTS, EXPERTS_PAD, TOP_K, HAS_GATE, HAS_SHARED, HAS_SLOTS,
        )  # fmt: skip


@triton.jit
def _few(
    tile, ids_ptr, num_tokens,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Whether there is such a tile, its expert, and for each token its index, its pair and whether it is sent there."""
    tokens, places = tl.arange(0, BLOCK_M), tl.arange(0, TOP_K_PAD)
    expert = tl.load(ids_ptr + tile, cache_modifier=".cg") if BY_PAIR else tile
    if ONE_TOKEN and BY_PAIR:  # whose experts are all different
        return expert >= 0, tl.maximum(expert, 0), tokens, tokens + tile, tokens == 0
    own = ids_ptr + tokens[:, None] * TOP_K + places[None, :]
    known = (tokens < num_tokens)[:, None] & (places < TOP_K)[None, :]
    mine = tl.load(own, mask=known, other=-1, cache_modifier=".cg") == tl.maximum(expert, 0)
    place = tl.max(tl.where(mine, places[None, :], -1), 1)
    live = place >= 0
    first = tl.min(tl.where(live, tokens, BLOCK_M), 0)
    is_tile = (expert >= 0) & (first == tile // TOP_K) if BY_PAIR else first < BLOCK_M
    return is_tile, tl.maximum(expert, 0), tokens, tokens * TOP_K + place, live


@triton.jit
def _products(
    x_rows, live, weight_rows,
    IN_SIZE: tl.constexpr, TOKENS_WIDE: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, COLUMNS] in float32. x_rows: [BLOCK_M] pointers, weight_rows: [COLUMNS]."""
    EVEN: tl.constexpr = IN_SIZE % BLOCK_K == 0
    k = tl.arange(0, BLOCK_K)
    if TOKENS_WIDE:
        sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    else:
        sums = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
    for start in tl.range(0, IN_SIZE, BLOCK_K, num_stages=STAGES):
        columns = start + k
        within = columns < IN_SIZE
        if EVEN:
            weights = tl.load(weight_rows[:, None] + columns[None, :])
        else:
            weights = tl.load(weight_rows[:, None] + columns[None, :], mask=within[None, :], other=0.0)
        x = tl.load(x_rows[:, None] + columns[None, :], mask=live[:, None] & within[None, :], other=0.0)
        if TOKENS_WIDE:
            sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
        else:
            sums = tl.dot(weights, tl.trans(x), sums, input_precision="ieee")
    return sums if TOKENS_WIDE else tl.trans(sums)


@triton.jit
def prefetch(rows, BYTES: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Ask for the next BYTES of each row [NUM_ROWS] to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [rows.to(tl.int64), tl.full([NUM_ROWS], BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def combine_kernel(
    outputs_ptr, shared_ptr, logits_ptr, slots_ptr, x_ptr, num_tokens, num_slots, hidden, x_stride, shared_stride,
    shared_in_stride,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x[t] += Σ of the TOP_K rows of token t, in their order (+ the shared expert's, times its factor).

    Grid: [num_tokens, ceil(hidden / BLOCK)].
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _combine(
        outputs_ptr, shared_ptr, logits_ptr, slots_ptr, x_ptr,
        tl.program_id(0) + tl.arange(0, 1), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
        num_tokens, num_slots, hidden, x_stride, shared_stride, shared_in_stride,
        NUM_EXPERTS, EXPERTS_PAD, TOP_K, HAS_GATE, HAS_SHARED, HAS_SLOTS,
    )  # fmt: skip


@triton.jit
def _combine(
    outputs_ptr, shared_ptr, logits_ptr, slots_ptr, x_ptr, tokens, columns,
    num_tokens, num_slots, hidden, x_stride, shared_stride, shared_in_stride,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """These tokens and columns of x. Past the first-level cache: others may have written the outputs while we ran."""
    live = tokens < num_tokens
    if HAS_SLOTS:
        live &= tl.load(slots_ptr + tokens, mask=tokens < num_slots, other=-1) >= 0
    mask = live[:, None] & (columns < hidden)[None, :]
    places = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :]
    residual = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    rows = outputs_ptr + tokens.to(tl.int64)[:, None] * TOP_K * hidden + columns[None, :]
    total = tl.zeros(residual.shape, tl.float32)
    for index in tl.static_range(TOP_K):
        total += tl.load(rows + index * hidden, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if HAS_SHARED:
        shared_rows = shared_ptr + tokens.to(tl.int64)[:, None] * shared_stride
        shared = tl.load(shared_rows + columns.to(tl.int64)[None, :] * shared_in_stride, mask=mask, other=0.0)
        shared = shared.to(tl.float32)
        if HAS_GATE:
            gate = tl.load(logits_ptr + tokens * EXPERTS_PAD + NUM_EXPERTS, mask=live, other=0.0)
            shared *= (1.0 / (1.0 + tl.exp(-gate)))[:, None]
        total += shared
    tl.store(places, residual + total, mask=mask)
