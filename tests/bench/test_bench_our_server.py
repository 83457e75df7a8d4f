"""`oneloop bench serve --strict` against `oneloop serve`: our own replies pass every check."""

import json

import pytest

from oneloop_bench.commands.main import main
from oneloop_bench.server import running_server

DUMMY = ("--load-format", "dummy", "--device", "cpu", "--max-model-len", "512")
SMALL = ("--num-prompts", "24", "--disable-tqdm", "--strict", "--save-result")


@pytest.fixture(scope="module")
def port(tiny_model):
    with running_server(*DUMMY, model=str(tiny_model)) as server:
        server.wait_ready()
        yield server.port


def test_the_null_executor_without_a_model(capsys):
    """As docs/benchmarking.md has it: nothing of its small vocabulary has to be said."""
    with running_server("--executor", "null", model="null") as server:
        server.wait_ready()
        for more in ((), ("--backend", "openai-chat")):
            code = main(
                [
                    "serve",
                    "--port",
                    str(server.port),
                    "--num-prompts",
                    "24",
                    "--disable-tqdm",
                    "--strict",
                    *more,
                ]
            )
            assert code == 0, capsys.readouterr().out
        main(
            ["serve", "--port", str(server.port), "--num-prompts", "3", "--disable-tqdm", "--model", "nosuch"]
        )
        assert "The model 'nosuch' does not exist; this server has: null." in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ("--max-concurrency", "8", "--input-len", "20", "--output-len", "30"),
        ("--request-rate", "100", "--disable-stream", "--input-len", "20", "--output-len", "10"),
        ("--backend", "openai-chat", "--input-len", "5", "--output-len", "20", "--temperature", "1.0"),
        ("--backend", "openai-chat", "--no-ignore-eos", "--input-len", "5", "--output-len", "40",
         "--extra-body", '{"n": 3, "temperature": 1}'),
        ("--input-len", "9", "--output-len", "12", "--extra-body", '{"logprobs": 3}', "--max-concurrency", "4"),
        ("--dataset-name", "multi_turn", "--multi-turn-system-len", "3", "--input-len", "3", "--output-len", "8",
         "--client-processes", "2", "--backend", "openai-chat"),
    ],
)  # fmt: skip
def test_every_check_holds(port, tmp_path, capsys, options):
    code = main(["serve", "--port", str(port), *SMALL, "--result-dir", str(tmp_path), *options])
    assert code == 0, capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert (found["completed"], found["checks"]["checked"]) == (24, 24)
    assert found["total_output_tokens"] > 24
