"""Numbers from the blocks of GGUF files (ggml's published layouts).

Types whose weights are d · q + m have offsets, relative to the middle of the numbers: those are small where d · q and m
nearly cancel, so that 16 bits are enough for them. Numbers of five bits are stored as six.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from oneloop_kernels.ops.packed_linear.packing import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop_kernels.ops.packed_linear import Bits

_K = 256
"""Weights of a block of the types with K."""
_SMALL_HALF = 0x0400
"""2^-14 in float16."""


class _Type(NamedTuple):
    block_size: int
    block_bytes: int
    bits: Bits
    group_size: int
    read: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    """uint8 [blocks, block_bytes] → q uint8 [blocks, block_size]; d, m float32 [blocks, groups]. Without m the weight
    is d · (q − middle)."""
    halves: tuple[int, ...] = (0,)
    """Where in a block its 16-bit scales are."""
    raised: int = 0
    """What is added to q so that its range lies about the middle of `bits` bits."""


def numbers_of(kind: str, blocks: torch.Tensor) -> Numbers:
    """kind: GGUF's name, one of PACKABLE. blocks: uint8 [rows, bytes of a row]."""
    found = _TYPES[kind]
    rows = blocks.shape[0]
    q, d, m = found.read(blocks.reshape(-1, found.block_bytes))
    values = (q + found.raised if found.raised else q).view(rows, -1)
    scales = d.view(rows, -1)
    if m is None:
        return Numbers(values, scales, found.bits, found.group_size)
    middle = (1 << (found.bits - 1)) - found.raised
    return Numbers(values, scales, found.bits, found.group_size, "offset", (m + middle * d).view(rows, -1))


def sample_blocks(kind: str, rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [rows, row_bytes]: the same mixed bits every time, with small scales where any bits might be no number."""
    places = torch.arange(rows * row_bytes, dtype=torch.int64, device=device)
    blocks = ((places * 2654435761 >> 13) & 255).to(torch.uint8).view(-1, _TYPES[kind].block_bytes)
    scale = torch.tensor([_SMALL_HALF & 255, _SMALL_HALF >> 8], dtype=torch.uint8, device=device)
    for place in _TYPES[kind].halves:
        blocks[:, place : place + 2] = scale
    return blocks.view(rows, row_bytes)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """All lower ones, then all upper ones, of the last dimension."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """uint8 [blocks, 32], 0 or 16, from 32 bits."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, start : start + 4, None] >> places) & 1).flatten(1) << 4


def _q4_0(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return _nibbles(b[:, 2:18]), _half(b, 0), None


def _q4_1(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _nibbles(b[:, 4:20]), _half(b, 0), _half(b, 2)


def _q5_0(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return _nibbles(b[:, 6:22]) | _fifth_bits(b, 2), _half(b, 0), None


def _q5_1(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _nibbles(b[:, 8:24]) | _fifth_bits(b, 4), _half(b, 0), _half(b, 2)


def _q8_0(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return b[:, 2:34] ^ 128, _half(b, 0), None


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d and m of the eight groups of Q4_K and Q5_K: six bits each, times a half each."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1)
    minimum = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1)
    return _half(b, 0) * scale.float(), -_half(b, 2) * minimum.float()


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Of 128 bytes: 32 at a time, lower ones, then upper ones."""
    return _nibbles(packed.reshape(-1, 4, 32)).flatten(1)


def _q4_k(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _k_nibbles(b[:, 16:144]), *_k_scales(b)


def _q5_k(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = ((b[:, 16:48, None].transpose(1, 2) >> groups) & 1) << 4
    return _k_nibbles(b[:, 48:176]) | fifth.flatten(1), *_k_scales(b)


def _q6_k(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    lower = _nibbles(b[:, :128].reshape(-1, 2, 64))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    upper = ((b[:, 128:192].reshape(-1, 2, 1, 32) >> places) & 3) << 4
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return (lower | upper.flatten(2)).flatten(1), _half(b, 208) * scales, None


_TYPES: Final = {
    "Q4_0": _Type(32, 18, 4, 32, _q4_0),
    "Q4_1": _Type(32, 20, 4, 32, _q4_1, (0, 2)),
    "Q5_0": _Type(32, 22, 6, 32, _q5_0, raised=16),
    "Q5_1": _Type(32, 24, 6, 32, _q5_1, (0, 2), raised=16),
    "Q8_0": _Type(32, 34, 8, 32, _q8_0),
    "Q4_K": _Type(_K, 144, 4, 32, _q4_k, (0, 2)),
    "Q5_K": _Type(_K, 176, 6, 32, _q5_k, (0, 2), raised=16),
    "Q6_K": _Type(_K, 210, 6, 16, _q6_k, (208,)),
}

PACKABLE: Final = frozenset(_TYPES)
"""GGUF's names of the types that stay quantised."""
