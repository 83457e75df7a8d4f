"""A model made for Triton kernels computes what the references compute. In the interpreter, so it is tiny."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.registry import prefer
from oneloop_kernels.testing import assert_close


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
)
def test_chunks_over_a_cache_stored_by_head(twins, make_spec, architecture):
    spec = make_spec(architecture)
    with prefer("triton"):
        pair = twins(spec)
    assert not pair.kv.layers[0].is_contiguous()
    token_ids = torch.arange(14) * 17 % 211
    with torch.inference_mode():
        whole = pair.hf(token_ids[None]).logits[0]
        first = 0
        for size in (5, 9):
            hidden = pair.forward(token_ids[first : first + size], first)
            assert_close(pair.ours.compute_logits(hidden), whole[first : first + size])
            first += size


def test_copied_blocks_serve_as_well(twins, make_spec):
    """A sequence goes on from copies of its blocks, as after copy-on-write."""
    with prefer("triton"):
        pair = twins(make_spec("LlamaForCausalLM"))
    token_ids = torch.arange(12) * 13 % 211
    with torch.inference_mode():
        whole = pair.hf(token_ids[None]).logits[0]
        pair.forward(token_ids[:9])
        old, new = pair.block_table[:3].clone(), pair.block_table[-3:].clone()
        pair.kv.copy_blocks(old.to(torch.int32), new.to(torch.int32), torch.tensor([3]))
        pair.kv.storage[:, old] = torch.nan
        pair.block_table[:3] = new
        assert_close(pair.ours.compute_logits(pair.forward(token_ids[9:], 9)), whole[9:])
