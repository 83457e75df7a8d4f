"""Angles of a step; norms, rotation and cache write of a layer, against the formulas in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from oneloop_kernels.ops.rope import ROPE, HeadNorms
from oneloop_kernels.ops.rope.triton import TILES, Tile
from oneloop_kernels.testing import assert_close
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

IMPLEMENTATIONS = ["reference", "triton"]
EPS = 1e-5
FACTOR = 1.25


def frequencies_of(head_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def head_norm(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def expected_qkv(
    qkv: torch.Tensor, num_kv_heads: int, positions: torch.Tensor, norms: HeadNorms | None
) -> torch.Tensor:
    """In double precision, but for the angles, which are defined as float32 products."""
    wide = qkv.double()
    half = qkv.shape[-1] // 2
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    queries, keys, values = wide.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if norms is not None:
        queries, keys = head_norm(queries, norms.weight[0]), head_norm(keys, norms.weight[1])
    angles = (positions[:, None].float() * frequencies_of(2 * half).to(qkv.device)).double()[:, None]
    turned = [
        torch.complex(part[..., :half], part[..., half:])
        * torch.polar(torch.full_like(angles, FACTOR), angles)
        for part in (queries, keys)
    ]
    return torch.cat([*(torch.cat((part.real, part.imag), -1) for part in turned), values], 1)


def blocks_by_head(cache: torch.Tensor) -> torch.Tensor:
    """The same logical cache, stored by head."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_angles_of_far_positions(kernel_device, kernel_dtype, name):
    """Up to position 131072 the float32 angle is reduced without loss."""
    frequencies = frequencies_of(64).to(kernel_device)
    positions = torch.tensor(
        [0, 1, 2, 777, 65535, 105616, 131071, 131072], dtype=torch.int32, device=kernel_device
    )
    rotary = ROPE.resolve(kernel_device, kernel_dtype, name=name).angles(frequencies, FACTOR, kernel_dtype)(
        positions
    )
    angles = (positions[:, None].float() * frequencies).double()
    cos, sin = (
        rotary.cos.reshape(len(positions), -1)[:, -32:],
        rotary.sin.reshape(len(positions), -1)[:, -32:],
    )
    limit = 2e-6 if name == "triton" else 2 * torch.finfo(kernel_dtype).eps
    assert (cos.double() - FACTOR * angles.cos()).abs().max() < limit
    assert (sin.double() - FACTOR * angles.sin()).abs().max() < limit


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [16, 1500])
def test_a_step_begins_with_angles_and_embedding(inputs, kernel_device, kernel_dtype, name, size):
    ops = ROPE.resolve(kernel_device, kernel_dtype, name=name)
    angles = ops.angles(frequencies_of(48).to(kernel_device), FACTOR, kernel_dtype)
    positions = inputs.integers(0, 4096, 5, dtype=torch.int32)
    token_ids = inputs.integers(0, 30, 5, dtype=torch.int32)
    table = inputs.normal(30, 2 * size, dtype=kernel_dtype)[:, :size]
    rotary, hidden = angles.with_embedding(positions, token_ids, table)
    assert torch.equal(hidden, table[token_ids.long()])
    expected = angles(positions)
    assert torch.equal(rotary.cos, expected.cos)
    assert torch.equal(rotary.sin, expected.sin)


SHAPES = [
    # tokens, of which stored, heads, kv heads, head_dim, block size
    (1, 1, 4, 2, 64, 16),
    (7, 7, 9, 3, 64, 4),
    (5, 3, 16, 8, 128, 16),
    (6, 6, 3, 1, 24, 5),
    (8, 6, 1, 1, 16, 8),
]


