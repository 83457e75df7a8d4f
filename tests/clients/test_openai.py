"""The official `openai` client against a live server with a real model: what its users call, and what they get."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import openai
import pytest

MODEL = "smollm2"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def ask(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": FRANCE, "max_tokens": 16, "temperature": 0, **options}


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**ask())
    choice = reply.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert reply.model == MODEL
    assert reply.id.startswith("chatcmpl-")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply._request_id == reply.id.removeprefix("chatcmpl-")


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ask())
    chunks = list(
        client.chat.completions.create(**ask(), stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(part.usage is None for part in parts)


TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = 'Repeat exactly: <tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def test_tools(client: openai.OpenAI) -> None:
    """A call that the model writes, whole and as the client's own helper adds it up from the stream."""
    options = ask(messages=[{"role": "user", "content": CALL}], tools=[TIME], max_tokens=64, stop=["This"])
    whole = client.chat.completions.create(**options)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_time", "{}")
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == "{}"
    assert streamed.message.content == whole.choices[0].message.content
    assert streamed.finish_reason == whole.choices[0].finish_reason == "tool_calls"
    answered = client.chat.completions.create(
        **ask(
            messages=[
                *options["messages"],
                whole.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "12:00"},
            ],
            tools=[TIME],
        )
    )
    assert answered.choices[0].message.content


def test_three_answers(client: openai.OpenAI) -> None:
    options = ask(
        n=3, temperature=1.0, seed=5, messages=[{"role": "user", "content": "Write a line of a poem."}]
    )
    reply = client.chat.completions.create(**options)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) > 1
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts, "the same seed gives the same answers"
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 48


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    options = ask(logprobs=True, top_logprobs=3, max_tokens=8)
    if stream:
        choices = [
            c for chunk in client.chat.completions.create(**options, stream=True) for c in chunk.choices
        ]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        choice = client.chat.completions.create(**options).choices[0]
        assert choice.logprobs is not None
        entries = list(choice.logprobs.content or [])
        text = choice.message.content or ""
    assert 0 < len(entries) <= 8
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == text
    for entry in entries:
        assert math.isfinite(entry.logprob)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob), "greedy takes the likeliest"
        assert entry.top_logprobs[0].token == entry.token


def test_stop(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(**ask()).choices[0].message.content or ""
    stop = free[5:9]
    reply = client.chat.completions.create(**ask(stop=[stop, "never there"]))
    assert reply.choices[0].message.content == free[: free.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].model_extra == {"stop_reason": stop}


def test_extra_body(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        **ask(extra_body={"top_k": 1, "min_tokens": 12, "ignore_eos": True})
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    raw = client.chat.completions.with_raw_response.create(**ask(user="someone", extra_body={"nonsense": 1}))
    assert raw.headers["X-Oneloop-Ignored"] == "user, nonsense"


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["Once upon a time", "The sky is"], max_tokens=6, temperature=0, echo=True, n=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("Once upon a time") for choice in reply.choices[:2])
    assert all(choice.text.startswith("The sky is") for choice in reply.choices[2:])
    assert reply.choices[0].text == reply.choices[1].text
    plain = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=6, temperature=0)
    assert reply.choices[2].text == "The sky is" + plain.choices[0].text
    chunks = list(
        client.completions.create(model=MODEL, prompt="The sky is", max_tokens=6, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="The sky is", max_tokens=5, temperature=0, logprobs=2
    )
    lists = reply.choices[0].logprobs
    assert lists is not None
    assert "".join(lists.tokens or []) == reply.choices[0].text
    assert lists.text_offset == [sum(map(len, (lists.tokens or [])[:i])) for i in range(5)]
    assert all(len(top) == 2 for top in lists.top_logprobs or [])
    assert all(value <= 0 for value in lists.token_logprobs or [1])


def test_token_prompts(client: openai.OpenAI, live: Any) -> None:
    tokens = client.post("/../tokenize", body={"prompt": "The sky is"}, cast_to=dict[str, Any])["tokens"]
    reply = client.completions.create(model=MODEL, prompt=tokens, max_tokens=4, temperature=0)
    text = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=4, temperature=0)
    assert reply.choices[0].text == text.choices[0].text
    assert client.post("/../detokenize", body={"tokens": tokens}, cast_to=dict[str, Any]) == {
        "prompt": "The sky is"
    }


