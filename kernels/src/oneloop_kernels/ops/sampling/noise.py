"""The noise of the draws, in plain torch: the formulas of the contract."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from oneloop_kernels.ops.sampling import NOISE_GROUP

LARGEST_UNIFORM: Final = 1.0 - 2.0**-24
_GROUP_BITS = NOISE_GROUP.bit_length() - 1


def _signed(value: int, bits: int) -> int:
    """The two's complement number with the same bits: torch has no unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX_1 = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_2 = _signed(0x94D049BB133111EB, 64)
_LOWBIAS_1 = _signed(0x7FEB352D, 32)
_LOWBIAS_2 = _signed(0x846CA68B, 32)


class NoiseKeys(NamedTuple):
    """What the noise of each row is made of. Both [num_rows, 1] int32."""

    factor: torch.Tensor
    offset: torch.Tensor

    def rows(self, index: torch.Tensor) -> NoiseKeys:
        """Those of the rows in index ([n] int64), in its order."""
        return NoiseKeys(self.factor.index_select(0, index), self.offset.index_select(0, index))


def noise_keys(seed: torch.Tensor, output_index: torch.Tensor) -> NoiseKeys:
    """seed, output_index: [num_rows] int64."""
    key = _mix64(_mix64(seed) + (output_index + 1) * _GOLDEN)
    return NoiseKeys(((key >> 32) | 1).to(torch.int32)[:, None], ((key << 32) >> 32).to(torch.int32)[:, None])


def noise_of_tokens(keys: NoiseKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """[num_rows, n] float32. token_ids: [n] or [num_rows, n] int32."""
    firsts, places = _firsts_of_race(token_ids >> _GROUP_BITS, keys)
    variates = _exponential(_bits(token_ids, keys)).add_(firsts[-1])
    in_group = token_ids.bitwise_and(NOISE_GROUP - 1)
    for first, place in zip(firsts, places, strict=True):
        variates = torch.where(in_group == place, first, variates)
    return variates.log_().neg_()


def noise_of_groups(keys: NoiseKeys, groups: torch.Tensor) -> torch.Tensor:
    """[num_rows, NOISE_GROUP] float32: of all tokens of one group per row. groups: [num_rows] int32."""
    firsts, places = _firsts_of_race(groups[:, None], keys)
    token_ids = groups[:, None] * NOISE_GROUP + torch.arange(
        NOISE_GROUP, dtype=torch.int32, device=groups.device
    )
    variates = _exponential(_bits(token_ids, keys)).add_(firsts[-1])
    variates.scatter_(1, torch.cat(places, 1).to(torch.int64), torch.cat(firsts, 1))
    return variates.log_().neg_()


def largest_of_groups(keys: NoiseKeys, num_groups: int) -> torch.Tensor:
    """[num_rows, num_groups] float32: the largest noise in each group, without looking at its tokens."""
    groups = torch.arange(num_groups, dtype=torch.int32, device=keys.factor.device)
    return _first_of_race(groups, keys).log_().neg_()


def _first_of_race(groups: torch.Tensor, keys: NoiseKeys) -> torch.Tensor:
    return _exponential(_own_bits(groups, 0, keys)).div_(NOISE_GROUP)


def _firsts_of_race(groups: torch.Tensor, keys: NoiseKeys) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per row and group: the four smallest variates of its tokens in order, and the places of these tokens."""

    def step(number: int, choices: int) -> torch.Tensor:
        bits = _own_bits(groups, number, keys).to(torch.int64)
        return bits.bitwise_and_(0xFFFFFFFF).remainder_(choices).add_(1)

    firsts = [_first_of_race(groups, keys)]
    for number in (1, 2, 3):
        later = _exponential(_own_bits(groups, number, keys))
        firsts.append(firsts[-1] + later * (1.0 / (NOISE_GROUP - number)))
    second, third, fourth = (step(number, NOISE_GROUP + 4 - number) for number in (5, 6, 7))
    third += third >= second
    fourth += fourth >= torch.minimum(second, third)
    fourth += fourth >= torch.maximum(second, third)
    place = _own_bits(groups, 4, keys).bitwise_and_(NOISE_GROUP - 1)
    return firsts, [place, *(place ^ other.to(torch.int32) for other in (second, third, fourth))]


def _own_bits(groups: torch.Tensor, number: int, keys: NoiseKeys) -> torch.Tensor:
    """bits(own(number)) of groups."""
    return _bits(groups | _signed(128 + number << 24, 32), keys)


def _bits(ids: torch.Tensor, keys: NoiseKeys) -> torch.Tensor:
    """32 random bits per id and row, int32."""
    hashed = ids * keys.factor
    hashed += keys.offset
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


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser. The shifts of signed numbers are made logical by masks."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MIX_1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MIX_2
    return value ^ ((value >> 31) & ((1 << 33) - 1))
