"""`litellm` against the server, as an OpenAI-compatible provider."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the network for prices

import litellm
from probe import error_of, in_each_way, read_task, run

TASK = read_task()


def ask(content: str = TASK["question"], **options: Any) -> Any:
    settings = {
        "model": f"openai/{TASK['model']}",
        "messages": [{"role": "user", "content": content}],
        "api_key": TASK["key"],
        "max_tokens": TASK["max_tokens"],
        **options,
    }
    return litellm.completion(
        api_base=f"{TASK['url']}/v1", temperature=0, num_retries=0, max_retries=0, timeout=60, **settings
    )


def stream_of(*content: str, **options: Any) -> tuple[Any, list[Any]]:
    """The reply as litellm's own helper adds it up, and the chunks."""
    chunks = list(ask(*content, **options, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks), chunks


def usage_of(reply: Any) -> list[int]:
    return [reply.usage.prompt_tokens, reply.usage.completion_tokens]


def call_of(reply: Any) -> dict[str, Any]:
    (call,) = reply.choices[0].message.tool_calls
    return {
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "finish": reply.choices[0].finish_reason,
    }


def chat() -> Any:
    reply = ask()
    choice = reply.choices[0]
    return {"text": choice.message.content, "finish": choice.finish_reason, "usage": usage_of(reply)}


def stream() -> Any:
    reply, chunks = stream_of()
    choice = reply.choices[0]
    return {
        "text": choice.message.content,
        "pieces": len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]),
        "finish": choice.finish_reason,
        "usage": usage_of(reply),
    }


def way_of(way: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [TASK["tool"]], "tool_choice": way["tool_choice"], "extra_body": way["body"]}


def tools(way: dict[str, Any]) -> Any:
    reply = ask(TASK["tool_question"], **way_of(way))
    message = reply.choices[0].message
    history = [
        {"role": "user", "content": TASK["tool_question"]},
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": TASK["tool_result"]},
    ]
    answer = ask(messages=history, tools=[TASK["tool"]], max_tokens=12).choices[0].message.content
    return {**call_of(reply), "answer": answer}


def tools_streamed(way: dict[str, Any]) -> Any:
    return call_of(stream_of(TASK["tool_question"], **way_of(way))[0])


def structured_form() -> dict[str, Any]:
    form = {"name": "person", "strict": True, "schema": TASK["schema"]}
    return {"response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 200}


def structured() -> Any:
    return json.loads(ask(TASK["schema_question"], **structured_form()).choices[0].message.content)


def structured_streamed() -> Any:
    reply, _ = stream_of(TASK["schema_question"], **structured_form())
    return json.loads(reply.choices[0].message.content)


def errors() -> Any:
    return {
        "bad": error_of(lambda: ask(top_p=7)),
        "bad_streamed": error_of(lambda: list(ask(top_p=7, stream=True))),
        "too_long": error_of(lambda: ask(TASK["too_long"])),
        "missing": error_of(lambda: ask(model="openai/other")),
        "key": error_of(lambda: ask(api_key="wrong")),
    }


def responses() -> Any:
    options: dict[str, Any] = {
        "model": f"openai/{TASK['model']}",
        "input": TASK["question"],
        "max_output_tokens": TASK["max_tokens"],
        "temperature": 0,
        "api_base": f"{TASK['url']}/v1",
        "api_key": TASK["key"],
    }
    reply = litellm.responses(**options)
    events = list(litellm.responses(**options, stream=True))
    return {
        "text": reply.output_text,
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "usage": [reply.usage.input_tokens, reply.usage.output_tokens],
    }


run(
    {
        "chat": chat,
        "stream": stream,
        "tools": in_each_way(TASK, tools),
        "tools_streamed": in_each_way(TASK, tools_streamed),
        "structured": structured,
        "structured_streamed": structured_streamed,
        "errors": errors,
        "responses": responses,
    }
)
