"""What files mean: every type of GGUF that is packed against the gguf package, and that sizes are known to all."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from oneloop.formats.quantization.gguf import FORMS
from oneloop.formats.quantization.packed import TILE_COLUMNS, TILE_ROWS, Form, halves_of
from oneloop_kernels.ops import packed_linear
from oneloop_kernels.ops.packed_linear.gguf import PACKABLE, numbers_of
from oneloop_kernels.ops.packed_linear.packing import agree, dequantize, fits, joined, pack, plain, unpack

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where in a block its 16-bit scales are; else at its beginning."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any numbers, and scales that are some."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    for place in HALVES.get(kind, (0,)):
        scales = generator.uniform(0.01, 0.1, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_numbers_of_gguf_are_those_of_its_own_package(kind: str) -> None:
    blocks = random_blocks(kind, 6, 768)
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[kind]))
    numbers = numbers_of(kind, torch.from_numpy(blocks))
    torch.testing.assert_close(plain(numbers), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_packed_in_16_bits_they_are_off_by_little(kind: str) -> None:
    """Scales and offsets are rounded, then each weight: three roundings of 2^-9, of what is at most the largest."""
    blocks = random_blocks(kind, 64, 768)
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[kind]))
    found = dequantize(pack(numbers_of(kind, torch.from_numpy(blocks)), torch.bfloat16)).float()
    assert float((found - wanted).norm() / wanted.norm()) < 2**-9 * 1.5
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 3 * 2**-9


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_the_engine_knows_how_types_are_kept(kind: str) -> None:
    numbers = numbers_of(kind, torch.from_numpy(random_blocks(kind, 150, 768)))
    form = FORMS[kind]
    assert (numbers.bits, numbers.group_size, numbers.shift != "none") == (
        form.bits,
        form.group_size,
        form.shifts,
    )
    for halves in (1, 2):
        weight = pack(numbers, torch.float16, halves=halves)
        assert weight.num_bytes == form.kept_bytes(150, 768, halves=halves)


def test_engine_and_kernels_have_the_same_list_and_tiles() -> None:
    assert FORMS.keys() == PACKABLE
    assert (TILE_ROWS, TILE_COLUMNS) == (packed_linear.TILE_ROWS, packed_linear.TILE_COLUMNS)
    for size in (8, 16, 32, 48, 64, 96, 128, 192, 256, 1024):
        assert Form(4, size, shifts=False).is_packable(4096) == fits(size)
    assert Form(4, None, shifts=False).is_packable(4096)
    assert Form(4, 4096, shifts=False).is_packable(100)
    assert (halves_of((64, 64)), halves_of((64, 32)), halves_of((64,)), halves_of((8, 8, 8))) == (2, 1, 1, 1)


def test_parts_that_agree_are_joined() -> None:
    first, second = (
        numbers_of("Q4_K", torch.from_numpy(random_blocks("Q4_K", 70, 512, seed))) for seed in (1, 2)
    )
    assert agree(first, second)
    assert torch.equal(plain(joined([first, second])), torch.cat((plain(first), plain(second))))
    other = numbers_of("Q4_0", torch.from_numpy(random_blocks("Q4_0", 70, 512)))
    assert not agree(first, other)
    order = torch.randperm(512)
    assert not agree(first, second._replace(order=order))
    assert agree(first._replace(order=order), second._replace(order=order.clone()))
    ordered = plain(first._replace(order=order))
    assert torch.equal(ordered[:, order], plain(first))
    assert torch.equal(
        plain(unpack(pack(first, torch.float16))).half(), dequantize(pack(first, torch.float16))
    )
