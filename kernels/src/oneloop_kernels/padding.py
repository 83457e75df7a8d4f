"""How many rows a CPU computes instead of the number there is. No torch: the memory plan needs it too."""

from __future__ import annotations


def padded_num_tokens(num_tokens: int) -> int:
    """The number of rows that a CPU computes instead: 2, 4, or a multiple of 8 that grows to 64.

    Above 64 at most 13 % more. A single row is computed as two (see `cpu`); few distinct numbers keep few kernels of
    oneDNN.
    """
    if num_tokens <= 2:
        return 2
    if num_tokens <= 4:
        return 4
    multiple = 8
    while multiple < 64 and num_tokens > 16 * multiple:
        multiple *= 2
    return -(-num_tokens // multiple) * multiple
