"""The official `openai` client's Responses against a live server with a real model."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

MODEL = "smollm2"
FRANCE = "What is the capital of France? Answer in one sentence."


def ask(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": FRANCE, "max_output_tokens": 16, "temperature": 0, **options}


def test_whole(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ask(instructions="You are helpful.", metadata={"a": "b"}))
    assert "Paris" in reply.output_text
    assert reply.id.startswith("resp_")
    assert reply.status in ("completed", "incomplete")
    assert reply.metadata == {"a": "b"}
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert client.responses.retrieve(reply.id) == reply
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ask())
    events = list(client.responses.create(**ask(), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert text == last.response.output_text == whole.output_text
    with client.responses.stream(**ask()) as stream:
        assert stream.get_final_response().output_text == text if last.type == "response.completed" else True


KINDS = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def test_forms_and_calls_that_must_come(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "kinds", "schema": KINDS, "strict": True}
    reply = client.responses.create(**ask(max_output_tokens=100, text={"format": form}))
    assert json.loads(reply.output_text)["kind"] in ("red", "green")
    tools = [{"type": "function", "name": "paint", "parameters": KINDS, "strict": True}]
    for choice in ("required", {"type": "function", "name": "paint"}):
        fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        called: Any = client.responses.create(**ask(max_output_tokens=100, **fields))
        (item,) = called.output
        assert (called.status, item.type, item.name) == ("completed", "function_call", "paint")
        assert json.loads(item.arguments)["kind"] in ("red", "green")


def test_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(**ask(input="My name is Ada.", max_output_tokens=12))
    second = client.responses.create(**ask(input="What is my name?", previous_response_id=first.id))
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.responses.create(**ask(include=["message.output_text.logprobs"], top_logprobs=2))
    item: Any = reply.output[0]
    logprobs = item.content[0].logprobs
    assert "".join(entry.token for entry in logprobs).startswith(reply.output_text[:4])
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**ask(background=True))
    deadline = time.monotonic() + 20
    while (reply := client.responses.retrieve(begun.id)).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Paris" in reply.output_text
    long = client.responses.create(
        **ask(background=True, max_output_tokens=900, extra_body={"ignore_eos": True})
    )
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(**ask(temperature=-1))
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ask(previous_response_id="resp_nothing"))
