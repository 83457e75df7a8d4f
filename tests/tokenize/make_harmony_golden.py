"""Writes data/harmony.jsonl: conversations as OpenAI's own renderer writes them, for tests without it.

Needs the packages openai-harmony (in an environment of its own) and the gpt-oss tokenizer of fetch_tokenizers.py:
python tests/tokenize/make_harmony_golden.py TOKENIZER_FOLDER
A line: {"name", "messages", "tools", "arguments", "text"}.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

DATE = "2025-06-28"
OBJECT = {"type": "object"}
WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "integer", "default": 3},
    },
    "required": ["location"],
}
SCHEMAS: list[Any] = [
    None,
    {},
    OBJECT,
    {"type": "object", "properties": {}},
    WEATHER,
    {"type": "array", "items": {"type": "string"}},
    {"type": "string"},
    {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"a": {"type": "number"}}}]},
    {
        "type": "object",
        "description": "the arguments",
        "properties": {
            "text": {
                "type": "string",
                "title": "A title",
                "description": "two\nlines",
                "examples": ["one", 2],
            },
            "titled": {"title": "only this", "type": "string"},
            "path": {"type": "string", "default": 'C:\\dir "x"'},
            "list": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "number"}},
                "description": "rows",
            },
            "anything": {"type": "array"},
            "words": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}, "default": ["x"]},
            "objects": {
                "type": "array",
                "items": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
            },
            "number_or_not": {"type": ["number", "null"], "default": None},
            "maybe": {"type": "string", "nullable": True, "default": "z"},
            "flag": {"type": "boolean", "default": True},
            "no_type": {"enum": ["x"]},
            "reference": {"$ref": "#/$defs/X"},
            "any_of": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "description": "top",
                "default": None,
            },
            "one_of": {
                "oneOf": [
                    {"type": "string", "enum": ["p", "q"], "default": "p"},
                    {"type": "object", "properties": {"deep": {"type": "boolean", "description": "inner"}}},
                    {"type": "null"},
                ],
                "description": "either",
                "default": "p",
            },
            "nested": {
                "type": "object",
                "description": "outer",
                "properties": {
                    "x": {"type": "number", "description": "inner"},
                    "y": {"type": "object", "properties": {"z": {"type": "string"}}},
                },
                "required": ["x"],
                "default": {"x": 1},
            },
        },
        "required": ["text", "nested"],
    },
]


def tool(name: str, parameters: Any, description: str = "Does it") -> dict[str, Any]:
    shown = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": description, **shown}}


def call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "What is the weather in “Köln”?"}
ASKS = {
    "role": "assistant",
    "content": None,
    "reasoning": "I need the weather.",
    "tool_calls": [call("1", "get_weather", '{"location": "Köln", "days": 2}')],
}
TOLD = {"role": "tool", "tool_call_id": "1", "content": '{"degrees": 12}'}
ANSWER = {"role": "assistant", "content": "12 degrees.", "reasoning": "Now I know."}
TOOLS = [tool("get_weather", WEATHER, "Weather of a place.\nIn degrees."), tool("now", None)]

CASES: list[dict[str, Any]] = [
    {"name": "user", "messages": [USER]},
    {"name": "effort", "messages": [USER], "arguments": {"reasoning_effort": "high"}},
    {"name": "identity", "messages": [USER], "arguments": {"model_identity": "You are Bo."}},
    {"name": "system", "messages": [{"role": "system", "content": " Riddles only. "}, USER]},
    {"name": "developer", "messages": [{"role": "developer", "content": "Riddles only."}, USER]},
    {"name": "tools", "messages": [USER], "tools": TOOLS},
    {
        "name": "system_and_tools",
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "tools": TOOLS,
    },
    {"name": "call", "messages": [USER, ASKS, TOLD], "tools": TOOLS},
    {
        "name": "text_beside_a_call",
        "messages": [USER, {**ASKS, "content": "Let me look."}, TOLD],
        "tools": TOOLS,
    },
    {
        "name": "two_calls",
        "messages": [
            USER,
            {**ASKS, "tool_calls": [*ASKS["tool_calls"], call("2", "now", "")]},
            TOLD,
            {"role": "tool", "tool_call_id": "2", "content": "noon"},
        ],
        "tools": TOOLS,
    },
    {
        "name": "answered",
        "messages": [USER, ASKS, TOLD, ANSWER, {"role": "user", "content": "And now?"}],
        "tools": TOOLS,
    },
    {
        "name": "asked_again",
        "messages": [USER, ASKS, TOLD, ANSWER, {"role": "user", "content": "And now?"}, ASKS, TOLD],
        "tools": TOOLS,
    },
    *[
        {"name": f"schema_{index}", "messages": [USER], "tools": [tool("f", schema)]}
        for index, schema in enumerate(SCHEMAS)
    ],
]


def write_vocabulary(tokenizer: Path, folder: Path) -> None:
    """The library's own vocabulary file, which it checks by hash, from tokenizer.json."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocab = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    rows = sorted((rank, bytes(letters[letter] for letter in token)) for token, rank in vocab.items())
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in rows]
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))


