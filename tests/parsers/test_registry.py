"""Which format a template asks for, and formats by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.errors import ConfigError
from oneloop.parsers import registry
from oneloop.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from oneloop.parsers.tools import hermes

if TYPE_CHECKING:
    from collections.abc import Iterable

TEMPLATES = {
    # what of a model's template tells its format, as it stands there
    "hermes": (
        "<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n</tool_call>",
        "hermes", None,
    ),
    "qwen3": (
        "{%- if '</think>' in message.content %}…<tool_call>\\n{\"name\": \"' }}…'\", \"arguments\": ' }}",
        "hermes", "qwen3",
    ),
    "qwen3 coder": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
        "qwen3_coder", None,
    ),
    "deepseek v3": (
        "{{'<｜Assistant｜>'}}…<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'",
        "deepseek_v3", None,
    ),
    "deepseek v3.1": ("{{'<｜Assistant｜>'}}{{'</think>'}}{{'<think>'}}…<｜tool▁sep｜>", "deepseek_v3", "deepseek_v3"),
    "deepseek r1": ("{{'<｜Assistant｜><think>\\n'}}…split('</think>')…<｜tool▁sep｜>", "deepseek_v3", "deepseek_v3"),
    "deepseek r1, first": ("{{'<｜Assistant｜>'}}…split('</think>')…<｜tool▁sep｜>", "deepseek_v3", "deepseek_r1"),
    "functionary": ("<|start_header_id|>…<|python_tag|>…<function=example_function_name>{…}</function>", None, None),
    "seed": ("<seed:tool_call>\\n<function=f>\\n<parameter=p>", None, None),
    "glm 4.5": (
        "<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>…<think></think>",
        "glm45", "qwen3",
    ),
    "kimi k2": ("{{ '<|im_assistant|>assistant<|im_middle|>' }}", "kimi_k2", None),
    "llama 3.1": (
        "<|start_header_id|>…'Respond in the format {\"name\": function name, \"parameters\": dictionary'",
        "llama3_json", None,
    ),
    "mistral": ("[AVAILABLE_TOOLS]…[TOOL_CALLS]…", "mistral", None),
    "magistral": ("[THINK]…[/THINK]…[TOOL_CALLS]…[ARGS]", "mistral", "mistral"),
    "granite": (
        "<|start_of_role|>…respond only with <|tool_call|> followed by a JSON list…<think></think>",
        "granite", "granite",
    ),
    "phi 4 mini": ("<|tool_call|>' + (tool_call['function'] | tojson) + '<|/tool_call|>", "phi4_mini", None),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    "llama 4": ("<|python_start|>…<|header_start|>", "pythonic", None),
    "plain": ("{% for message in messages %}<|im_start|>{{ message.role }}", None, None),
    "llama 3 without tools": ("<|start_header_id|>{{ message['role'] }}<|end_header_id|>", None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str) -> None:
    template, calls, reasoning = TEMPLATES[name]
    found, thinking = tool_format("auto", template), reasoning_format("auto", template)
    assert (found and found.name) == calls
    assert (thinking and thinking.name) == reasoning
    assert tool_format("none", template) is None
    assert reasoning_format("none", template) is None


def test_names_are_unique_and_found() -> None:
    for formats, find in ((TOOL_FORMATS, tool_format), (REASONING_FORMATS, reasoning_format)):
        names = [name for each in formats for name in (each.name, *each.aliases)]
        assert len(set(names)) == len(names)
        for each in formats:
            for name in (each.name, *each.aliases):
                assert find(name, "") is each


@pytest.mark.parametrize("find", [tool_format, reasoning_format])
def test_unknown_names(find: Any) -> None:
    with pytest.raises(ConfigError, match="there is no format 'nope'"):
        find("nope", "")


def test_formats_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point by its name; one of the other kind is no such format."""
    point = EntryPoint("mine", "oneloop.parsers.tools.hermes:FORMAT", "oneloop.parsers")

    def points(*, group: str, name: str) -> Iterable[EntryPoint]:
        return [point] if (group, name) == ("oneloop.parsers", "mine") else []

    monkeypatch.setattr(registry, "entry_points", points)
    assert tool_format("mine", "") is hermes.FORMAT
    with pytest.raises(ConfigError):
        reasoning_format("mine", "")