def test_prefix_hits_show_in_the_usage(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Count the words: " + "apple pear plum " * 20}]
    first = client.chat.completions.create(**ask(messages=long, max_tokens=4))
    again = client.chat.completions.create(**ask(messages=long, max_tokens=4))
    assert again.choices[0].message == first.choices[0].message
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 64


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == 1024
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("stream", [False, True])
def test_errors(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**ask(temperature=-1, stream=stream))
    assert (bad.value.param, bad.value.type, str(bad.value.code)) == ("temperature", "BadRequestError", "400")
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        client.chat.completions.create(
            **ask(messages=[{"role": "user", "content": "word " * 2000}], stream=stream)
        )
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**ask(messages=[], stream=stream))
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.chat.completions.create(**{**ask(stream=stream), "model": "gpt-none"})
    with pytest.raises(openai.BadRequestError, match="not supported yet"):
        client.chat.completions.create(**ask(reasoning_effort="high", stream=stream))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(**ask(stream=stream))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(client: openai.OpenAI, stream: bool) -> None:
    def text_of(**fields: Any) -> str:
        made = client.chat.completions.create(**ask(max_tokens=150, temperature=1.2, stream=stream, **fields))
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in made)
        assert made.choices[0].finish_reason == "stop"
        return str(made.choices[0].message.content)

    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    person = json.loads(text_of(response_format=schema))
    assert list(person) == ["name", "age"]
    assert 0 <= person["age"] <= 130
    assert text_of(extra_body={"structured_outputs": {"choice": ["red", "green"]}}) in ("red", "green")
    assert re.fullmatch("[ab]{4}", text_of(extra_body={"guided_regex": "[ab]{4}"}))
    completion = client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=30,
        n=2,
        extra_body={"structured_outputs": {"grammar": 'root ::= "a" "b"+ "."'}},
    )
    assert all(re.fullmatch(r"ab+\.?", choice.text) for choice in completion.choices)
    # T18, H15: a good form, a bad one, a good one: each judged alone, and never free text.
    for pattern, is_good in [(r"^go\!$", True), ("^(go$", False), ("(?=a)", False), (r"^go\!$", True)]:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "string", "pattern": pattern}},
        }
        if is_good:
            assert text_of(response_format=form) == '"go!"'
        else:
            with pytest.raises(
                openai.BadRequestError, match=r"response_format\.json_schema\.schema: #/pattern"
            ):
                text_of(response_format=form)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "person"}}])
def test_calls_that_must_come(client: openai.OpenAI, stream: bool, choice: Any) -> None:
    """Whatever the model knows of tools."""
    tools = [{"type": "function", "function": {"name": "person", "parameters": PERSON}}]
    fields = ask(max_tokens=200, temperature=1.2, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    if stream:
        with client.chat.completions.stream(**fields) as events:
            made = events.get_final_completion().choices[0]
    else:
        made = client.chat.completions.create(**fields).choices[0]
    (call,) = made.message.tool_calls or []
    assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert call.function.name == "person"
    person = json.loads(call.function.arguments)
    assert list(person) == ["name", "age"]
    assert 0 <= person["age"] <= 130


def test_leaving_a_stream(client: openai.OpenAI, live: Any) -> None:
    stream = client.chat.completions.create(
        **ask(max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    )
    next(iter(stream))
    assert live.running() == 1
    stream.close()
    live.wait_idle()


async def test_async_chat(async_client: openai.AsyncOpenAI) -> None:
    reply = await async_client.chat.completions.create(**ask())
    assert "Paris" in (reply.choices[0].message.content or "")


async def test_async_streams_side_by_side(async_client: openai.AsyncOpenAI) -> None:
    """Eight at once: each complete, each its own."""

    async def one(number: int) -> tuple[str, int]:
        messages: list[Any] = [{"role": "user", "content": f"Repeat the number {number}."}]
        text, tokens = "", 0
        stream = await async_client.chat.completions.create(
            **ask(messages=messages, max_tokens=12), stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    answers = await asyncio.gather(*[one(number) for number in range(11, 19)])
    assert all(0 < tokens <= 12 for _, tokens in answers)
    assert all(text for text, _ in answers)
    assert len({text for text, _ in answers}) > 4


async def test_async_three_answers(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(**ask(n=3, temperature=1.0, seed=1), stream=True)
    finished = [c.index async for chunk in stream for c in chunk.choices if c.finish_reason is not None]
    assert sorted(finished) == [0, 1, 2]


async def test_async_errors(async_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await async_client.completions.create(model=MODEL, prompt="", max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        await async_client.models.retrieve("none")
    with pytest.raises(openai.BadRequestError):
        await async_client.completions.create(model=MODEL, prompt="a", n=10**6)


async def test_async_cancel(async_client: openai.AsyncOpenAI, live: Any) -> None:
    options = ask(max_tokens=900, extra_body={"ignore_eos": True})
    task = asyncio.create_task(async_client.chat.completions.create(**options))
    await asyncio.sleep(1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(live.wait_idle)