@pytest.mark.parametrize("by_head", [False, True], ids=["by-position", "by-head"])
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rotate_and_store(inputs, kernel_device, kernel_dtype, name, shape, with_norms, by_head):
    num_tokens, num_stored, num_heads, num_kv_heads, head_dim, block_size = shape
    ops = ROPE.resolve(kernel_device, kernel_dtype, name=name)
    qkv = inputs.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=kernel_dtype) * 3
    positions = inputs.integers(0, 4096, num_tokens, dtype=torch.int32)
    norms = HeadNorms(inputs.normal(2, head_dim, dtype=kernel_dtype), EPS) if with_norms else None
    cache = inputs.poisoned(5, block_size, 2 * num_kv_heads, head_dim, dtype=kernel_dtype)
    if by_head:
        cache = blocks_by_head(cache)
    slots = inputs.permutation(5 * block_size)[:num_stored]
    padded = num_stored // 2
    if num_stored > 1:
        slots[padded] = -1
    expected = expected_qkv(qkv, num_kv_heads, positions, norms)
    frequencies = frequencies_of(head_dim).to(kernel_device)
    rotary = ops.angles(frequencies, FACTOR, kernel_dtype)(positions)

    ops.rotate_and_store(qkv, rotary, norms, cache, slots)

    used = torch.arange(num_tokens) < num_stored
    if num_stored > 1:
        used[padded] = False
    assert_close(qkv[used][:, :num_heads], expected[used][:, :num_heads], kind="rotation")
    flat = cache.reshape(-1, 2 * num_kv_heads, head_dim)
    kept = slots[slots >= 0]
    assert_close(flat[kept], expected[used][:, num_heads:], kind="rotation")
    assert torch.equal(flat[kept][:, num_kv_heads:].double(), expected[used][:, num_heads + num_kv_heads :])
    others = torch.ones(len(flat), dtype=torch.bool)
    others[kept.cpu()] = False
    assert flat[others].isnan().all()


def test_nothing_to_do(inputs, kernel_device, kernel_dtype):
    ops = ROPE.resolve(kernel_device, kernel_dtype, name="triton")
    cache = inputs.poisoned(2, 4, 2, 16, dtype=kernel_dtype)
    nothing = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    rotary = ops.angles(frequencies_of(16).to(kernel_device), 1.0, kernel_dtype)(nothing)
    ops.rotate_and_store(inputs.normal(0, 4, 16, dtype=kernel_dtype), rotary, None, cache, nothing)
    assert cache.isnan().all()


