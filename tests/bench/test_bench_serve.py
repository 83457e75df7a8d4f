"""`oneloop bench serve` and `compare` as users run them, against a server with faults."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from oneloop_bench.commands.main import main
from oneloop_bench.load.metrics import Selection
from oneloop_bench.load.processes import Outcome
from oneloop_bench.load.record import Record
from oneloop_bench.load.result import ABOUT_FIELDS, load, make_result, text
from oneloop_bench.load.workload import CHAT_PATH
from oneloop_bench.server import free_port

SMALL = ("--num-prompts", "6", "--input-len", "5", "--output-len", "4", "--disable-tqdm")


@pytest.fixture
def serve(fake, tmp_path, capsys):
    """Runs the command; (exit code, results by file name, what it printed)."""

    def run(*arguments):
        folder = tmp_path / "results"
        saving = ("--save-result", "--result-dir", str(folder))
        code = main(["serve", "--port", str(fake.port), *SMALL, *saving, *arguments])
        files = sorted(folder.glob("*.json")) if folder.exists() else []
        return code, {path.name: json.loads(path.read_text()) for path in files}, capsys.readouterr()

    return run


def only(results):
    (result,) = results.values()
    return result


def test_a_run(serve, fake):
    code, results, printed = serve("--strict")
    assert code == 0
    result = only(results)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 0, 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 24)
    assert (result["model_id"], result["backend"], result["request_rate"]) == ("fake-model", "openai", "inf")
    assert result["checks"] == {"checked": 6, "failed": 0, "problems": {}}
    assert result["p99_ttft_ms"] > 0
    assert "All checks held on 6 replies." in printed.out
    body = fake.bodies[0]
    assert len(body["prompt"]) == 5
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_strict_fails_where_a_check_does(serve):
    broken = ("--extra-body", '{"fault": "no done"}')
    code, results, printed = serve(*broken)
    assert code == 0
    assert only(results)["checks"] == {"checked": 6, "failed": 6, "problems": {"done": 6}}
    assert "6 of 6 replies failed a check: done 6" in printed.out
    assert serve(*broken, "--strict")[0] == 1


def test_failed_requests(serve):
    code, results, printed = serve("--extra-body", '{"fault": "500"}')
    assert code == 1, "nothing at all came"
    assert only(results)["failed"] == 6
    assert "6 requests failed: status 500" in printed.out


def test_failures_that_differ_in_ids_alone_are_one_and_the_remedy_is_named(serve):
    fault = ("--extra-body", '{"fault": "each its own 400"}')
    _, results, printed = serve(*fault, "--save-detailed")
    assert list(only(results)["error_messages"].values()) == [6]
    assert len(set(only(results)["errors"])) == 6
    (line,) = [line for line in printed.out.splitlines() if "failed: " in line]
    assert line.startswith("6 requests failed: status 400: ")
    assert "--token-id-range" in line
    code, _, printed = serve(*fault, "--num-warmups", "2")
    assert code == 1
    assert "--token-id-range" in printed.err


def test_failures_of_different_kinds_are_told_apart():
    errors = ["status 400: no", "status 500: no", "cut at 12", "cut at 13", "cut before 13"]
    records = [Record(place, 0.0, error=error) for place, error in enumerate(errors)]
    found = make_result({"max_concurrency": None}, Outcome(records, 0.0, [0.0]), Selection(), detailed=False)
    assert found["error_messages"] == {
        "cut at 12": 2, "status 400: no": 1, "status 500: no": 1, "cut before 13": 1,
    }  # fmt: skip
    assert "1 request failed: cut before 13" in text({**dict.fromkeys(ABOUT_FIELDS), **found})


@pytest.mark.parametrize(
    ("vocab_size", "low", "high"), [(None, 1000, 30_000), (128_000, 1000, 30_000), (258, 8, 241), (1, 0, 1)]
)
@pytest.mark.parametrize("named", [(), ("--model", "fake-model"), ("--model", "other")])
def test_ids_are_of_the_vocabulary_that_the_server_tells(serve, fake, vocab_size, low, high, named):
    fake.card["vocab_size"] = vocab_size
    assert serve("--input-len", "300", *named)[0] == 0
    ids = {token for body in fake.bodies for token in body["prompt"]}
    assert low <= min(ids) <= max(ids) < high
    assert max(ids) >= high // 2


def test_a_model_that_is_named_is_not_asked_about_without_need(serve, fake):
    fake.card["vocab_size"] = 258
    serve("--model", "fake-model", "--token-id-range", "1000:2000")
    serve("--model", "fake-model", "--prompt-form", "text")
    assert fake.num_looks == 0
    assert min(min(body["prompt"]) for body in fake.bodies[:6]) >= 1000


def test_chat(serve, fake):
    code, results, _ = serve(
        "--backend", "openai-chat", "--header", "Authorization=Bearer k=1", "X-Y=z", "--strict"
    )
    assert (code, only(results)["backend"]) == (0, "openai-chat")
    assert all(f"POST {CHAT_PATH} " in head for head in fake.heads)
    assert "Authorization: Bearer k=1\r\nX-Y: z\r\n" in fake.heads[0]
    assert len(fake.bodies[0]["messages"][0]["content"].split()) == 5


def test_whole_replies(serve):
    code, results, _ = serve("--disable-stream", "--strict")
    assert code == 0
    assert only(results)["mean_ttft_ms"] is None
    assert only(results)["mean_e2el_ms"] > 0


def test_request_fields(serve, fake):
    options = (
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--no-ignore-eos",
        "--extra-body",
        '{"n": 1, "user": "u"}',
    )
    assert serve(*options, "--model", "other")[0] == 0
    body = fake.bodies[0]
    assert {key: body[key] for key in ("temperature", "top_k", "n", "user", "model")} == {
        "temperature": 0.5, "top_k": 3, "n": 1, "user": "u", "model": "other",
    }  # fmt: skip
    assert "ignore_eos" not in body


def test_several_loads_and_a_picture(serve, fake, tmp_path):
    picture = tmp_path / "latency.png"
    options = (
        "--max-concurrency",
        "1,3",
        "--label",
        "x",
        "--plot",
        str(picture),
        "--result-filename",
        "run.json",
    )
    code, results, _ = serve(*options, "--metadata", "gpu=H200", "--metric-percentiles", "25,99.9")
    assert code == 0
    assert list(results) == ["run-infqps-concurrency1.json", "run-infqps-concurrency3.json"]
    first, second = results.values()
    assert (first["max_concurrent_requests"], second["max_concurrent_requests"]) == (1, 3)
    assert first["gpu"] == "H200"
    assert {"p25_itl_ms", "p99.9_itl_ms"} <= first.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [body["prompt"] for body in fake.bodies[:6]] == [body["prompt"] for body in fake.bodies[6:]]


def test_lines_of_results(serve, tmp_path):
    options = ("--append-result", "--result-filename", "all.jsonl")
    serve(*options, "--request-rate", "500,1000", "--burstiness", "0.5")
    serve(*options, "--goodput", "ttft:10000", "e2el:0")
    found = load(tmp_path / "results/all.jsonl")
    assert [result["request_rate"] for result in found] == [500.0, 1000.0, "inf"]
    assert [result["request_goodput"] for result in found] == [None, None, 0.0]


def test_warm_ups_are_not_counted(serve, fake):
    _, results, _ = serve("--num-warmups", "3", "--client-processes", "2", "--max-concurrency", "2")
    assert only(results)["completed"] == 6
    assert only(results)["client"]["processes"] == 2
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == len(prompts) == 9


def test_seeds(serve, fake):
    for seed in ("1", "1", "2"):
        serve("--seed", seed, "--max-concurrency", "1")
    prompts = [body["prompt"] for body in fake.bodies]
    assert prompts[:6] == prompts[6:12]
    assert prompts[:6] != prompts[12:]


@pytest.mark.parametrize(
    ("options", "num_requests"),
    [
        (("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2"), 6),
        (("--dataset-name", "multi_turn", "--multi-turn-num-turns", "3", "--backend", "openai-chat"), 6),
        (("--dataset-name", "sharegpt"), 6),
        (("--tokenizer", "smollm2"), 6),
        (("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "500"), 6),
    ],
)
def test_workloads(serve, fake, options, num_requests):
    code, results, _ = serve(*options, "--strict")
    assert code == 0
    assert len(fake.bodies) == only(results)["num_prompts"] == num_requests


def test_a_trace_says_when(serve, tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 4, "output_length": 2} for at in (0, 150, 300)]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = (
        "--dataset-name",
        "timed_trace",
        "--dataset-path",
        str(path),
        "--timed-trace-sec-multiplier",
        "0.001",
    )
    _, results, _ = serve(*trace, "--save-detailed", "--result-filename", "timed.json")
    starts = results["timed.json"]["start_times"]
    assert [round(start, 1) for start in starts] == [0.0, 0.1, 0.3] or starts == pytest.approx(
        [0, 0.15, 0.3], abs=0.08
    )
    assert results["timed.json"]["num_prompts"] == 3
    _, results, _ = serve(*trace, "--no-self-timed", "--result-filename", "at_once.json")
    assert results["at_once.json"]["duration"] < 0.25


WRONG = [
    (("--request-rate", "0"), "--request-rate"),
    (("--ramp-up-strategy", "linear"), "--ramp-up-strategy needs"),
    (("--ramp-up-start-rps", "1"), "need a --ramp-up-strategy"),
    (("--goodput", "ttft=5"), "--goodput"),
    (("--goodput", "ttft:x"), "could not convert"),
    (("--header", "nothing"), "--header"),
    (("--dataset-name", "custom"), "--dataset-path"),
    (("--dataset-path", "x"), "--dataset-path"),
    (("--backend", "openai", "--endpoint", CHAT_PATH), "--backend openai does not go with --endpoint"),
    (("--backend", "openai-chat", "--prompt-form", "ids"), "--prompt-form ids"),
    (("--self-timed",), "--self-timed: this workload has no timestamps"),
    (("--percentile-metrics", "ttft,x"), "--percentile-metrics"),
    (("--base-url", "ftp://x"), "is no http:// or https:// address"),
    (("--request-rate", "1,nan"), "--request-rate"),
    (("--extra-body", '{"stream": false}'), "--disable-stream"),
    (("--header", "A=日本"), "cannot be part of a request's head"),
    (("--endpoint", "/v1/a b"), "has a space"),
    (("--metadata", "completed=7"), "--metadata: completed is a field"),
    (("--metadata", "ramp_up_strategy=x"), "--metadata: ramp_up_strategy is a field"),
    (("--metadata", "my_ttft_ms=x"), "--metadata: my_ttft_ms is a field"),
    (("--label", "\udcff"), "label: '\\udcff' is not UTF-8"),
    (("--plot", "picture.abc"), "--plot: picture.abc ends with none of"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_cannot_work(serve, fake, options, message):
    code, results, printed = serve(*options)
    assert (code, results) == (2, {})
    assert printed.err.startswith("oneloop bench serve: error: ")
    assert message in printed.err
    assert fake.bodies == []


@pytest.mark.parametrize(
    "options",
    [
        ("--extra-body", "[1]"),
        ("--max-concurrency", "0"),
        ("--num-prompts", "1,2"),
        ("--token-id-range", "5"),
        ("--token-id-range", "0:99999999999"),
        ("--token-id-range", "1:²"),
        ("--num-prompts", "²"),
        ("--num-warmups", "-1"),
        ("--seed", "-1"),
        ("--burstiness", "nan"),
        ("--burstiness", "inf"),
        ("--request-timeout", "nan"),
        ("--request-timeout", "inf"),
        ("--request-timeout", "0"),
        ("--multi-turn-think-time", "inf"),
        ("--timed-trace-sec-multiplier", "nan"),
        ("--ready-check-timeout-sec", "nan"),
        ("--ramp-up-end-rps", "inf"),
        ("--temperature", "nan"),
    ],
)
def test_options_that_are_no_values(serve, options):
    with pytest.raises(SystemExit) as ended:
        serve(*options)
    assert ended.value.code == 2


@pytest.mark.parametrize("is_chat", [False, True])
def test_lines_for_the_other_endpoint(serve, fake, tmp_path, is_chat):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"prompt": [1, 2]} if is_chat else {"messages": messages}) + "\n")
    custom = ("--dataset-name", "custom", "--dataset-path", str(path))
    code, _, printed = serve(*custom, "--backend", "openai-chat" if is_chat else "openai")
    assert (code, fake.bodies) == (2, [])
    assert ("chat takes text" if is_chat else '"messages" are for chat') in printed.err


def test_what_cannot_be_written_is_said_before_the_run(serve, fake, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    assert serve("--result-dir", str(file))[0] == 1
    assert serve("--result-dir", str(tmp_path), "--result-filename", ".")[0] == 1
    assert serve("--plot", str(file / "x.png"))[0] == 1
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, _, printed = serve("--plot", str(tmp_path / "x.png"))
    assert (code, fake.bodies) == (2, [])
    assert "--plot needs matplotlib" in printed.err


def test_metadata_of_ones_own(serve):
    _, results, _ = serve("--metadata", "commit=abc", "note=日本")
    assert (only(results)["commit"], only(results)["note"]) == ("abc", "日本")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_tells_what_has_ended(fake, tmp_path, processes):
    """Once the command runs, in a process group of its own as a terminal has it."""
    options = (
        "--port",
        str(fake.port),
        "--num-prompts",
        "400",
        "--max-concurrency",
        "4",
        "--client-processes",
        processes,
    )
    options += ("--input-len", "3", "--output-len", "4", "--extra-body", '{"delay": 0.02}')
    saving = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    command = [sys.executable, "-m", "oneloop.cli.main", "bench", "serve", *options, *saving]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        while len(fake.bodies) < 20:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    (result,) = load(tmp_path / "r.json")
    assert (result["interrupted"], result["num_prompts"], result["failed"]) == (True, 400, 0)
    assert 12 <= result["completed"] < 400
    assert f"INTERRUPTED: only {result['completed']} of 400 requests had ended." in told
    assert result["checks"] == {"checked": result["completed"], "failed": 0, "problems": {}}


def test_no_server(capsys):
    assert main(["serve", "--port", str(free_port()), *SMALL]) == 1
    assert "does not tell its model" in capsys.readouterr().err
    assert main(["serve", "--port", str(free_port()), *SMALL, "--ready-check-timeout-sec", "0.2"]) == 1
    assert "was not ready within 0.2 s" in capsys.readouterr().err


def test_compare(serve, tmp_path, capsys):
    for name in ("a", "b"):
        serve("--result-filename", f"{name}.json")
    files = [str(tmp_path / f"results/{name}.json") for name in ("a", "b")]
    assert main(["compare", *files, "--plot", str(tmp_path / "both.png")]) == 0
    out = capsys.readouterr().out
    assert "| figure" in out
    assert "b / a" in out
    assert "p99_itl_ms" in out
    assert "std_itl_ms" not in out
    assert (tmp_path / "both.png").exists()
    assert main(["compare", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_the_clients_own_ceiling():
    """A process, as it is run; the figure is the machine's, that there is one is ours."""
    command = [sys.executable, "-m", "oneloop_bench.commands.main", "serve", "--measure-ceiling"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ceiling_events_per_s"] == pytest.approx(1e6 / found["us_per_event"], rel=0.01)
    assert found["ceiling_events_per_s"] > 10_000
    assert f"The ceiling is {found['ceiling_events_per_s']:,} events/s" in done.stdout
