"""Picking implementations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from oneloop_kernels import registry
from oneloop_kernels.launch import num_sms, one_after_another, pdl_options, pdl_supported
from oneloop_kernels.ops.kv_cache import KV_CACHE
from oneloop_kernels.ops.linear import LINEAR
from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION
from oneloop_kernels.ops.rms_norm import RMS_NORM
from oneloop_kernels.ops.rope import ROPE
from oneloop_kernels.ops.sampling import SAMPLING
from oneloop_kernels.ops.silu_mul import SILU_MUL
from oneloop_kernels.registry import Family, Implementation, KernelError, prefer

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


def family_with_triton() -> Family[object]:
    return Family(
        "powers",
        (
            Implementation("triton", "math", "pi", frozenset({"cuda"}), frozenset({"float16", "float32"})),
            Implementation("reference", "math", "e"),
        ),
    )


def test_the_interpreter_takes_triton_on_the_cpu_where_it_is_preferred(monkeypatch):
    monkeypatch.setattr(registry, "INTERPRETED", True)
    family = family_with_triton()
    assert family.candidates(CPU, torch.float32) == ("reference",)
    with prefer("triton"):
        assert family.candidates(CPU, torch.float32) == ("triton", "reference")
        assert family.resolve(CPU, torch.float32) == pytest.approx(3.14159, abs=1e-4)
        assert family.candidates(CPU, torch.bfloat16) == ("reference",)
        with prefer("reference"):
            assert family.candidates(CPU, torch.float32) == ("reference",)
            assert family.candidates(torch.device("cuda"), torch.float32) == ("reference", "triton")
    assert family.candidates(CPU, torch.float32) == ("reference",)
    assert family.resolve(CPU, torch.float32, name="triton") == pytest.approx(3.14159, abs=1e-4)


def test_without_the_interpreter_triton_stays_on_the_gpu():
    code = (
        "import torch\n"
        "from oneloop_kernels.registry import Family, Implementation, prefer\n"
        "family = Family('powers', (Implementation('triton', 'math', 'pi', frozenset({'cuda'})),\n"
        "    Implementation('reference', 'math', 'e')))\n"
        "with prefer('triton'):\n"
        "    assert family.candidates(torch.device('cpu'), torch.float32) == ('reference',)\n"
        "    assert family.candidates(torch.device('cuda'), torch.float32) == ('triton', 'reference')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


def test_no_triton_is_imported_by_contracts_and_references():
    code = (
        "import sys, torch\n"
        "from oneloop_kernels import launch, registry\n"
        + "".join(
            f"from oneloop_kernels.ops.{f.name} import {f.name.upper()} as F\n"
            "F.resolve(torch.device('cpu'), torch.float32)\n"
            for f in FAMILIES
        )
        + "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_on_the_cpu_kernels_run_in_plain_order():
    assert not pdl_supported(CPU)
    assert dict(pdl_options(CPU)) == {"USE_PDL": False}
    assert num_sms(CPU) > 1


def test_what_has_just_been_written_is_waited_for(monkeypatch):
    monkeypatch.setattr("oneloop_kernels.launch.pdl_supported", lambda device: True)
    overlapping = {"USE_PDL": True, "launch_pdl": True}
    assert dict(pdl_options(CPU)) == overlapping
    with one_after_another():
        assert dict(pdl_options(CPU)) == {"USE_PDL": False}
    assert dict(pdl_options(CPU)) == overlapping
