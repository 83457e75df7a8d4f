"""gpt-oss: the harmony format, written here. The model's template alone refuses or drops what clients send: text beside
a call, several calls in one turn, system messages after the first, lists of parts.

A turn is `<|start|>author<|channel|>channel<|message|>text<|end|>`. Thoughts go to the channel "analysis", calls and
the text before them to "commentary", answers to "final". Thoughts before the last answer are not shown again.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import TYPE_CHECKING

from oneloop.errors import RequestError
from oneloop.tokenize.renderers.hf import template_writer
from oneloop.tokenize.renderers.kind import RendererKind, Write
from oneloop.tokenize.renderers.typescript import type_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.tokenize.conversation import ChatForm, Conversation, Message, Tool, ToolCall
    from oneloop.tokenize.tokenizer import Tokenizer

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
EFFORTS = ("low", "medium", "high")
_SYSTEM = ("system", "developer")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_MARKERS = ("<|start|>", "<|channel|>", "<|message|>")
_FIELD = "chat_template_kwargs"


def write(conversation: Conversation, form: ChatForm) -> str:
    """The prompt. Template arguments: reasoning_effort, model_identity, conversation_start_date (default: today)."""
    try:
        turns = [_system(conversation.tools, form.template_arguments)]
        messages = list(conversation.messages)
        heads: list[str] = []
        while messages and messages[0].role in _SYSTEM:
            heads.append(messages.pop(0).text)
        turns += _developer("\n\n".join(heads), conversation.tools)
        turns += _turns(messages)
    except RecursionError:
        raise RequestError("tools", "a tool's parameters are nested too deeply") from None
    text = "".join(turns)
    if form.continue_final_message:
        return _opened(text, messages)
    return text + "<|start|>assistant" if form.add_generation_prompt else text


def _system(tools: Sequence[Tool], arguments: Mapping[str, object]) -> str:
    effort = arguments.get("reasoning_effort", "medium")
    if effort not in EFFORTS:
        raise RequestError(_FIELD, f"reasoning_effort is one of {', '.join(EFFORTS)} for this model")
    identity = arguments.get("model_identity", IDENTITY)
    if not isinstance(identity, str):
        raise RequestError(_FIELD, "model_identity must be a string")
    date = arguments.get("conversation_start_date", f"{datetime.now():%Y-%m-%d}")
    if not isinstance(date, str) or not _DATE.fullmatch(date):
        raise RequestError(_FIELD, "conversation_start_date is a date like 2025-06-28")
    if arguments.get("builtin_tools"):
        raise RequestError(
            _FIELD, "builtin_tools is not supported: there is no browser and no interpreter here"
        )
    text = (
        f"{identity}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {date}\n\nReasoning: {effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    if tools:
        text += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return _turn("system", text)


def _developer(instructions: str, tools: Sequence[Tool]) -> list[str]:
    """What the developer says and the tools there are; no turn where there is neither."""
    parts = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        types = "".join(_tool(tool) for tool in tools)
        parts.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{types}}} // namespace functions")
    return [_turn("developer", "\n\n".join(parts))] if parts else []


def _tool(tool: Tool) -> str:
    lines = "".join(f"// {line}\n" for line in (tool.description or "").splitlines())
    parameters = "" if tool.parameters is None else f"_: {type_of(dict(tool.parameters))}"
    return f"{lines}type {tool.name} = ({parameters}) => any;\n\n"


def _turns(messages: Sequence[Message]) -> list[str]:
    last_answer = max((place for place, message in enumerate(messages) if _is_answer(message)), default=-1)
    names: dict[str | None, str] = {}
    turns: list[str] = []
    for place, message in enumerate(messages):
        match message.role:
            case "assistant":
                turns += _assistant(message, shows_thoughts=place > last_answer or place == len(messages) - 1)
                names |= {call.id: call.name for call in message.tool_calls}
            case "tool" | "function":
                name = names.get(message.tool_call_id) or message.name
                if name is None:
                    raise RequestError(
                        "messages",
                        f"messages[{place}]: a tool's answer needs the tool_call_id of a call before it, or a name",
                    )
                turns.append(_turn(f"functions.{name} to=assistant", message.text, "commentary"))
            case "user":
                turns.append(_turn("user", message.text))
            case _:
                turns += _developer(message.text, ())
    return turns


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def _assistant(message: Message, *, shows_thoughts: bool) -> list[str]:
    turns: list[str] = []
    if message.reasoning and shows_thoughts:
        turns.append(_turn("assistant", message.reasoning, "analysis"))
    if message.tool_calls:
        if message.text:
            turns.append(_turn("assistant", message.text, "commentary"))
        turns += [_call(call) for call in message.tool_calls]
    elif message.text or not turns:
        turns.append(_turn("assistant", message.text, "final"))
    return turns


def _call(call: ToolCall) -> str:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments), ensure_ascii=False)
    return f"<|start|>assistant to=functions.{call.name}<|channel|>commentary json<|message|>{text}<|call|>"


def _turn(author: str, text: str, channel: str | None = None) -> str:
    shown = "" if channel is None else f"<|channel|>{channel}"
    return f"<|start|>{author}{shown}<|message|>{text}<|end|>"


def _opened(text: str, messages: Sequence[Message]) -> str:
    """The last turn without its end."""
    if not messages or not text.endswith("<|end|>"):
        raise RequestError(
            "continue_final_message", "a call cannot be continued; the final message must be text"
        )
    return text.removesuffix("<|end|>")


def _make(tokenizer: Tokenizer) -> Write:
    with_template = template_writer(tokenizer)

    def choose(conversation: Conversation, form: ChatForm) -> str:
        return write(conversation, form) if form.chat_template is None else with_template(conversation, form)

    return choose


kind = RendererKind(
    "harmony", lambda tokenizer: all(tokenizer.token_id(token) is not None for token in _MARKERS), _make
)
