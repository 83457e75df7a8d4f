"""Sizes that cannot work are refused with the name of the field."""

from __future__ import annotations

import pytest

from oneloop_core import ConfigError, Core, CoreConfig

GOOD = {"num_blocks": 64, "vocab_size": 1000}


def test_defaults_and_properties() -> None:
    config = CoreConfig(**GOOD, hash_key=b"0123456789abcdef", policy="priority")
    values = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    assert values == {
        "num_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "mixed_step_tokens": None,
        "hidden_size": 0,
        "max_model_len": 2048,
        "vocab_size": 1000,
        "enable_prefix_caching": True,
        "policy": "priority",
        "max_steps_in_flight": 2,
        "seed": 0,
        "hash_key": b"0123456789abcdef",
    }
    assert Core(config).config is config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, 0)
            for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "vocab_size")
        ],
        *[("num_blocks", value) for value in (-1, 2**31, 2**40, 10**30)],
        ("max_model_len", 0),
        ("max_model_len", 1),
        ("max_steps_in_flight", 0),
        ("max_num_batched_tokens", 255),
        ("mixed_step_tokens", 0),
        ("mixed_step_tokens", -1),
        ("policy", "lifo"),
        ("hash_key", b"short"),
        ("seed", -1),
    ],
)
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        CoreConfig(**(GOOD | {field: value}))


def test_the_layout_is_aligned_and_dense() -> None:
    layout = Core(CoreConfig(**GOOD)).layout
    sizes = {"i32": 4, "f32": 4, "i64": 8}
    end = 0
    for item in layout.fields:
        assert item.offset % 64 == 0
        assert end <= item.offset < end + 64
        end = item.offset + item.length * sizes[item.dtype]
    assert layout.num_bytes - 64 < end <= layout.num_bytes
    names = [item.name for item in layout.fields]
    first_output, first_mask = names.index("output_token"), names.index("mask_header")
    assert layout.fields[first_output].offset == layout.input_bytes
    assert layout.fields[first_mask].offset == layout.mask_offset
    assert names[first_output:first_mask] == [
        "output_token", "output_rank", "output_logprob_token", "output_logprob", "score_rank", "score_logprob_token",
        "score_logprob", "pooled", "pick_logprob",
    ]  # fmt: skip
    masks = [(item.name, item.length) for item in layout.fields[first_mask:]]
    rows, words = GOOD.get("max_num_seqs", 256), -(-GOOD["vocab_size"] // 32)
    assert masks == [("mask_header", 8), ("sample_mask_row", rows), ("mask_word", rows * words)]
    assert layout.header["step_id"] == 0
    assert len(set(layout.header.values())) == len(layout.header) == 28
