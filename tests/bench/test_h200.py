"""The H200 table: what is read out of the drivers' results, and what is kept of older ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oneloop_bench.h200 import groups
from oneloop_bench.page import README, merge_parts, take
from oneloop_bench.table import FIGURES, markdown

FAKE_OFFLINE = """
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
names = arguments["--only"].split(",")
results = {name: {"seconds": 7.25} for name in names}
results[names[-1]] = "Traceback: out of memory"
with open(arguments["--out"], "w") as file:
    times = {"start_s": 1.0, "start_incl_import_s": 2.0, "first_generate_s": 0.1}
    json.dump({"results": results, "info": {}, **times}, file)
"""


def steps(batches, ms):
    return [{"bs": bs, "rep": rep, "cached_step_ms": ms + rep} for bs in batches for rep in (0, 1)]


def run(**parts):
    return {"offline": {}, "online": {}, "start": {}, "failed": {}, **parts}


def line(results, name):
    return next(row for row in markdown(results).splitlines() if row.startswith(f"| {name}"))


def test_every_figure_has_as_many_values_as_the_peer():
    for figure in FIGURES:
        assert len(figure.peer) == len(figure.target)
        assert len(figure.more_is_better) in (0, len(figure.peer))
        values = figure.read({})
        assert len(values) == len(figure.peer)
        assert set(values) == {None}


def test_values_and_distances():
    results = run(
        offline={
            "qwen06b": {
                "step_512in": steps([1, 8, 64, 256, 512], 0.5),
                "batch_2000x128in_256out": {"seconds": 9.0},
            }
        },
        online={
            "qwen06b_conc512": {"out_tok_s": 64000.4, "ttft_ms": {"p99": 330.0}, "itl_ms": {"p99": 19.0}}
        },
    )
    assert "| 1.00 / 1.00 / 1.00 / 1.00 / 1.00 |" in line(results, "qwen06b decode")
    assert "| +25% / +5% / ✓ / ✓ / ✓ |" in line(results, "qwen06b decode")
    assert "| 22.3 | 9.0 | 7.5 | +20% | 4.5 |" in line(results, "qwen06b 2000")
    assert "| 64,000 / 330 / 19 | 64,000 / 300 / 20 | ✓ / +10% / ✓ |" in line(results, "online qwen06b")
    assert "| 28.6 | – | 25.0 | – | 21.0 |" in line(results, "llama8b 512")


def test_a_newer_run_replaces_what_it_measured():
    known = run(offline={"llama8b": {"a": 1, "b": 2}}, start={"llama8b": {"cold_s": 50.0, "warm_s": 20.0}})
    merge_parts(known, run(offline={"llama8b": {"b": 3}, "qwen06b": {"c": 4}}, online={"x": {}}))
    assert known["offline"] == {"llama8b": {"a": 1, "b": 3}, "qwen06b": {"c": 4}}
    assert known["start"] == {"llama8b": {"cold_s": 50.0, "warm_s": 20.0}}
    assert known["online"] == {"x": {}}


def test_files_are_merged_into_results_and_page(tmp_path):
    results, readme, newer = tmp_path / "results", tmp_path / "README.md", tmp_path / "new.json"
    readme.write_text(README.read_text())
    newer.write_text(json.dumps(run(start={"llama8b": {"cold_s": 31.04, "warm_s": 11.0}})))
    take([newer], results, readme)
    assert json.loads((results / "h200.json").read_text())["start"]["llama8b"]["cold_s"] == 31.04
    assert "| 89.0 / – | 31.0 / 11.0 | 30.0 / 12.0 | +3% / ✓ |" in readme.read_text()


def test_parts_of_one_engine_are_run_together():
    parts = ["offline:a:x", "offline:a:y", "online:b_1", "online:b_2", "offline:a", "start:a"]
    assert list(groups(parts)) == [
        ("offline", "a", ["x", "y"]),
        ("online", "b", ["b_1", "b_2"]),
        ("offline", "a", []),
        ("start", "a", []),
    ]
    with pytest.raises(ValueError, match="a part is"):
        list(groups(["llama8b"]))


def test_failures_are_kept_apart_and_the_budget_holds(tmp_path):
    (tmp_path / "bench_offline.py").write_text(FAKE_OFFLINE)
    out = tmp_path / "out/h200.json"
    command = [sys.executable, "-m", "oneloop_bench.h200", "--out", str(out), "--budget"]
    parts = ["--only", "offline:m:one,offline:m:two"]
    environment = {"ONELOOP_ANCHORS": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([*command, "100", *parts], check=True, env=environment, capture_output=True, timeout=60)
    found = json.loads(out.read_text())
    assert found["offline"]["m"]["one"] == {"seconds": 7.25}
    assert "two" not in found["offline"]["m"]
    assert found["failed"] == {"offline:m:two": "Traceback: out of memory"}
    subprocess.run([*command, "10", *parts], check=True, env=environment, capture_output=True, timeout=60)
    found = json.loads(out.read_text())
    assert found["offline"] == {}
    assert "left out" in found["failed"]["offline:m"]


def test_the_adapter_serves_the_driver(tiny_model: Path):
    from oneloop_bench.anchors import OneloopEngine

    engine = OneloopEngine(str(tiny_model), 128, 0.5, num_gpu_blocks_override=64)
    prompts = [list(range(20, 60)), list(range(20, 61))]
    first = engine.generate(prompts, 5, 0.0, True)
    assert [len(ids) for ids in first] == [5, 5]
    assert engine.reset_cache()
    assert engine.generate(prompts, 5, 0.0, False) == first
    assert engine.info()["model"]["max_model_len"] == 128
