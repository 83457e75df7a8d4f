"""Picking implementations."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.kv_cache import KV_CACHE
from oneloop_kernels.ops.linear import LINEAR
from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION
from oneloop_kernels.ops.rms_norm import RMS_NORM
from oneloop_kernels.ops.rope import ROPE
from oneloop_kernels.ops.sampling import SAMPLING
from oneloop_kernels.ops.silu_mul import SILU_MUL
from oneloop_kernels.registry import Family, Implementation, KernelError

CPU = torch.device("cpu")
FAMILIES = [KV_CACHE, LINEAR, PAGED_ATTENTION, RMS_NORM, ROPE, SAMPLING, SILU_MUL]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_a_reference_for_every_device_and_type(family):
    for device in ("cpu", "cuda", "meta"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert "reference" in family.candidates(torch.device(device), dtype)
    assert family.resolve(CPU, torch.float32, name="reference") is not None


def test_the_first_that_runs_there_is_picked():
    family: Family[object] = Family(
        "powers",
        (
            Implementation("gpu", "no.such.module", "x", frozenset({"cuda"})),
            Implementation("short", "math", "pi", frozenset(), frozenset({"bfloat16"})),
            Implementation("plain", "math", "e"),
        ),
    )
    assert family.candidates(CPU, torch.float32) == ("plain",)
    assert family.candidates(torch.device("cuda"), torch.bfloat16) == ("gpu", "short", "plain")
    assert family.resolve(CPU, torch.bfloat16) == pytest.approx(3.14159, abs=1e-4)
    assert family.resolve(CPU, torch.float32) == pytest.approx(2.71828, abs=1e-4)
    with pytest.raises(KernelError, match=r"powers: no implementation 'gpu' for torch.float32 on cpu"):
        family.resolve(CPU, torch.float32, name="gpu")
