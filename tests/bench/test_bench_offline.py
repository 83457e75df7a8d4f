"""`oneloop bench throughput`, `latency` and `startup` with a tiny model: what they tell adds up."""

import json

import pytest

from oneloop_bench.commands.main import main
from oneloop_bench.start import KERNEL_CACHES, kernel_caches, measure_start, read_parts

DUMMY = ("--load-format", "dummy", "--device", "cpu")


@pytest.fixture
def bench(tiny_model, tmp_path):
    """Runs a command with the tiny model; its result."""

    def run(command, *options):
        out = tmp_path / "out.json"
        assert main([command, str(tiny_model), *DUMMY, "--output-json", str(out), *options]) == 0
        return json.loads(out.read_text())

    return run


def test_throughput(bench, capsys):
    found = bench(
        "throughput", "--num-prompts", "9", "--input-len", "20", "--output-len", "6", "--disable-tqdm"
    )
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (9, 180, 54)
    assert found["total_num_tokens"] == 234
    assert found["tokens_per_second"] == pytest.approx(234 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(54 / found["elapsed_time"])
    assert found["requests_per_second"] == pytest.approx(9 / found["elapsed_time"])
    assert "output tokens/s" in capsys.readouterr().out


def test_throughput_of_other_workloads(bench, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 3}\n{"prompt": [1, 2], "output_tokens": 4}\n')
    custom = ("--dataset-name", "custom", "--dataset-path", str(path))
    found = bench("throughput", *custom, "--num-prompts", "4", "--disable-tqdm")
    assert (found["total_prompt_tokens"], found["total_output_tokens"]) == (14, 14)


def test_workloads_that_need_a_server(tiny_model, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["throughput", str(tiny_model), *DUMMY, "--dataset-name", "multi_turn"])
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    custom = ("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "1")
    assert main(["throughput", str(tiny_model), *DUMMY, *custom]) == 2
    assert "invalid choice: 'multi_turn'" in (err := capsys.readouterr().err)
    assert "conversations are for `bench serve`" in err
    with pytest.raises(SystemExit):
        main(["throughput", "--help"])
    assert "multi_turn" not in (out := capsys.readouterr().out)
    assert "multi-turn" not in out


def test_latency(bench, capsys):
    found = bench("latency", "--input-len", "8", "--output-len", "4", "--batch-size", "2", "--num-iters", "3",
                  "--num-iters-warmup", "1")  # fmt: skip
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == pytest.approx(sorted(found["latencies"])[1])
    assert "Avg latency:" in capsys.readouterr().out


def test_parts_of_a_start_are_read_from_its_log():
    log = "x\n12:00:01 INFO oneloop: ready after 8.50 s: process 0.21, import torch 3.30, KV cache 0.01\nserving\n"
    assert read_parts(log) == {"process": 0.21, "import torch": 3.3, "KV cache": 0.01}
    with pytest.raises(RuntimeError, match="did not log"):
        read_parts("serving")


def test_kernel_caches_are_new_and_go():
    with kernel_caches() as first, kernel_caches() as second:
        assert set(first) == set(KERNEL_CACHES)
        assert not set(first.values()) & set(second.values())


def test_startup(tiny_model, capsys):
    options = ("--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    assert main(["startup", "--model", str(tiny_model), *options, "--", *DUMMY]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert lines[0].startswith("warm 1: ready after")
    assert {"process", "import torch", "weights"} <= found["avg_warm_parts"].keys()
    assert 0 < found["avg_warm_startup_time"] <= found["avg_warm_first_answer_time"]
    assert found["warm_startup_times"] == [found["avg_warm_startup_time"]]
    assert "avg_cold_startup_time" not in found


def test_a_start_that_fails_shows_its_log(tiny_model):
    with pytest.raises(RuntimeError, match=r"ended with exit code[\s\S]*max_model_len"):
        measure_start((*DUMMY, "--max-model-len", "100000000"), model=str(tiny_model))