def test_every_tile_computes_the_same(inputs, kernel_device, kernel_dtype):
    ops = ROPE.resolve(kernel_device, kernel_dtype, name="triton")
    rotary = ops.angles(frequencies_of(32).to(kernel_device), 1.0, kernel_dtype)(inputs.integers(0, 99, 9))
    norms = HeadNorms(inputs.normal(2, 32, dtype=kernel_dtype), EPS)
    given = inputs.normal(9, 12, 32, dtype=kernel_dtype)
    slots = inputs.permutation(12)[:9]
    results = []
    for tile in (
        *(tile for _, tile in TILES),
        Tile(4, 4, 1),
        Tile(1, 16, 2),
        Tile(8, 1, 1, steps=5),
        Tile(2, 2, 1, steps=3),
    ):
        qkv, cache = given.clone(), inputs.poisoned(3, 4, 4, 32, dtype=kernel_dtype)
        ops.rotate_and_store(qkv, rotary, norms, cache, slots, tile=tile)
        results.append((qkv[:, :8], cache.nan_to_num(nan=99.0)))
    for qkv, cache in results[1:]:
        assert_close(qkv, results[0][0], kind="rotation")
        assert_close(cache, results[0][1], kernel_dtype, kind="rotation")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reference_in_every_dtype(dtype):
    generator = torch.Generator().manual_seed(5)
    ops = ROPE.resolve(torch.device("cpu"), dtype, name="reference")
    qkv = torch.randn(6, 8, 16, generator=generator).to(dtype)
    norms = HeadNorms(torch.randn(2, 16, generator=generator).to(dtype), EPS)
    positions, slots = torch.arange(6) + 3, torch.tensor([4, 0, 11, 2])
    expected = expected_qkv(qkv, 2, positions, norms)
    cache = torch.full((3, 4, 4, 16), math.nan, dtype=dtype)
    ops.rotate_and_store(qkv, ops.angles(frequencies_of(16), FACTOR, dtype)(positions), norms, cache, slots)
    assert_close(qkv, expected, kind="rotation")
    assert torch.equal(cache.view(12, 4, 16)[slots], qkv[:4, 4:])
    assert int(cache.isnan().sum()) == 8 * 4 * 16


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True], ids=["by-position", "by-head"])
def test_slots_beyond_32_bits(inputs, kernel_device, by_head):
    """A layer of more than 2³¹ elements."""
    cache = torch.empty(70_000, 16, 16, 128, dtype=torch.bfloat16, device=kernel_device)
    if by_head:
        cache = cache.transpose(1, 2)
    ops = ROPE.resolve(kernel_device, torch.bfloat16, name="triton")
    rotary = ops.angles(frequencies_of(128).to(kernel_device), 1.0, torch.bfloat16)(
        inputs.integers(0, 9000, 3)
    )
    qkv = inputs.normal(3, 48, 128, dtype=torch.bfloat16)
    slots = torch.tensor([70_000 * 16 - 1, 0, 69_000 * 16 + 5], device=kernel_device)
    near = torch.empty(1, 16, 16, 128, dtype=torch.bfloat16, device=kernel_device)
    ops.rotate_and_store(qkv.clone(), rotary, None, near, torch.arange(3, device=kernel_device))
    ops.rotate_and_store(qkv, rotary, None, cache, slots)
    assert torch.equal(cache[slots // 16, slots % 16], near[0, :3])
    assert torch.equal(near[0, :3, 8:], qkv[:, 40:])


def hopper_spec(heads: int, kv_heads: int, head_dim: int, norm: bool, tile: Tile) -> KernelSpec:
    pointers = dict.fromkeys(("qkv", "norm_weight", "cache"), "*bf16") | dict.fromkeys(
        ("cos", "sin"), "*fp32"
    )
    numbers = dict.fromkeys(("block_stride", "position_stride", "head_stride"), "i32") | dict.fromkeys(
        ("eps", "key_factor", "value_factor"), "fp32"
    )
    half = head_dim // 2
    return KernelSpec(
        "oneloop_kernels.ops.rope.triton",
        "rotate_and_store_kernel",
        {**pointers, "slots": "*i64", "num_tokens": "i32", "num_slots": "i32", **numbers},
        {
            "NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HALF_DIM": half, "HALF_BLOCK": half,
            "BLOCK_SIZE": 16, "NORM": norm, "TOKENS": tile.tokens, "HEADS": tile.heads,
            "STEPS": tile.steps, "USE_PDL": True,
        },
        {"num_warps": tile.num_warps(half), "launch_pdl": True},
        unaligned=("num_tokens", "num_slots"),
    )  # fmt: skip


def test_compiled_for_hopper():
    """No register is spilled, nothing goes through shared memory, every access to heads and angles is 16 bytes wide."""
    angles = KernelSpec(
        "oneloop_kernels.ops.rope.triton",
        "angles_kernel",
        {"positions": "*i32", "frequencies": "*fp32", "out": "*fp32", "num_tokens": "i32", "factor": "fp32"},
        {"HALF_DIM": 64, "HALF_BLOCK": 64, "TOKENS": 4, "USE_PDL": True},
        {"num_warps": 4, "launch_pdl": True},
        unaligned=("num_tokens",),
    )
    shapes = ((32, 8, 128, False), (16, 8, 128, True), (9, 3, 64, False))
    wanted = [(shape, tile) for shape in shapes for _, tile in TILES]
    begin = KernelSpec(
        "oneloop_kernels.ops.rope.triton",
        "begin_kernel",
        dict.fromkeys(("positions", "token_ids"), "*i32")
        | dict.fromkeys(("frequencies", "out"), "*fp32")
        | dict.fromkeys(("table", "hidden"), "*bf16")
        | dict.fromkeys(("vocab_size", "row_stride", "size"), "i32")
        | {"factor": "fp32"},
        {"HALF_DIM": 64, "HALF_BLOCK": 64, "PIECE": 1024, "USE_PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    )
    reports = compile_all_for_hopper([*(hopper_spec(*shape, tile) for shape, tile in wanted), begin, angles])
    for ((_, _, head_dim, _), tile), report in zip(wanted, reports[:-2], strict=True):
        assert (report.spilled, report.shared) == (0, 0)
        assert report.registers <= 80
        at_once = (
            tile.tokens * tile.heads * head_dim // 2 // (32 * tile.num_warps(head_dim // 2) * tile.vectors)
        )
        width = {8: r"\.128$", 4: r"\.64$", 2: "$"}[at_once]  # a warp has too few elements for more
        stores = report.count(r"STG\.E" + width)
        assert stores == report.count(r"STG")
        # Two for a query and two for the cache; two where programs may have values alone.
        assert stores in (4 * tile.vectors * tile.steps, 6 * tile.vectors * tile.steps)
        assert report.count(r"LDG\.E" + width) >= 2 * tile.vectors * tile.steps
        if at_once == 8:
            assert report.count(r"LDG\.E\.128$") >= (4 + 2 * tile.steps) * tile.vectors
            assert report.count(r"LDG") == report.count(r"LDG\.E\.128$") + report.count(r"LDG\.E\.64$")
            assert report.count(r"LDG\.E\.64$") <= tile.vectors, "only slots"
    # Beyond 105615 radians an angle is reduced with 2/π in many words, kept in local memory; no other use of it.
    assert max(report.spilled for report in reports[-2:]) <= 64
    assert (reports[-2].count(r"LDG\.E\.128$"), reports[-2].count(r"STG\.E\.128$")) == (1, 1), (
        "rows of the table"
    )
