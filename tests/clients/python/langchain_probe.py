"""`langchain-openai`: ChatOpenAI against the server."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from probe import error_of, in_each_way, read_task, run

TASK = read_task()


def model(**options: Any) -> ChatOpenAI:
    settings = {"model": TASK["model"], "api_key": TASK["key"], "max_tokens": TASK["max_tokens"], **options}
    return ChatOpenAI(base_url=f"{TASK['url']}/v1", temperature=0, max_retries=0, timeout=60, **settings)


def usage_of(message: AIMessage) -> list[int]:
    assert message.usage_metadata is not None
    return [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]]


def chat() -> Any:
    reply = model().invoke(TASK["question"])
    return {
        "text": reply.text,
        "finish": reply.response_metadata["finish_reason"],
        "usage": usage_of(reply),
    }


def stream() -> Any:
    pieces = list(model(stream_usage=True).stream(TASK["question"]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return {
        "text": whole.text,
        "pieces": len([piece for piece in pieces if piece.text]),
        "finish": whole.response_metadata["finish_reason"],
        "usage": usage_of(whole),
    }


def call_of(reply: AIMessage) -> dict[str, Any]:
    (call,) = reply.tool_calls
    return {
        "name": call["name"],
        "arguments": call["args"],
        "finish": reply.response_metadata["finish_reason"],
    }


def tools(way: dict[str, Any]) -> Any:
    able = model().bind_tools([TASK["tool"]], tool_choice=way["tool_choice"])
    asked = HumanMessage(TASK["tool_question"])
    reply = able.invoke([asked], extra_body=way["body"])
    result = ToolMessage(TASK["tool_result"], tool_call_id=reply.tool_calls[0]["id"])
    answer = model(max_tokens=12).bind_tools([TASK["tool"]]).invoke([asked, reply, result])
    return {**call_of(reply), "answer": answer.text}


def tools_streamed(way: dict[str, Any]) -> Any:
    able = model().bind_tools([TASK["tool"]], tool_choice=way["tool_choice"])
    pieces = list(able.stream(TASK["tool_question"], extra_body=way["body"]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return call_of(whole)


def structured() -> Any:
    able = model(max_tokens=200).with_structured_output(TASK["schema"], method="json_schema", strict=True)
    return able.invoke(TASK["schema_question"])


def structured_streamed() -> Any:
    able = model(max_tokens=200).with_structured_output(TASK["schema"], method="json_schema", strict=True)
    return list(able.stream(TASK["schema_question"]))[-1]


def structured_by_call() -> Any:
    able = model(max_tokens=200).with_structured_output(TASK["schema"], method="function_calling")
    return able.invoke(TASK["schema_question"])


def errors() -> Any:
    return {
        "bad": error_of(lambda: model(top_p=7).invoke("x")),
        "bad_streamed": error_of(lambda: list(model(top_p=7).stream("x"))),
        "too_long": error_of(lambda: model().invoke(TASK["too_long"])),
        "missing": error_of(lambda: model(model="other").invoke("x")),
        "key": error_of(lambda: model(api_key="wrong").invoke("x")),
    }


def responses() -> Any:
    reply = model(use_responses_api=True).invoke(TASK["question"])
    pieces = list(model(use_responses_api=True).stream(TASK["question"]))
    return {
        "text": reply.text,
        "streamed": "".join(piece.text for piece in pieces),
        "usage": usage_of(reply),
    }


run(
    {
        "chat": chat,
        "stream": stream,
        "tools": in_each_way(TASK, tools),
        "tools_streamed": in_each_way(TASK, tools_streamed),
        "structured": structured,
        "structured_streamed": structured_streamed,
        "structured_by_call": structured_by_call,
        "errors": errors,
        "responses": responses,
    }
)
