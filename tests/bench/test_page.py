"""bench/README.md: its tables from the files of bench/results, and how new files are taken over."""

import json

import pytest

from oneloop_bench import sections
from oneloop_bench.page import README, SECTIONS, made_anew, take

MIB = 1 << 20


def row(family, case, us, share, way="oneloop", target=None, reached=None, ceiling="read"):
    return {
        "family": family, "case": case, "way": way, "us": us, "share": share, "ceiling": ceiling,
        "target": target, "reached": reached,
    }  # fmt: skip


def kernels(rows, **more):
    return {
        "bench": "kernels",
        "ceilings": {"read": {"rate": 4443.2, "unit": "GB/s"}, "bf16": {"rate": 735.0, "unit": "TFLOP/s"}},
        "rows": rows,
        "failed": {},
        "utc": "2026-11-30 08:20",
        "machine": {"gpu": "NVIDIA H200"},
        **more,
    }


def gap(model, p50):
    step = {
        "batch": 8, "step_ms": 0.93, "step_ms_p50": 0.925,
        "gap_us": {
            "border": {"p50": p50, "max": 30.0}, "within": {"p50": 52.04, "max": 60.0}, "step_p50": 940.0,
        },
    }  # fmt: skip
    return {"bench": "host_gap", "model": model, "steps": [step]}


def test_the_page_shows_the_newest_results():
    page = README.read_text(encoding="utf-8")
    assert made_anew(page) == page


def test_cases_of_a_kernel_stand_side_by_side():
    decode, share = "decode attention", {"share": 0.85}
    text = sections.kernels(
        kernels(
            [
                row(decode, "llama8b 32x1k", 38.04, 0.85, target=share, reached=True),
                row(decode, "llama8b 1x32k", 140.2, 0.7299, target={"share": 0.75}, reached=False),
                row(decode, "qwen06b 32x1k", 38.5, 0.9, target=share, reached=True),
                row("prefill attention", "llama8b 1x8k", 1234.5, 0.66, ceiling="bf16"),
                row("prefill attention", "llama8b 1x8k", 1300.0, 0.62, way="torch flash", ceiling="bf16"),
                row("sampling", "penalties drawn flat", 101.0, 0.19),
                row("sampling", "penalties flat", 70.0, 0.27),
                row("sampling", "penalties drawn steep", 102.0, 0.19),
                row("sampling", "top_p flat", 130.0, 0.2, target={"us": 100.0}, reached=False),
                row("sampling", "top_p steep", 65.0, 0.3, target={"us": 100.0}, reached=True),
            ]
        )
    )
    assert text.startswith(
        "NVIDIA H200, 2026-11-30 08:20 UTC. Measured ceilings: read 4,443 GB/s, bf16 735 TFLOP/s."
    )
    assert (
        "| decode attention, llama8b | 32x1k / 1x32k | 38.0 / 140 | 85% / 73% of read | ≥ 85% / ≥ 75% "
        "| ✓ / -2.0 points |"
    ) in text
    assert "| prefill attention, llama8b, torch flash | 1x8k | 1,300 | 62% of bf16 | – | – |" in text
    assert "| sampling, top_p | flat / steep | 130 / 65.0 | 20% / 30% of read | ≤ 100 µs | +30% / ✓ |" in text
    assert "| sampling, penalties drawn | flat / steep | 101 / 102 | 19% / 19% of read | – | – |" in text
    assert "| sampling, penalties | flat | 70.0 | 27% of read | – | – |" in text


def test_linear_maps_stand_beside_cublas():
    text = sections.kernels(
        kernels(
            [
                row("GEMM", "llama8b qkv 1 rows", 12.0, 0.93),
                row("GEMM", "llama8b qkv 1 rows", 13.0, 0.82, way="cuBLAS"),
                row("GEMM", "llama8b qkv 512 rows", 50.0, 0.7, way="cuBLAS"),
                row("GEMM", "qwen06b o 1 rows", 2.0, 0.5),
            ],
            failed={"GEMM qwen06b o 1 rows cuBLAS": "no memory"},
        )
    )
    assert "| map, by rows | 1 | 512 |" in text
    assert "| llama8b qkv | 93% / 82% | – / 70% |" in text
    assert "| qwen06b o | 50% / – | – / – |" in text
    assert "Without a figure: GEMM qwen06b o 1 rows cuBLAS: no memory." in text


