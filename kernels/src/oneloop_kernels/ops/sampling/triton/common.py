"""What several kernels share: the noise's hash, the order of tokens, the slots' parameters, loads of a row."""

from __future__ import annotations

import math
from typing import Final

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from oneloop_kernels import launch
from oneloop_kernels.ops.sampling import device
from oneloop_kernels.ops.sampling.noise import LARGEST_UNIFORM

TEMPERATURE: Final = tl.constexpr(device.FLOAT_COLUMNS.index("temperature"))
TOP_P: Final = tl.constexpr(device.FLOAT_COLUMNS.index("top_p"))
MIN_P: Final = tl.constexpr(device.FLOAT_COLUMNS.index("min_p"))
REPETITION: Final = tl.constexpr(device.FLOAT_COLUMNS.index("repetition_penalty"))
PRESENCE: Final = tl.constexpr(device.FLOAT_COLUMNS.index("presence_penalty"))
FREQUENCY: Final = tl.constexpr(device.FLOAT_COLUMNS.index("frequency_penalty"))
TOP_K: Final = tl.constexpr(device.INT_COLUMNS.index("top_k"))
NUM_LOGPROBS: Final = tl.constexpr(device.INT_COLUMNS.index("num_logprobs"))
MIN_TOKENS: Final = tl.constexpr(device.INT_COLUMNS.index("min_tokens"))
NUM_BIAS: Final = tl.constexpr(device.INT_COLUMNS.index("num_bias"))
NUM_BANNED: Final = tl.constexpr(device.INT_COLUMNS.index("num_banned"))
PENALIZED: Final = tl.constexpr(device.INT_COLUMNS.index("penalized"))
COLUMNS: Final = tl.constexpr(device.NUM_COLUMNS)
GROUP: Final = tl.constexpr(device.GROUP)
WORDS_OF_GROUP: Final = tl.constexpr(device.WORDS_OF_GROUP)
MAX_SPLITS: Final = tl.constexpr(device.MAX_SPLITS)
MAX_CANDIDATES: Final = tl.constexpr(device.MAX_CANDIDATES)
MAX_RANKED: Final = tl.constexpr(device.MAX_RANKED)

EDITED: Final = tl.constexpr(1)
MASKED: Final = tl.constexpr(2)
"""What a row may be, in any combination."""
MIN_TEMPERATURE: Final = tl.constexpr(1e-5)
"""Below it a slot is greedy."""
NO_TOKEN: Final = tl.constexpr(2**31 - 1)
NEG_INF: Final = tl.constexpr(float("-inf"))
INF: Final = tl.constexpr(float("inf"))
LOG2_E: Final = tl.constexpr(math.log2(math.e))
_LARGEST_UNIFORM: Final = tl.constexpr(LARGEST_UNIFORM)
_SERIES_BELOW: Final = tl.constexpr(0.125)
_INTERPRETED: Final = tl.constexpr(launch.INTERPRETED)


