"""Clients that bring an environment of their own: `langchain-openai`, `litellm`, npm's `openai` and the Vercel AI SDK.

Each has a probe in tests/clients/python or tests/clients/npm that runs once, as a user's program would, and writes what
its client made of the answers. The same is then asked of all: the text is the one that a plain HTTP client gets.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "tools/client_environments.py"
MODEL = "smollm2"
PROBE_LIMIT_S = 120
CLIENTS = ("langchain", "litellm", "openai", "ai_sdk")
SCHEMA = {
    "title": "person",  # langchain-openai takes its name from here
    "description": "A person.",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = "[A-Z][a-z]{2,9}"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": f"^{CITY}$"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# The model is too small to call a tool whenever it should, so that "auto" has a form beside it: a call and no more.
# That it is one is still found by the parser, as with any model.
CALL = rf'\{{"name": "weather", "arguments": \{{"city": "{CITY}"\}}\}}'
ONE_CALL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {"begin": "<tool_call>", "content": {"type": "regex", "pattern": CALL}, "end": "</tool_call>"}
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
TOOL_WAYS = {
    "auto": {"tool_choice": "auto", "body": {"structured_outputs": {"structural_tag": ONE_CALL}}},
    "required": {"tool_choice": "required", "body": {"parallel_tool_calls": False}},
}
# What each client raises: its own class, or the one among its bases that programs catch.
CLASSES = {
    "langchain": ("BadRequestError", "ContextOverflowError", "NotFoundError", "AuthenticationError"),
    "litellm": ("BadRequestError", "ContextWindowExceededError", "NotFoundError", "AuthenticationError"),
    "openai": ("BadRequestError", "BadRequestError", "NotFoundError", "AuthenticationError"),
    "ai_sdk": ("APICallError", "APICallError", "APICallError", "APICallError"),
}


@dataclass(frozen=True)
class Probes:
    """Runs the probes, each once."""

    places: dict[str, str]
    task: dict[str, Any]
    folder: Path
    results: dict[str, dict[str, Any]]

    def result(self, client: str, case: str) -> Any:
        """What the client made of a case; fails with the client's own traceback where it raised."""
        if client not in self.results:
            self.results[client] = self._run(client)
        result = self.results[client][case]
        if isinstance(result, dict) and "failed" in result:
            pytest.fail(f"{client}, {case}: {result['failed']}")
        return result

    def _run(self, client: str) -> dict[str, Any]:
        question, answer = self.folder / "task.json", self.folder / f"{client}.json"
        question.write_text(json.dumps(self.task))
        if (script := HERE / "python" / f"{client}_probe.py").is_file():
            command = [self.places["python"], "-E", "-s", str(script)]
        else:
            # Node looks for packages beside the script.
            copy = self.folder / client
            shutil.copytree(HERE / "npm", copy, ignore=shutil.ignore_patterns("node_modules"))
            (copy / "node_modules").symlink_to(Path(self.places["npm"]) / "node_modules")
            command = ["node", str(copy / f"{client}_probe.mjs")]
        done = subprocess.run(
            [*command, str(question), str(answer)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PROBE_LIMIT_S,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        read: dict[str, Any] = json.loads(answer.read_text())
        return read


@pytest.fixture(scope="session")
def probes(live: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probes]:
    """The environments (made by `make test-python` before; else here) and the task."""
    made = subprocess.run([sys.executable, str(ENVIRONMENTS)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    places = json.loads(made.stdout.splitlines()[-1])
    task = {
        "url": live.url,
        "key": live.key,
        "model": MODEL,
        "max_tokens": 64,
        "question": "What is the capital of France? Answer in one sentence.",
        "tool": TOOL,
        "tool_question": "What is the weather in Paris?",
        "tool_result": "22 degrees, sunny",
        "tool_ways": TOOL_WAYS,
        "schema": SCHEMA,
        "schema_question": "Describe a person named Ada.",
        "too_long": "word " * 2000,
    }
    return Probes(places, task, tmp_path_factory.mktemp("probes"), {})


@pytest.fixture(params=CLIENTS)
def client_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def plain(live: Any) -> dict[str, Any]:
    """The reply to the task's question, by plain HTTP."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        "max_tokens": 64,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{live.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {live.key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        read: dict[str, Any] = json.load(reply)
    return read


def test_chat(probes: Probes, client_name: str, plain: dict[str, Any]) -> None:
    seen = probes.result(client_name, "chat")
    assert seen["text"] == plain["choices"][0]["message"]["content"]
    assert seen["finish"] == plain["choices"][0]["finish_reason"] == "stop"
    usage = plain["usage"]
    assert seen["usage"] == [usage["prompt_tokens"], usage["completion_tokens"]]


def test_stream(probes: Probes, client_name: str) -> None:
    whole, seen = probes.result(client_name, "chat"), probes.result(client_name, "stream")
    pieces = seen.pop("pieces")
    assert seen == whole
    assert pieces > 1, "the text comes as it is made"


@pytest.mark.parametrize("way", TOOL_WAYS)
@pytest.mark.parametrize("case", ["tools", "tools_streamed"])
def test_tools(probes: Probes, client_name: str, case: str, way: str) -> None:
    """The call comes as the client's own kind of call, and its result goes back into the conversation."""
    seen = probes.result(client_name, case)[way]
    assert (seen["name"], seen["arguments"]) == ("weather", {"city": "Paris"})
    assert seen["finish"].replace("-", "_") == "tool_calls"
    if case == "tools":
        assert "weather" in seen["answer"]


@pytest.mark.parametrize("case", ["structured", "structured_streamed"])
def test_structured_output(probes: Probes, client_name: str, case: str) -> None:
    person = probes.result(client_name, case)
    jsonschema.validate(person, SCHEMA)


def test_errors(probes: Probes, client_name: str) -> None:
    seen = probes.result(client_name, "errors")
    bad, too_long, missing, key = CLASSES[client_name]
    wanted = {
        "bad": (bad, 400, "top_p"),
        "bad_streamed": (bad, 400, "top_p"),
        "too_long": (too_long, 400, "maximum context length is 1024"),
        "missing": (missing, 404, "'other' does not exist"),
        "key": (key, 401, ""),
    }
    assert seen.keys() == wanted.keys()
    for name, (kind, status, message) in wanted.items():
        assert kind in seen[name]["bases"], (name, seen[name])
        assert seen[name]["status"] == status, (name, seen[name])
        assert message in seen[name]["message"], (name, seen[name])


@pytest.mark.parametrize("name", ["langchain", "litellm", "openai"])
def test_responses(probes: Probes, name: str) -> None:
    """Of those that speak the Responses API too."""
    whole, seen = probes.result(name, "chat"), probes.result(name, "responses")
    assert seen["text"] == seen["streamed"] == whole["text"]
    assert seen["usage"] == whole["usage"]


def test_structured_output_by_a_call(probes: Probes) -> None:
    """LangChain's older way: the one tool that there is, called by name."""
    jsonschema.validate(probes.result("langchain", "structured_by_call"), SCHEMA)
