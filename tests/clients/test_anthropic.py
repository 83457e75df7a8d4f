"""The official `anthropic` client against a live server with a real model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "smollm2"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
def claude(live: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key=live.key, max_retries=0, timeout=60) as made:
        yield made


def ask(temperature: float = 0, **options: Any) -> dict[str, Any]:
    """The client's newer versions have no parameter for the temperature; the API still does."""
    extra = {"temperature": temperature}
    return {"model": MODEL, "messages": FRANCE, "max_tokens": 16, "extra_body": extra, **options}


def test_whole(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.create(**ask(system="You are helpful."))
    block: Any = reply.content[0]
    assert "Paris" in block.text
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert reply.stop_reason in ("end_turn", "max_tokens")
    assert reply.usage.output_tokens > 0


def test_streamed(claude: anthropic.Anthropic) -> None:
    whole: Any = claude.messages.create(**ask())
    with claude.messages.stream(**ask()) as stream:
        text = "".join(stream.text_stream)
        last: Any = stream.get_final_message()
    assert text == last.content[0].text == whole.content[0].text
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    both = last.usage.input_tokens + last.usage.cache_read_input_tokens
    assert both == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert claude.messages.count_tokens(model=MODEL, messages=FRANCE).input_tokens == both


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    reply: Any = claude.messages.create(**ask(stop_sequences=["Paris"]))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in reply.content[0].text


def test_tools_in_the_history(claude: anthropic.Anthropic) -> None:
    messages = [
        *FRANCE,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "France"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Paris"}]},
    ]
    assert claude.messages.create(**ask(messages=messages)).usage.output_tokens > 0


def test_prefill(claude: anthropic.Anthropic) -> None:
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    reply: Any = claude.messages.create(**ask(messages=messages))
    assert "Paris" in reply.content[0].text


KINDS = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "paint"}])
def test_calls_that_must_come(claude: anthropic.Anthropic, choice: Any) -> None:
    tools: Any = [{"name": "paint", "input_schema": KINDS}]
    choice = {**choice, "disable_parallel_tool_use": True}
    with claude.messages.stream(**ask(max_tokens=100, tools=tools, tool_choice=choice)) as stream:
        reply = stream.get_final_message()
    (block,) = reply.content
    assert (reply.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "paint")
    assert block.input["kind"] in ("red", "green")


def test_a_form(claude: anthropic.Anthropic) -> None:
    config = {"format": {"type": "json_schema", "schema": KINDS}}
    extra = {"temperature": 1, "output_config": config}
    reply: Any = claude.messages.create(**{**ask(max_tokens=100), "extra_body": extra})
    assert json.loads(reply.content[0].text)["kind"] in ("red", "green")


def test_errors(claude: anthropic.Anthropic, live: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as bad:
        claude.messages.create(**ask(temperature=-1))
    body: Any = bad.value.body
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**ask(model="other"))
    wrong = anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**ask())
    bearer = anthropic.Anthropic(base_url=live.url, auth_token=live.key, api_key=None, max_retries=0)
    assert bearer.messages.create(**ask()).usage.output_tokens > 0


WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_a_call_and_its_result(claude: anthropic.Anthropic) -> None:
    """A call that must come, whole and streamed; its result goes back into the conversation."""
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    options = ask(messages=asked, tools=[WEATHER], tool_choice=choice, max_tokens=64)
    whole: Any = claude.messages.create(**options)
    (call,) = whole.content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert whole.stop_reason == "tool_use"
    with claude.messages.stream(**options) as stream:
        last: Any = stream.get_final_message()
    assert last.content[0].input == call.input
    assert last.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "22 degrees, sunny"}
    history = [*asked, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer: Any = claude.messages.create(**ask(messages=history, tools=[WEATHER]))
    assert answer.content[0].type == "text"
