"""The H200 table: what is read out of the drivers' results, and what is kept of older ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oneloop_bench import determinism
from oneloop_bench.h200 import groups
from oneloop_bench.page import README, merge_parts, take
from oneloop_bench.table import FIGURES, markdown
from oneloop_bench.variants import VARIANTS

FAKE_OFFLINE = """
import json, os, sys
sys.path.insert(0, os.path.dirname(__file__))
import workloads
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = json.load(open(os.path.join(arguments["--model-dir"], "config.json")))
figures = {
    "seconds": 7.25, "config": config, "files": sorted(os.listdir(arguments["--model-dir"])),
    "settings": json.loads(os.environ["ONELOOP_BENCH_SETTINGS"]), "batches": workloads.OFFLINE["m"][0]["bs"],
}
results = {name: figures for name in arguments["--only"].split(",") if name != "slow"}
if "two" in results:
    results["two"] = "Traceback: out of memory"
with open(arguments["--out"], "w") as file:
    times = {"start_s": 1.0, "start_incl_import_s": 2.0, "first_generate_s": 0.1}
    json.dump({"results": results, "info": {}, **times}, file)
"""
FAKE_WORKLOADS = 'OFFLINE = {"m": [{"name": "one", "bs": [1, 8]}, {"name": "two", "n": 4}]}'


def steps(batches, ms):
    return [
        {"bs": bs, "rep": rep, "cached_step_ms": ms + rep, "prefill_tok_s": 1000.0 * bs + 500 * rep}
        for bs in batches
        for rep in (0, 1)
    ]


def run(**parts):
    kinds = ("offline", "online", "start", "determinism", "agreement", "failed")
    return {key: {} for key in kinds} | parts


@pytest.fixture
def measure(tmp_path):
    """Factory: options of h200.py → what it writes, with drivers that measure nothing."""
    for name, text in (("bench_offline", FAKE_OFFLINE), ("workloads", FAKE_WORKLOADS)):
        (tmp_path / f"{name}.py").write_text(text)
    folder = tmp_path / "models/m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    environment = {"ONELOOP_ANCHORS": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}

    def call(*options):
        out = tmp_path / "out/h200.json"
        command = [sys.executable, "-m", "oneloop_bench.h200", "--out", str(out), *options]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=60)
        return json.loads(out.read_text())

    return call


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


def test_it_is_kept_when_each_workload_was_measured():
    known = run(offline={"m": {"a": 1, "b": 2, "measured": {"a": {"utc": "1"}, "b": {"utc": "1"}}}})
    merge_parts(known, run(offline={"m": {"b": 3, "measured": {"b": {"utc": "2"}}}}))
    measured = {"a": {"utc": "1"}, "b": {"utc": "2"}}
    assert known["offline"]["m"] == {"a": 1, "b": 3, "measured": measured}


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


def test_failures_are_kept_apart_and_the_budget_holds(measure):
    parts = ["--only", "offline:m:one,offline:m:two,offline:m:slow"]
    found = measure("--budget", "100", *parts)
    assert found["offline"]["m"]["one"]["seconds"] == 7.25
    assert {"two", "slow"}.isdisjoint(found["offline"]["m"])
    assert found["failed"]["offline:m:two"] == "Traceback: out of memory"
    assert "cut short" in found["failed"]["offline:m:slow"]
    found = measure("--budget", "10", *parts)
    assert found["offline"] == {}
    assert "left out" in found["failed"]["offline:m"]


def test_a_model_as_it_is(measure):
    found = measure("--only", "offline:m:one")["offline"]["m"]
    one = found["one"]
    assert (one["config"], one["settings"], one["batches"]) == ({"model_type": "llama"}, {}, [1, 8])
    assert found["measured"]["one"]["command"] == "python -m oneloop_bench.h200 --only offline:m:one"
    assert found["measured"]["one"]["cores"] >= 1


def test_a_variant_has_settings_files_and_batches_of_its_own(measure):
    found = measure("--only", "offline:m+fp8:one,offline:m+w4a16:one", "--settings", '{"block_size": 32}')
    fp8, w4a16 = (found["offline"][label]["one"] for label in ("m+fp8", "m+w4a16"))
    assert fp8["settings"] == {"quantization": "fp8", "kv_cache_dtype": "fp8", "block_size": 32}
    assert (fp8["config"], fp8["batches"]) == ({"model_type": "llama"}, [1, 256])
    assert (w4a16["settings"], w4a16["batches"]) == ({"block_size": 32}, [1, 16])
    assert w4a16["config"]["model_type"] == "llama"
    assert w4a16["config"]["quantization_config"]["quant_method"] == "gptq"
    assert w4a16["files"] == ["config.json", "tokenizer.json"]
    chosen = measure("--only", "offline:m+fp8:one", "--batch", "4")["offline"]["m+fp8"]
    assert chosen["one"]["batches"] == [4]
    assert chosen["measured"]["one"]["command"].endswith("offline:m+fp8:one --batch 4")


def test_the_variants_config_is_one_that_the_engine_reads(tmp_path):
    from oneloop.formats.json_values import JsonValues
    from oneloop.formats.quantization.config import chosen_quantization, read_quantization

    for name, variant in VARIANTS.items():
        config = {"model_type": "llama", **variant.config}
        found = read_quantization(JsonValues("config.json", config))
        chosen = chosen_quantization(found, variant.settings.get("quantization"), name)
        assert (chosen is None) == (name == "steps8k")
    scheme = read_quantization(JsonValues("config.json", dict(VARIANTS["w4a16"].config))).scheme
    assert (scheme.layout, scheme.group_size, scheme.zero_points, scheme.act_order) == (
        "gptq",
        128,
        False,
        False,
    )


def test_variants_that_are_not_there_are_refused():
    for part, why in (("offline:m+fp7", "'fp7' is no variant"), ("start:m+fp8", "only offline parts")):
        with pytest.raises(ValueError, match=why):
            list(groups([part]))


def mode_rows(speed):
    times = {"default_ms": 4.0, "deterministic_ms": 4.0 / speed, "speed": speed}
    return [{"batch": 1, "context": 8, **times}, {"prefill": 2048, "context": 8, **times}]


def test_what_the_deterministic_mode_costs_is_told(tmp_path):
    results, readme, newer = tmp_path / "results", tmp_path / "README.md", tmp_path / "new.json"
    readme.write_text(README.read_text())
    agreement = {"mode": "default", "batch": 8, "answers": 48, "equal": 0.5, "same_tokens": 7.25}
    for rows in (mode_rows(0.8), [agreement], mode_rows(0.95)):
        newer.write_text(json.dumps({"bench": "determinism", "model": "llama8b", "results": rows}))
        take([newer], results, readme)
    page, known = readme.read_text(), json.loads((results / "h200.json").read_text())
    assert "| – | 0.950 / – / – | 0.900 / 0.900 / 0.900 | ✓ / – / – |" in line(known, "deterministic mode")
    assert "| llama8b, decode, batch 1 | 4.00 | 4.21 | 95.0% |" in page
    assert "| llama8b, prefill, 2,048 tokens | 4.00 | 4.21 | 95.0% |" in page
    assert "| llama8b, 8 | default | 50.0% of 48 | 7.2 |" in page


def test_prompts_per_second_are_those_of_the_best_batch():
    rows = steps([1, 256], 3.0)
    results = run(offline={"llama8b+fp8": {"step_1024in": rows}, "qwen06b": {"step_512in": rows}})
    assert "| 3.50 / 3.50 / 256,250 | 2.80 / 9.50 / 62,000 | +25% / ✓ / ✓ |" in line(results, "llama8b FP8")
    assert "| – / 256,250 / – | – | – | – |" in line(results, "prefill, tok/s")


def test_the_adapter_serves_the_driver(tiny_model: Path):
    from oneloop_bench.anchors import OneloopEngine

    engine = OneloopEngine(str(tiny_model), 128, 0.5, num_gpu_blocks_override=64)
    prompts = [list(range(20, 60)), list(range(20, 61))]
    first = engine.generate(prompts, 5, 0.0, True)
    assert [len(ids) for ids in first] == [5, 5]
    assert engine.reset_cache()
    assert engine.generate(prompts, 5, 0.0, False) == first
    assert engine.info()["model"]["max_model_len"] == 128


def test_agreement_is_measured_and_told_on_the_page(tiny_model, tmp_path):
    """From the bench to the page, on a CPU, which has the default mode alone."""
    out, results, readme = tmp_path / "agreement.json", tmp_path / "results", tmp_path / "README.md"
    settings = {"device": "cpu", "dtype": "float32", "deterministic_requests": False, "max_model_len": 128}
    arguments = ["--agreement", "6", "--batch", "2,6", "--tokens", "8", "--context", "40"]
    determinism.main([str(tiny_model), *arguments, "--settings", json.dumps(settings), "--json", str(out)])
    found = json.loads(out.read_text())
    assert [(row["mode"], row["batch"], row["answers"]) for row in found["results"]] == [
        ("default", 2, 6),
        ("default", 6, 6),
    ]
    assert all(0 <= row["equal"] <= 1 for row in found["results"])
    shutil.copy(README, readme)
    take([out], results, readme)
    assert (
        f"| {tiny_model.name}, 6 | default | {found['results'][1]['equal']:.1%} of 6 |" in readme.read_text()
    )