def reference(case: dict[str, Any]) -> str:
    """The prompt as openai-harmony writes it, given what a chat request means in its terms."""
    import openai_harmony as h

    arguments = case.get("arguments", {})
    system = h.SystemContent.new().with_conversation_start_date(DATE)
    system = system.with_reasoning_effort(
        h.ReasoningEffort(arguments.get("reasoning_effort", "medium").capitalize())
    )
    if "model_identity" in arguments:
        system = system.with_model_identity(arguments["model_identity"])
    messages = list(case["messages"])
    developer = h.DeveloperContent.new()
    instructed = messages[0]["role"] in ("system", "developer")
    if instructed:
        developer = developer.with_instructions(messages.pop(0)["content"])
    if case.get("tools"):
        described = [
            h.ToolDescription.new(
                t["function"]["name"],
                t["function"]["description"],
                parameters=t["function"].get("parameters"),
            )
            for t in case["tools"]
        ]
        developer = developer.with_function_tools(described)
    turns = [h.Message.from_role_and_content(h.Role.SYSTEM, system)]
    if instructed or case.get("tools"):
        turns.append(h.Message.from_role_and_content(h.Role.DEVELOPER, developer))
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
    names: dict[str, str] = {}
    for place, message in enumerate(messages):
        keeps_thoughts = not answers or place > answers[-1]
        turns += turns_of(message, names, keeps_thoughts=keeps_thoughts)
    encoding = h.load_harmony_encoding(h.HarmonyEncodingName.HARMONY_GPT_OSS)
    config = h.RenderConversationConfig(auto_drop_analysis=False)
    ids = encoding.render_conversation_for_completion(
        h.Conversation.from_messages(turns), h.Role.ASSISTANT, config=config
    )
    return encoding.decode(ids)


def turns_of(message: dict[str, Any], names: dict[str, str], *, keeps_thoughts: bool) -> list[Any]:
    import openai_harmony as h

    if message["role"] == "user":
        return [h.Message.from_role_and_content(h.Role.USER, message["content"])]
    if message["role"] == "tool":
        author = h.Author.new(h.Role.TOOL, f"functions.{names[message['tool_call_id']]}")
        turn = h.Message.from_author_and_content(author, message["content"])
        return [turn.with_channel("commentary").with_recipient("assistant")]
    turns = []
    calls = message.get("tool_calls") or []
    if message.get("reasoning") and keeps_thoughts:
        turns.append(
            h.Message.from_role_and_content(h.Role.ASSISTANT, message["reasoning"]).with_channel("analysis")
        )
    if message["content"]:
        channel = "commentary" if calls else "final"
        turns.append(
            h.Message.from_role_and_content(h.Role.ASSISTANT, message["content"]).with_channel(channel)
        )
    for one in calls:
        names[one["id"]] = one["function"]["name"]
        text = json.dumps(json.loads(one["function"]["arguments"] or "{}"), ensure_ascii=False)
        turn = h.Message.from_role_and_content(h.Role.ASSISTANT, text).with_channel("commentary")
        turns.append(turn.with_recipient(f"functions.{one['function']['name']}").with_content_type("json"))
    return turns


def main() -> None:
    target = Path(__file__).parent / "data/harmony.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        write_vocabulary(Path(sys.argv[1]), Path(folder))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        lines = [json.dumps({**case, "text": reference(case)}, ensure_ascii=False) for case in CASES]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
