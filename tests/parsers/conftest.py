"""Texts of every format as models write them, and what is to come out of them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.parsers.engine import make_parser
from oneloop.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from oneloop.parsers.registry import reasoning_format, tool_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from oneloop.parsers.events import Event

STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "days": INTEGER}},
    "get_time": {"type": "object", "properties": {}},
    "write_file": {
        "type": "object",
        "properties": {
            "path": STRING,
            "text": {"anyOf": [STRING, {"type": "null"}]},
            "mode": {"type": ["integer", "null"]},
            "rate": NUMBER,
            "tags": {"type": "array"},
            "options": {"type": "object"},
        },
    },
    "rec": {"type": "object", "properties": {"rec": {"type": "object"}}},
}


@dataclass
class Parsed:
    """Everything that came out of a text."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parsed:
        """Adds up, and checks what holds for every parser: order, indexes, no empty pieces, valid arguments."""
        parsed = cls()
        for event in events:
            match event:
                case Content(text):
                    assert text
                    parsed.content += text
                case Reasoning(text):
                    assert text
                    parsed.reasoning += text
                case ToolCallStart(index, name, call_id):
                    assert index == len(parsed.calls)
                    parsed.calls.append({"name": name, "id": call_id, "text": "", "complete": False})
                case ToolCallArguments(index, text):
                    assert text
                    assert index == len(parsed.calls) - 1
                    assert not parsed.calls[index]["complete"]
                    parsed.calls[index]["text"] += text
                case ToolCallEnd(index):
                    assert index == len(parsed.calls) - 1
                    assert type(json.loads(parsed.calls[index]["text"])) is dict
                    parsed.calls[index]["complete"] = True
        return parsed

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        """(name, arguments) of the complete calls."""
        return [(call["name"], json.loads(call["text"])) for call in self.calls if call["complete"]]


