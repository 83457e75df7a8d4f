"""The sizes that steps are padded to."""

import pytest

from oneloop.worker.buckets import bucket_of, largest_bucket, row_buckets, token_bucket, token_buckets


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 64, 100, 256, 300, 1024])
def test_row_buckets_reach_the_largest_batch(max_num_seqs):
    buckets = row_buckets(max_num_seqs)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_num_seqs
    for count in range(1, max_num_seqs + 1):
        bucket = bucket_of(count, buckets)
        assert count <= bucket <= max(2 * count, count + 8)
    with pytest.raises(ValueError, match="exceeds"):
        bucket_of(max_num_seqs + 1, buckets)


def test_token_buckets_waste_little():
    for count in range(1, 10_000, 7):
        bucket = token_bucket(count)
        assert count <= bucket <= max(count + 16, count * 9 / 8)
        assert token_bucket(bucket) == bucket
    buckets = token_buckets(2048)
    assert buckets == sorted(set(buckets), reverse=True)
    assert {token_bucket(count) for count in range(1, 2049)} == set(buckets)


def test_the_largest_step_holds_every_step():
    for max_num_tokens, max_num_seqs in ((1, 1), (2048, 512), (1000, 1000), (10_000, 3)):
        largest = largest_bucket(max_num_tokens, max_num_seqs)
        assert largest >= max(row_buckets(max_num_seqs))
        assert largest >= max(token_buckets(max_num_tokens))
