"""GPUs that step times are predicted for: memory, bandwidth and matrix rate.

H200: measured on one (reads, bfloat16 products of random 8192 x 8192 matrices). The others: nine tenths of the memory
bandwidth and the dense bfloat16 rate of their datasheets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB: Final = 1 << 20
_OF_DATASHEET: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One product."""

    key: str
    """What it is called on the command line."""
    words: tuple[str, ...]
    """Words that its name in NVML has."""
    total_bytes: int
    """Memory as NVML counts it."""
    bytes_per_s: float
    flops: float
    """Dense 16-bit matrix products, FLOP/s."""
    generation: int
    """Compute capability (major)."""


def _by_datasheet(
    key: str, words: tuple[str, ...], mib: int, terabytes_per_s: float, teraflops: float, generation: int
) -> Card:
    return Card(
        key=key,
        words=words,
        total_bytes=mib * _MIB,
        bytes_per_s=_OF_DATASHEET * terabytes_per_s * 1e12,
        flops=_OF_DATASHEET * teraflops * 1e12,
        generation=generation,
    )


CARDS: Final[tuple[Card, ...]] = (
    Card(
        key="h200",
        words=("H200",),
        total_bytes=143_771 * _MIB,
        bytes_per_s=4.3e12,
        flops=750e12,
        generation=9,
    ),
    _by_datasheet("h100", ("H100", "80GB", "HBM3"), 81_559, 3.35, 989.0, 9),
    _by_datasheet("a100-80gb", ("A100", "80GB"), 81_920, 1.935, 312.0, 8),
    _by_datasheet("l40s", ("L40S",), 46_068, 0.864, 362.0, 8),
    _by_datasheet("rtx4090", ("RTX", "4090"), 24_564, 1.008, 165.2, 8),
)


def card_named(name: str) -> Card | None:
    """The card whose key or product name that is."""
    words = set(name.replace("-", " ").split())
    for card in CARDS:
        if name.lower() == card.key or words.issuperset(card.words):
            return card
    return None