def parse(
    pieces: Sequence[str],
    *,
    calls: str = "none",
    reasoning: str = "none",
    tools: dict[str, Any] | None = None,
    **options: Any,
) -> Parsed:
    """The pieces through a parser of these formats."""
    parser = make_parser(
        reasoning_format(reasoning, ""), tool_format(calls, ""), TOOLS if tools is None else tools, **options
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return Parsed.of(events + parser.finish())


def cut(text: str, source: random.Random) -> list[str]:
    """The text in pieces: single characters, a few, or many at once."""
    pieces, at, longest = [], 0, source.choice((1, 2, 5, 30))
    while at < len(text):
        length = source.randint(1, longest)
        pieces.append(text[at : at + length])
        at += length
    return pieces


WEATHER = {"city": "Zürich – 北京", "days": 3}
NESTED = {
    "rec": {"id": 7, "tags": ["a;b", 'q"uote', "</tool_call>"], "in": {"x": {}}, "f": -1.5e3, "n": None}
}
_HERMES = (
    "Let me look.\n<tool_call>\n"
    + json.dumps({"name": "get_weather", "arguments": WEATHER})
    + "\n</tool_call>\n<tool_call>\n"
    + json.dumps({"name": "rec", "arguments": NESTED}, ensure_ascii=False)
    + '\n</tool_call>\n<tool_call>{"name": "get_time"}</tool_call>'
)
_PLAIN_CALLS = [("get_weather", WEATHER), ("rec", NESTED), ("get_time", {})]
_XML_TEXT = '  two\n\n"quoted" \\back\t🙂 <b>bold</b> </param </parameter> end\n'
FORMATS: dict[str, tuple[dict[str, Any], str, Parsed, list[tuple[str, Any]]]] = {
    "hermes": ({"calls": "hermes"}, _HERMES, Parsed("Let me look."), _PLAIN_CALLS),
    "qwen3": (
        {"calls": "hermes", "reasoning": "qwen3"},
        "<think>\nWhat <tool_call> would do?\n\n</think>\n\n" + _HERMES,
        Parsed("Let me look.", "What <tool_call> would do?"),
        _PLAIN_CALLS,
    ),
    "arguments first": (
        {"calls": "hermes"},
        '<tool_call>{"arguments": {"city": "X"}, "id": "7", "name": "get_weather"}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": "{\\"a\\": 1}"}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        Parsed(),
        [("get_weather", {"city": "X"}), ("get_time", {"a": 1}), ("get_time", {})],
    ),
    "llama3_json": (
        {"calls": "llama3_json"},
        json.dumps({"name": "rec", "parameters": NESTED}) + '; {"name": "get_time", "parameters": {}}',
        Parsed(),
        [("rec", NESTED), ("get_time", {})],
    ),
    "llama3_json tag": (
        {"calls": "llama3_json"},
        "I look. <|python_tag|>" + json.dumps({"name": "rec", "parameters": NESTED}),
        Parsed("I look."),
        [("rec", NESTED)],
    ),
    "mistral list": (
        {"calls": "mistral"},
        'So:[TOOL_CALLS] [{"name": "rec", "arguments": '
        + json.dumps(NESTED)
        + '}, {"name": "get_time", "arguments": {}, "id": "abcdefghi"}]',
        Parsed("So:"),
        [("rec", NESTED), ("get_time", {})],
    ),
    "mistral v11": (
        {"calls": "mistral", "reasoning": "mistral"},
        "[THINK]Hm.[/THINK][TOOL_CALLS]rec[ARGS]"
        + json.dumps(NESTED)
        + "[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]"
        + json.dumps(WEATHER)
        + "[TOOL_CALLS]get_time{}",
        Parsed("", "Hm."),
        [("rec", NESTED), ("get_weather", WEATHER), ("get_time", {})],
    ),
    "qwen3_coder": (
        {"calls": "qwen3_coder"},
        "Writing.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\n/tmp/a\n</parameter>\n<parameter=text>\n"
        + _XML_TEXT
        + "\n</parameter>\n<parameter=mode>\n420\n</parameter>\n<parameter=rate>\nfast\n</parameter>\n"
        "<parameter=tags>\n"
        '["a", 1]\n</parameter>\n<parameter=options>\n{"a": {"b": null}}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        Parsed("Writing."),
        [
            (
                "write_file",
                {
                    "path": "/tmp/a",
                    "text": _XML_TEXT,
                    "mode": 420,
                    "rate": "fast",
                    "tags": ["a", 1],
                    "options": {"a": {"b": None}},
                },
            ),
            ("get_time", {}),
        ],
    ),
    "qwen3_coder null": (
        {"calls": "qwen3_coder"},
        "<function=write_file><parameter=text>null</parameter><parameter=mode>\nNone\n</parameter>"
        "<parameter=path>null</parameter></function>",
        Parsed(),
        [("write_file", {"text": None, "mode": None, "path": "null"})],
    ),
    "glm45": (
        {"calls": "glm45", "reasoning": "glm45"},
        "\n<think>Let's see</think>\nOne moment.\n<tool_call>write_file\n<arg_key>text</arg_key>\n<arg_value>"
        + _XML_TEXT
        + "</arg_value>\n<arg_key>mode</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n"
        "<tool_call>get_time\n</tool_call>",
        Parsed("One moment.", "Let's see"),
        [("write_file", {"text": _XML_TEXT, "mode": None}), ("get_time", {})],
    ),
    "deepseek_v3": (
        {"calls": "deepseek_v3", "reasoning": "deepseek_r1"},
        "thinking</think>Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rec\n```json\n"
        + json.dumps(NESTED)
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Parsed("Now.", "thinking"),
        [("rec", NESTED), ("get_time", {})],
    ),
    "deepseek_v31": (
        {"calls": "deepseek_v31"},
        "Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rec<｜tool▁sep｜>"
        + json.dumps(NESTED)
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Parsed("Now."),
        [("rec", NESTED), ("get_time", {})],
    ),
    "kimi_k2": (
        {"calls": "kimi_k2", "reasoning": "kimi_k2"},
        "<think>Plan.<|tool_calls_section_begin|><|tool_call_begin|>functions.rec:0<|tool_call_argument_begin|>"
        + json.dumps(NESTED)
        + "<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        Parsed("", "Plan."),
        [("rec", NESTED), ("get_time", {})],
    ),
    "granite": (
        {"calls": "granite"},
        "<|tool_call|>"
        + json.dumps([{"name": "rec", "arguments": NESTED}, {"name": "get_time", "arguments": {}}]),
        Parsed(),
        [("rec", NESTED), ("get_time", {})],
    ),
    "granite 3.2 thinking": (
        {"calls": "granite", "reasoning": "granite"},
        "Here is my thought process:\nHere is why.\n\nHere is my response:\nYes. Here is more.",
        Parsed("Yes. Here is more.", "Here is why."),
        [],
    ),
    "phi4_mini": (
        {"calls": "phi4_mini"},
        "<|tool_call|>" + json.dumps({"name": "rec", "arguments": NESTED}) + "<|/tool_call|>",
        Parsed(),
        [("rec", NESTED)],
    ),
    "phi4_mini functools": (
        {"calls": "phi4_mini_json"},
        "functools" + json.dumps([{"name": "rec", "arguments": NESTED}]),
        Parsed(),
        [("rec", NESTED)],
    ),
    "pythonic": (
        {"calls": "pythonic"},
        "[get_weather(city='Zürich – 北京', days=3), rec(rec={'id': 7, \"tags\": ['a;b', 'q\"uote', \"</tool_call>\"], "
        "'in': {'x': {},}, 'f': -1.5e3, 'n': None}), get_time()]",
        Parsed(),
        [("get_weather", WEATHER), ("rec", NESTED), ("get_time", {})],
    ),
    "llama4_pythonic": (
        {"calls": "llama4_pythonic"},
        "<|python_start|>[write_file(path='a\\'b\\n\\x41\\u00e9\\U0001f642\\d', tags=(1, -2.50, +3, True,), "
        "options={1: .5})]<|python_end|>",
        Parsed(),
        [("write_file", {"path": "a'b\nAé🙂\\d", "tags": [1, -2.5, 3, True], "options": {"1": 0.5}})],
    ),
    "gpt-oss": (
        {"calls": "openai", "reasoning": "openai_gptoss"},
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.rec <|constrain|>json<|message|>"
        + json.dumps(NESTED)
        + "<|call|><|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>",
        Parsed("I look.", "Need weather."),
        [("rec", NESTED), ("get_time", {})],
    ),
    "gpt-oss answer": (
        {"calls": "openai", "reasoning": "openai_gptoss"},
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello\n world<|return|>",
        Parsed("Hello\n world", "One.Two."),
        [],
    ),
}


@pytest.fixture
def run() -> Any:
    """`parse`."""
    return parse


@pytest.fixture
def cut_up() -> Any:
    """`cut`."""
    return cut


@pytest.fixture(params=FORMATS)
def example(request: pytest.FixtureRequest) -> Any:
    """(options of `parse`, text, content and reasoning, calls) of a format."""
    return FORMATS[request.param]


@pytest.fixture
def examples() -> Any:
    """All of them."""
    return FORMATS


@pytest.fixture
def read_alike() -> Any:
    """Gives what a text is read as: whole, by characters and cut at random, each by a parser of its own, all the same.

    Takes: what makes a parser, the text, the source of cuts.
    """
    return _read_alike


def _read_alike(make: Callable[[], Any], text: str, source: random.Random) -> Parsed:
    whole, *others = (
        Parsed.of([event for part in parts for event in parser.push(part)] + parser.finish())
        for parts in ([text], list(text), cut(text, source))
        for parser in (make(),)
    )
    for other in others:
        assert other == whole, text
    return whole
