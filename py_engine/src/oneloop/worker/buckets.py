"""The sizes that a GPU's steps are padded to, so that few graphs serve all. No torch: the plan needs them."""

from __future__ import annotations

from typing import Final

MAX_CAPTURED_TOKENS: Final = 2048
"""Steps with more tokens take the device longer than the host needs to launch them one kernel at a time."""


def bucket_of(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count`; buckets ascend and the last holds the largest step."""
    for bucket in buckets:  # a few dozen; bisect would be no faster here
        if bucket >= count:
            return bucket
    raise ValueError(f"{count} exceeds the largest bucket, {buckets[-1]}")


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are padded to: finer where a row more costs more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def token_bucket(num_tokens: int) -> int:
    """Tokens that a step with prefill is padded to: at most one part in nine more, whole tiles of the products."""
    multiple = 16
    while multiple < 256 and num_tokens > 16 * multiple:
        multiple *= 2
    return -(-num_tokens // multiple) * multiple


def token_buckets(largest: int) -> list[int]:
    """All that token_bucket gives for up to `largest` tokens, the largest first."""
    return sorted({token_bucket(count) for count in range(1, largest + 1)}, reverse=True)


def largest_bucket(max_num_tokens: int, max_num_seqs: int) -> int:
    """Tokens of the largest step that is ever launched, padding included."""
    return max(token_bucket(max_num_tokens), max_num_seqs)