@triton.jit
def mix64(z):
    """SplitMix64's finaliser."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def noise_key(seed, output_index):
    """(factor, offset) uint32 of a row's noise. seed: int64."""
    golden = (output_index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    key = mix64(mix64(seed.to(tl.uint64, bitcast=True)) + golden)
    return ((key >> 32) | 1).to(tl.uint32), (key & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _hash32(ids, factor, offset):
    """32 random bits per id, uint32."""
    x = ids.to(tl.uint32) * factor + offset
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _fast_log(x):
    """Natural logarithm by the special function unit: off by less than 2e-7 · max(1, |log x|)."""
    if _INTERPRETED:
        return tl.log(x)
    return libdevice.fast_logf(x)


@triton.jit
def _exponential_of(hashed):
    """−log1p(−v) of the lower 31 bits, float32."""
    v = tl.minimum(((hashed & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31, _LARGEST_UNIFORM)
    # log1p has no fast instruction: near 0, where 1 − v would round, seven terms of −log1p(−v) = v + v²/2 + v³/3 + …
    series = 1.0 / 6.0 + v * (1.0 / 7.0)
    series = 1.0 / 5.0 + v * series
    series = 1.0 / 4.0 + v * series
    series = 1.0 / 3.0 + v * series
    series = 1.0 / 2.0 + v * series
    series = v * (1.0 + v * series)
    return tl.where(v < _SERIES_BELOW, series, -_fast_log(1.0 - v))


@triton.jit
def _race_bits(groups, number: tl.constexpr, factor, offset):
    """The group's own bits of that number, below 8."""
    return _hash32(groups.to(tl.uint32) | ((128 + number) << 24), factor, offset)


@triton.jit
def first_of_race(groups, factor, offset):
    """(the smallest variate of each group's tokens, the place of its token)."""
    variate = _exponential_of(_race_bits(groups, 0, factor, offset)) * (1.0 / GROUP)
    return variate, (_race_bits(groups, 4, factor, offset) & (GROUP - 1)).to(tl.int32)


@triton.jit
def firsts_of_race(groups, factor, offset):
    """The four smallest variates of each group's tokens in order, and the places of their tokens."""
    a, place_a = first_of_race(groups, factor, offset)
    b = a + _exponential_of(_race_bits(groups, 1, factor, offset)) * (1.0 / (GROUP - 1))
    c = b + _exponential_of(_race_bits(groups, 2, factor, offset)) * (1.0 / (GROUP - 2))
    d = c + _exponential_of(_race_bits(groups, 3, factor, offset)) * (1.0 / (GROUP - 3))
    step_b = 1 + (_race_bits(groups, 5, factor, offset) % (GROUP - 1)).to(tl.int32)
    step_c = 1 + (_race_bits(groups, 6, factor, offset) % (GROUP - 2)).to(tl.int32)
    step_c += (step_c >= step_b).to(tl.int32)
    step_d = 1 + (_race_bits(groups, 7, factor, offset) % (GROUP - 3)).to(tl.int32)
    step_d += (step_d >= tl.minimum(step_b, step_c)).to(tl.int32)
    step_d += (step_d >= tl.maximum(step_b, step_c)).to(tl.int32)
    return a, b, c, d, place_a, place_a ^ step_b, place_a ^ step_c, place_a ^ step_d


@triton.jit
def gumbel(variates):
    """Noise of exponential variates."""
    return -_fast_log(variates)


@triton.jit
def noise_of(token_ids, groups, factor, offset):
    """Gumbel noise of tokens, float32. groups: theirs, of a shape that goes with token_ids."""
    a, b, c, d, place_a, place_b, place_c, place_d = firsts_of_race(groups, factor, offset)
    place = token_ids & (GROUP - 1)
    variate = d + _exponential_of(_hash32(token_ids, factor, offset))
    variate = tl.where(place == place_d, d, variate)
    variate = tl.where(place == place_c, c, variate)
    variate = tl.where(place == place_b, b, variate)
    return gumbel(tl.where(place == place_a, a, variate))


@triton.jit
def scaled(x, best, temperature):
    """(x − best) / temperature: 0 for the best also where it is infinite, −∞ for tokens that cannot be drawn."""
    distance = tl.where(x == best, 0.0, (x - best) / temperature)
    return tl.where(x == NEG_INF, NEG_INF, distance)


@triton.jit
def order_key(x):
    """int32 in the order of the floats; −0 counts as 0. Of no use for NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    """The float that has this order_key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_key(x, token_ids):
    """int64, different for all tokens of a row: in the order of their logits, of equal ones the lowest id last."""
    return (order_key(x).to(tl.int64) << 32) | (token_ids ^ 0x7FFFFFFF)


@triton.jit
def limit_of_key(key):
    """(logit, id) such that exactly the tokens `beyond` it have a larger key."""
    upper = (key >> 32).to(tl.int32)
    limit_id = (0x7FFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)
    # −1 is the place of −0, which no token has: all zeros are beyond it.
    return float_of_key(upper), tl.where(upper == -1, NO_TOKEN, limit_id)


@triton.jit
def beyond(x, token_ids, limit, limit_id):
    """Whether a token comes before the one of that logit and id in the order of `token_key`."""
    return (x > limit) | ((x == limit) & (token_ids < limit_id))


@triton.jit
def middle(low, high):
    """⌊(low + high) / 2⌋ of integers, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_maximum(x):
    """Maximum over the last axis of [groups, tokens]; NaN where anything is NaN."""
    if _INTERPRETED:  # where reductions by a function of one's own run element by element
        is_nan = x != x
        maximum = tl.max(tl.where(is_nan, NEG_INF, x), 1)
        return tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), maximum)
    return tl.reduce(x, 1, _larger_or_nan)


@triton.jit
def edited_row(logits, edited, marks, row, slot, vocab_size):
    """What `load_row` takes for a row with edits: its model's logits, its edited ones, and which of them count."""
    return logits, edited + row * vocab_size, marks + slot * words_of_row(vocab_size)


@triton.jit
def masked_row(row, masks, mask_row_ptr, sample, kinds, vocab_size):
    """The same with a mask. row: from `edited_row`. kinds: from `kinds_of_row`; it may have no edits, or no mask."""
    mask_row = tl.maximum(tl.load(mask_row_ptr + sample), 0).to(tl.int64)
    return row[0], row[1], row[2], masks + mask_row * ((vocab_size + 31) // 32), kinds


@triton.jit
def _has_marks(row):
    """Whether the row's marks are to be looked at."""
    if len(row) > 3:
        marked = (row[4] & EDITED) != 0
    else:
        marked = True
    return marked


@triton.jit
def _has_mask(row):
    """Whether a row of `masked_row` has one."""
    return (row[4] & MASKED) != 0


@triton.jit
def words_of_row(vocab_size):
    """Words of a slot's marks."""
    return (vocab_size + GROUP - 1) // GROUP * WORDS_OF_GROUP


@triton.jit
def mark(marks, tokens, mask):
    """Let the edited logits of tokens (one, or several) count. marks: the slot's."""
    bits = (tokens * 0 + 1) << (tokens & 31)
    tl.atomic_or(marks + (tokens >> 5), bits, mask=mask, sem="relaxed")


@triton.jit
def load_row(row, columns, mask):
    """Logits of a row as float32, −∞ where masked.

    row: (the model's logits,), or what `edited_row` or `masked_row` gives.
    """
    x = tl.load(row[0] + columns, mask=mask, other=NEG_INF).to(tl.float32)
    if len(row) > 1:
        word = tl.load(row[2] + (columns >> 5), mask=mask & _has_marks(row), other=0)
        x = tl.load(row[1] + columns, mask=((word >> (columns & 31)) & 1) != 0, other=x)
    if len(row) > 3:
        word = tl.load(row[3] + (columns >> 5), mask=mask & _has_mask(row), other=-1)
        x = tl.where(((word >> (columns & 31)) & 1) != 0, x, NEG_INF)
    return x


@triton.jit
def _load_marks(row, first, vocab_size, there, SIZE: tl.constexpr):
    """Bits of tokens first (a multiple of 8) to first + SIZE − 1, eight in each of [SIZE / 8]; 0 where not there."""
    at = tl.arange(0, SIZE // 8)
    marks = row[2].to(tl.pointer_type(tl.uint8)) + first // 8
    return tl.load(marks + at, mask=(first + at * 8 < vocab_size) & there & _has_marks(row), other=0)


@triton.jit
def _load_mask(row, first, vocab_size, SIZE: tl.constexpr):
    """The same of the row's mask; all set where it has none, or beyond the vocabulary."""
    at = tl.arange(0, SIZE // 8)
    mask = row[3].to(tl.pointer_type(tl.uint8)) + first // 8
    return tl.load(mask + at, mask=(first + at * 8 < vocab_size) & _has_mask(row), other=255)


@triton.jit
def _are_marked(marks, SIZE: tl.constexpr):
    """[SIZE] bool."""
    return tl.reshape((marks.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1, (SIZE,)) != 0


@triton.jit
def first_tile(row, first, vocab_size, num_tiles, SIZE: tl.constexpr):
    """The tile of SIZE tokens from `first` on, for `tile_logits`. row: as `load_row` takes it.

    The marks of the tile after it are asked for too: with them, edited logits can be loaded a tile ahead.
    """
    columns = first + tl.arange(0, SIZE)
    x = tl.load(row[0] + columns, mask=columns < vocab_size, other=NEG_INF)
    if len(row) == 1:
        return (x,)
    else:
        marks = _load_marks(row, first, vocab_size, True, SIZE)
        edited = tl.load(row[1] + columns, mask=_are_marked(marks, SIZE), other=0.0)
        later_marks = _load_marks(row, first + SIZE, vocab_size, num_tiles > 1, SIZE)
        if len(row) > 3:
            return x, edited, marks, later_marks, _load_mask(row, first, vocab_size, SIZE)
        else:
            return x, edited, marks, later_marks


@triton.jit
def next_tile(row, tile, first, vocab_size, num_left, SIZE: tl.constexpr):
    """The tile from `first` on, after the tile before it. num_left: tiles from there on; 0: nothing is loaded."""
    columns = first + tl.arange(0, SIZE)
    x = tl.load(row[0] + columns, mask=(columns < vocab_size) & (num_left > 0), other=NEG_INF)
    if len(row) == 1:
        return (x,)
    else:
        edited = tl.load(row[1] + columns, mask=_are_marked(tile[3], SIZE), other=0.0)
        later_marks = _load_marks(row, first + SIZE, vocab_size, num_left > 1, SIZE)
        if len(row) > 3:
            return x, edited, tile[3], later_marks, _load_mask(row, first, vocab_size, SIZE)
        else:
            return x, edited, tile[3], later_marks


@triton.jit
def first_tiles(row, first, vocab_size, num_tiles, SIZE: tl.constexpr):
    """Two tiles for `tile_logits` and `next_tiles`: the one of SIZE tokens from `first` on, and what is loaded ahead.

    row: as `load_row` takes it. With edits two tiles are under way, for whoever has smaller tiles then, else one.
    """
    following = first_tile(row, first, vocab_size, num_tiles, SIZE)
    later = following
    if len(row) > 1:
        later = next_tile(row, following, first + SIZE, vocab_size, num_tiles - 1, SIZE)
    return following, later


@triton.jit
def next_tiles(row, following, later, first, tile, vocab_size, num_tiles, SIZE: tl.constexpr):
    """The two after tile number `tile`, which was the first of the two before."""
    if len(row) > 1:
        following = later
        left = num_tiles - tile - 2
        later = next_tile(row, later, first + (tile + 2) * SIZE, vocab_size, left, SIZE)
    else:
        left = num_tiles - tile - 1
        following = next_tile(row, following, first + (tile + 1) * SIZE, vocab_size, left, SIZE)
        later = following
    return following, later


@triton.jit
def tile_logits(tile, SIZE: tl.constexpr):
    """[SIZE] float32."""
    x = tile[0].to(tl.float32)
    if len(tile) > 1:
        x = tl.where(_are_marked(tile[2], SIZE), tile[1], x)
    if len(tile) > 4:
        x = tl.where(_are_marked(tile[4], SIZE), x, NEG_INF)
    return x


@triton.jit
def kinds_of_row(row_edited_ptr, mask_row_ptr, row, edits, MASKS: tl.constexpr):
    """EDITED where the step has edits and the row asked for any, with MASKED where it has a mask; 0: plain."""
    kinds = tl.full((), 0, tl.int32)
    if MASKS:
        kinds = (tl.load(mask_row_ptr + row) >= 0).to(tl.int32) * MASKED
    if edits != 0:
        kinds += (tl.load(row_edited_ptr + row) != 0).to(tl.int32) * EDITED
    return kinds
