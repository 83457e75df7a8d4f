"""The kernel table: shares and targets of a row, the cases that the issue asks for, a run without a GPU."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from oneloop_bench.kernels import cases, table
from oneloop_bench.kernels.timing import Timing

CEILINGS = {"read": 4e12, "copy": 2e12, "bf16": 8e14}


def case(**more):
    ways = {"oneloop": lambda: print, "other": lambda: print}
    return cases.KernelCase("family", "name", dict, ways, 4_000_000, "read", **more)


def test_the_share_is_that_of_the_nearer_ceiling():
    row = table.row_of(case(), "oneloop", Timing(2.0, 0.01), CEILINGS)
    assert (row["share"], row["ceiling"], row["gb_s"]) == (0.5, "read", 2000.0)
    assert (row["target"], row["reached"]) == (None, None)
    row = table.row_of(case(num_flops=1.2e9), "oneloop", Timing(2.0, 0.01), CEILINGS)
    assert (row["share"], row["ceiling"], row["tflop_s"]) == (0.75, "bf16", 600.0)
    row = table.row_of(replace(case(), memory="copy"), "oneloop", Timing(2.0, 0.01), CEILINGS)
    assert (row["share"], row["ceiling"]) == (1.0, "copy")


def test_only_ours_has_a_target():
    timing = Timing(1.25, 0.0)  # a share of 80%
    for target, reached in ((0.8, True), (0.85, False)):
        row = table.row_of(case(share=target), "oneloop", timing, CEILINGS)
        assert (row["target"], row["reached"]) == ({"share": target}, reached)
    for target, reached in ((1.25, True), (1.2, False)):
        row = table.row_of(case(us=target), "oneloop", timing, CEILINGS)
        assert (row["target"], row["reached"]) == ({"us": target}, reached)
    row = table.row_of(case(share=0.5), "other", timing, CEILINGS)
    assert (row["target"], row["reached"]) == (None, None)


def test_without_measured_ceilings_nothing_is_claimed():
    row = table.row_of(case(share=0.5, us=1e9), "oneloop", Timing(1.0, 0.0), {})
    assert (row["share"], row["ceiling"], row["target"], row["reached"]) == (None, None, None, None)


def test_all_that_the_issue_asks_for_is_there():
    found = {(one.family, one.name): one for one in cases.all_cases(torch.device("cpu"), small=False)}
    for model in ("llama8b", "qwen06b"):
        for batch in (32, 64, 128, 256):
            assert found["decode attention", f"{model} {batch}x1k"].share == 0.85
        assert found["decode attention", f"{model} 1x32k"].share == 0.75
        assert found["prefill attention", f"{model} 1x8k"].share == 0.65
        for family in ("residual + norm", "rope + KV write", "silu · mul"):
            for num_tokens in (4096, 16384):
                one = found[family, f"{model} {num_tokens} tokens"]
                assert (one.share, one.memory) == (0.85, "copy")
        for num_tokens in (1, 512):
            ways = found["GEMM", f"{model} down {num_tokens} rows"].ways
            assert "cuBLAS" in ways
    assert {one.us for (family, _), one in found.items() if family == "sampling"} == {100.0}
    # Keys and values of 32 contexts of 1,024 tokens, 8 heads of 128 each, and the queries and results of 32 rows.
    assert found["decode attention", "llama8b 32x1k"].num_bytes == 2 * 128 * (16 * 32 * 1024 + 2 * 32 * 32)


def test_what_mixtures_few_bits_and_the_fixed_order_take_is_there_too():
    found = {(one.family, one.name): one for one in cases.all_cases(torch.device("cpu"), small=False)}
    for name in ("qkv", "o", "gate_up", "down"):
        one = found["GEMM of 8 bits", f"llama8b {name} 2048 rows"]
        assert (list(one.ways), one.compute) == (["oneloop", "by block", "bf16"], "fp8")
        assert list(found["GEMM of 4 bits", f"llama8b {name} 16 rows"].ways) == ["oneloop", "written out"]
        assert list(found["GEMM in the fixed order", f"llama8b {name} 1 rows"].ways) == ["oneloop", "default"]
    for name in ("FP8 KV", "fixed order"):
        assert ("decode attention", f"llama8b {name} 256x1k") in found
        assert ("prefill attention", f"llama8b {name} 1x8k") in found
    experts = found["experts", "qwen30ba3b 128 tokens"]
    # All 128 experts: three matrices of 2,048 x 768 each; the router; 128 tokens read and written.
    assert experts.num_bytes == pytest.approx(2 * (3 * 128 * 2048 * 768 + (128 + 256) * 2048), rel=0.001)
    for part in ("route", "gate_up", "down"):
        assert ("experts", f"qwen30ba3b {part} 32 tokens") in found
    assert ("quantised as in GGUF", "llama8b down q4_k 16 rows") in found
    # Half a byte a weight and 2 bytes a group of 128; 16 rows of 14,336 in, of 4,096 out and of as many added.
    packed = found["GEMM of 4 bits", "llama8b down 16 rows"].num_bytes
    assert packed == pytest.approx(14336 * 4096 * (0.5 + 2 / 128) + 2 * 16 * (14336 + 2 * 4096), rel=0.001)
    assert {"scores of tokens", "block copies", "embedding + angles"} <= {family for family, _ in found}
    # As much as in bf16, but for keys and values, of which half as much is read.
    wide, narrow = (found["decode attention", f"llama8b {name}32x1k"].num_bytes for name in ("", "FP8 KV "))
    assert wide - narrow == 128 * 16 * 32 * 1024


def test_a_case_of_8_bits_is_held_against_products_of_8_bits():
    one = cases.KernelCase("f", "c", list, {"oneloop": list}, 1, "read", 4e6, compute="fp8")
    row = table.row_of(one, "oneloop", Timing(2.0, 0.0), CEILINGS | {"fp8": 4e12})
    assert (row["share"], row["ceiling"]) == (0.5, "fp8")


def test_the_table_runs_without_a_gpu(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    table.main(["--smoke", "--only", "residual", "--json", str(file)])
    result = json.loads(file.read_text())
    assert [row["case"] for row in result["rows"]] == ["llama8b 16 tokens", "qwen06b 16 tokens"]
    assert result["smoke"]
    assert result["failed"] == {}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_cases_of_few_bits_and_of_experts_run():
    only = "8 bits llama8b o|4 bits llama8b o|GGUF llama8b down|fixed order llama8b o|experts qwen30ba3b down|scores"
    one = table.Table(table.read_options(["--smoke", "--budget", "200", "--only", only]))
    one.measure(None)
    assert one.failed == {}
    ways = [(row["family"], row["way"]) for row in one.rows]
    assert ways == [
        *[("scores of tokens", "oneloop")] * 2,
        ("experts", "oneloop"),
        *[("GEMM of 8 bits", way) for way in ("oneloop", "by block", "bf16")],
        *[("GEMM of 4 bits", way) for way in ("oneloop", "written out")],
        ("quantised as in GGUF", "oneloop"),
        *[("GEMM in the fixed order", way) for way in ("oneloop", "default")],
    ]


def test_what_fails_or_passes_the_budget_is_said(monkeypatch):
    def refuse(_inputs):
        raise RuntimeError("does not fit")

    def all_cases(_device, *, small):
        assert small
        ways = {"oneloop": lambda: refuse, "cuBLAS": lambda: partial(sorted)}
        yield cases.KernelCase("GEMM", "m o 1 rows", lambda: [2, 1], ways, 4, "read")

    def without_inputs(_device, *, small):
        def make():
            raise MemoryError("too large")

        yield cases.KernelCase("GEMM", "m o 1 rows", make, {"oneloop": lambda: sorted}, 4, "read")

    monkeypatch.setattr(cases, "all_cases", all_cases)
    one = table.Table(table.read_options(["--smoke"]))
    one.measure(None)
    assert [row["way"] for row in one.rows] == ["cuBLAS"]
    assert one.failed == {"GEMM m o 1 rows oneloop": "RuntimeError('does not fit')"}
    monkeypatch.setattr(cases, "all_cases", without_inputs)
    one = table.Table(table.read_options(["--smoke"]))
    one.measure(None)
    assert one.failed == {"GEMM m o 1 rows oneloop": "MemoryError('too large')"}
    monkeypatch.setattr(cases, "all_cases", all_cases)
    late = table.Table(table.read_options(["--smoke", "--budget", "0"]))
    late.measure(None)
    assert late.rows == []
    assert "left out" in late.failed["GEMM m o 1 rows"]