def test_maps_of_few_bits_have_tables_of_their_own():
    few, many = "llama8b down 1 rows", "llama8b down 256 rows"
    text = sections.kernels(
        kernels(
            [
                row("GEMM of 8 bits", few, 12.0, 0.9),
                row("GEMM of 8 bits", few, 13.0, 0.8, way="by block"),
                row("GEMM of 8 bits", few, 24.0, 0.45, way="bf16"),
                row("GEMM of 4 bits", many, 30.0, 0.6),
                row("GEMM of 4 bits", many, 60.0, 0.3, way="written out"),
                row("GEMM in the fixed order", few, 24.0, 0.7),
                row("GEMM in the fixed order", few, 20.0, 0.84, way="default"),
                row("experts", "qwen30ba3b gate_up 32 tokens", 150.0, 0.95),
                row("experts", "qwen30ba3b gate_up 128 tokens", 200.0, 0.75),
            ]
        )
    )
    for line in ("90% / 80% / 45%", "60% / 30%", "70% / 84%"):
        assert f"| llama8b down | {line} |" in text
    assert (
        "| experts, qwen30ba3b gate_up | 32 tokens / 128 tokens | 150 / 200 | 95% / 75% of read | – | – |"
        in text
    )


def test_gaps_loop_and_memory():
    models = {"models": {"m": gap("m", 2.2), "n": gap("n", 12.0)}}
    text = sections.host_gap(models)
    assert "| m, 8 | 0.93 | 2.2 / 30.0 | ≤ 10 | ✓ | 52.0 | +15 |" in text
    assert "| n, 8 | 0.93 | 12.0 / 30.0 | ≤ 10 | +20% | 52.0 | +15 |" in text
    load = {
        "streams": 512, "wall_us": 10234.0, "loop_us": 2046.8, "busy": 0.2, "other_us": 99.96,
        "parts_us": {"schedule": 30.0, "send": 1500.04},
    }  # fmt: skip
    text = sections.event_loop({"models": {"m": {"loads": [load]}}})
    assert "| streams | a step, µs | the loop's time in it | schedule | send | other |" in text
    assert "| m, 512 | 10,234 | 2,047 (20%) | 30.0 | 1500.0 | 100.0 |" in text
    one = {
        "planned": {"weights": 16000 * MIB, "step_buffers": 3 * MIB},
        "measured": {"weights": 15000 * MIB, "step_buffers": 2 * MIB},
    }
    text = sections.ledger({"models": {"m": one, "n": {"planned": {"slack": MIB}, "measured": {"slack": 0}}}})
    assert "| weights | 16,000 / 15,000 | – / – |" in text
    assert "| all | 16,003 / 15,002 | 1 / 0 |" in text


def test_new_files_replace_their_models_only(tmp_path):
    page, results = tmp_path / "README.md", tmp_path / "results"
    page.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    files = []
    for number, result in enumerate((gap("m", 9.0), gap("n", 8.0), gap("m", 7.0), kernels([]))):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(result))
    picture = tmp_path / "host_gap.svg"
    picture.write_text("<svg/>")
    take([*files, picture], results, page)
    known = json.loads((results / "host_gap.json").read_text())["models"]
    assert [known[model]["steps"][0]["gap_us"]["border"]["p50"] for model in ("m", "n")] == [7.0, 8.0]
    assert (results / "host_gap.svg").read_text() == "<svg/>"
    assert "| m, 8 | 0.93 | 7.0 / 30.0 |" in page.read_text(encoding="utf-8")
    assert made_anew(page.read_text(encoding="utf-8"), results) == page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("result", "why"),
    [({"bench": "ledgers"}, "ledgers is no section"), (kernels([], smoke=True), "a smoke run")],
)
def test_what_does_not_belong_is_refused(tmp_path, result, why):
    file, page = tmp_path / "new.json", tmp_path / "README.md"
    file.write_text(json.dumps(result))
    page.write_text("as it was")
    with pytest.raises(ValueError, match=why):
        take([file], tmp_path / "results", page)
    assert page.read_text() == "as it was"


def test_a_page_without_a_tables_marks_is_refused():
    for section in SECTIONS:
        with pytest.raises(ValueError, match=f"{section.name}: begin"):
            section.put_into("a page", {})
