"""How exactly Hopper's tensor cores add products of 8-bit floats (e4m3), and how far sums may be off by it.

An instruction adds the products of AT_ONCE columns to a sum. All of them, the sum too, are cut, towards zero, to BITS
behind the first of the largest: of the products as they are before they are normalised, and of the sum. So says the
DeepSeek-V3 report (arXiv 2412.19437, 3.5.2: the highest 14 bits), and SageAttention2 (arXiv 2411.10958, 3.2) of sums.
On an H200 our kernels' sums and cuBLAS' (with fast accumulation) are those of `emulated`, bit by bit.
"""

from __future__ import annotations

from typing import Final

import torch

BITS: Final = 13
AT_ONCE: Final = 32
_DEVIATIONS: Final = 5.0
"""That hardly one of millions of sums is off by."""


def emulated(x: torch.Tensor, weight: torch.Tensor, piece: int | None = None) -> torch.Tensor:
    """x · weightᵀ as the tensor cores have it, float64 [m, n]. x: [m, k], weight: [n, k], e4m3.

    piece: so many columns are added by the tensor cores, then their sums exactly; None: all.
    """
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], piece or x.shape[1]):
        columns = slice(start, start + (piece or x.shape[1]))
        total += _piece(x[:, columns].double(), weight[:, columns].double())
    return total


def allowance(sums: torch.Tensor, in_size: int, piece: int | None = None) -> torch.Tensor:
    """How far each of these sums over in_size columns may be off, in absolute numbers. piece: as of `emulated`.

    With u = 2^-BITS times a sum's first bit, what is cut from a product is at most u, u / √3 in root mean square, and
    as often on either side. Let sums have the root mean square 1, and one grow to p: its square is p² / 3 + w on the
    way, on average, where w is that of a random walk whose end is held, and that of its first bit 0.54 as much. So K
    columns deviate by 2^-BITS · √K · √(0.18 · (p² / 3 + w)). w has Cramér's and von Mises' distribution: 1 / 6 on
    average, but with a tail as exp(−π² w / 2), so that an error passes t deviations of w = 1 as rarely as exp(−π t),
    5 in one of six million.

    Besides, 0.8 p / √K more of the products have p's sign than the other, and each of those is cut by u / 2 on average,
    where u is 2^-BITS · 0.72 · |p| / 2: in all 2^-BITS · √K · 0.14 p · |p|, towards zero.

    Of n pieces each has p / n of the sum, and spreads by 1 / √n around that; their deviations add up in squares, of
    which w is ever nearer 1 / 6.
    """
    columns = min(piece or in_size, in_size)
    pieces = in_size / columns
    size = sums.square().mean().sqrt()
    shares = (sums / size).square()
    walk = 1 / 6 + 5 / 6 / pieces
    deviation = (0.18 * ((shares / pieces + 1 - 1 / pieces) / 3 + walk)).sqrt()
    lost = 0.14 * (shares / pieces**0.5 + (1.6 * shares.sqrt() if pieces > 1 else 0.0))
    off: torch.Tensor = 2.0**-BITS * columns**0.5 * size * (_DEVIATIONS * deviation + lost)
    return off


_NOTHING: Final = -200
"""In place of the first bit of zero: below that of any product."""


def _piece(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], AT_ONCE):
        a, b = x[:, start : start + AT_ONCE], weight[:, start : start + AT_ONCE]
        products = a[:, None] * b[None]
        first = torch.where(products == 0, _NOTHING, _first_bit(a)[:, None] + _first_bit(b)[None])
        unit = torch.exp2((torch.maximum(first.amax(-1), _first_bit(sums)) - BITS).double())
        sums = _cut(products, unit[..., None]).sum(-1) + _cut(sums, unit)
        sums = _cut(sums, torch.exp2((_first_bit(sums) - BITS).double()))
    return sums


def _first_bit(values: torch.Tensor) -> torch.Tensor:
    """The exponent of each one's first bit."""
    return torch.where(values == 0, _NOTHING, torch.frexp(values).exponent - 1)


def _cut(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Towards zero, to multiples of the unit."""
    return torch.trunc(values / unit) * unit
