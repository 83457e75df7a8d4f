"""The templates of some sixty models: the same prompts as transformers, tools and calls included; nothing is lost."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.errors import RequestError
from oneloop.tokenize.conversation import ChatForm
from oneloop.tokenize.messages import read_conversation
from oneloop.tokenize.renderers import harmony, mistral
from oneloop.tokenize.renderers.hf import template_writer
from oneloop.tokenize.templates import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ID = "call12345"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(identity: str = ID) -> dict[str, Any]:
    """As clients send it: no content, arguments as JSON text."""
    function = {"name": "get_weather", "arguments": '{"place": "Köln"}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": identity, "type": "function", "function": function}],
    }


def result(text: str, identity: str = ID) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": identity, "name": "get_weather"}


CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [user("Hi <b> é")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi\n")],
    "turns": [user(" A "), {"role": "assistant", "content": "B"}, user("日本")],
    "call": [user("Weather?"), call(), result("12")],
    "called": [
        user("Weather?"),
        call(),
        result("12"),
        {"role": "assistant", "content": "12."},
        user("Thanks"),
    ],
    "empty_answer": [user("A"), {"role": "assistant", "content": ""}, user("B")],
    "empty_system": [{"role": "system", "content": ""}, user("B")],
    "empty_result": [user("A"), call(), result("")],
}
SHOW_NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B.jinja", "LFM2-8B-A1B.jinja", "LFM2.5-Instruct.jinja", "Reka-Edge.jinja",
    "ibm-granite-granite-3.3-2B-Instruct.jinja", "llama-cpp-rwkv-world.jinja", "microsoft-Phi-3.5-mini-instruct.jinja",
}  # fmt: skip
"""Templates that print what an assistant said and nothing of what it called, whatever they are given."""


@pytest.fixture(scope="module")
def folder(fetch_templates: Path) -> Path:
    return fetch_templates


@pytest.fixture(scope="module")
def templates(folder: Path) -> dict[str, ChatTemplate]:
    found = {
        file.name: ChatTemplate(file.read_text(encoding="utf-8"), file=file.name, special_tokens=SPECIAL)
        for file in sorted(folder.glob("*.jinja"))
    }
    assert len(found) > 60
    return found


def as_transformers_wants(template: ChatTemplate, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages in the form that this template reads: transformers passes on what it is given."""
    form = template.call_form
    for message in messages:
        content: Any = message["content"] or ""
        if template.content_format == "list":
            content = [{"type": "text", "text": content}]
        shown = {**message, "content": content}
        if "tool_calls" in message:
            (one,) = message["tool_calls"]
            arguments = one["function"]["arguments"]
            if not form.arguments_are_text:
                arguments = json.loads(arguments)
            shown["tool_calls"] = [{**one, "function": {**one["function"], "arguments": arguments}}]
            if form.content_is_null:
                shown["content"] = None
        yield shown


def writer(template: ChatTemplate, adapt: Any = None) -> Any:
    return template_writer(SimpleNamespace(chat_template=template, special_tokens=SPECIAL), adapt)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_prompts_equal_transformers(
    templates: dict[str, ChatTemplate], chat: str, tools: list[Any] | None
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    compared, differing = 0, []
    for name, template in templates.items():
        messages = list(as_transformers_wants(template, CHATS[chat]))
        try:
            (expected,), _ = render_jinja_template(
                [messages], chat_template=template.source, tools=tools, add_generation_prompt=True, **SPECIAL
            )
        except Exception:  # the template refuses these messages: so must we
            expected = None
        try:
            prompt = writer(template)(read_conversation(CHATS[chat], tools), ChatForm())
        except RequestError:
            prompt = None
        compared += prompt is not None
        if prompt != expected:
            differing.append(name)
        elif prompt is not None and "None" not in template.source:
            assert "None" not in prompt, name
    assert not differing
    assert compared > 50


def test_calls_are_shown(templates: dict[str, ChatTemplate]) -> None:
    """Whatever a template wants, an object or text, an empty content or none: the arguments are in the prompt."""
    silent, refused = set(), set()
    for name, template in templates.items():
        try:
            prompt = writer(template)(read_conversation(CHATS["call"], TOOLS), ChatForm())
        except RequestError:
            refused.add(name)
            continue
        if "Köln" not in prompt:
            silent.add(name)
        else:
            assert "{'place': 'K" not in prompt, name  # as Python prints an object
    assert silent == SHOW_NO_CALLS
    assert len(refused) <= 6


def test_forms_that_were_found_out(templates: dict[str, ChatTemplate]) -> None:
    distilled = templates["deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja"].call_form
    assert (distilled.arguments_are_text, distilled.content_is_null) == (True, True)
    hermes = templates["Qwen-Qwen2.5-7B-Instruct.jinja"].call_form
    assert (hermes.arguments_are_text, hermes.content_is_null) == (False, False)


DESCRIBED = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "get_weather", "description": "Weather", '
    '"parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}]'
    "[/AVAILABLE_TOOLS]"
)
MISTRAL = {
    "<s>[INST]Hi[/INST]": ([user("Hi")], None),
    "<s>[INST]Hi\n\nthere[/INST]": ([user("Hi"), user("there")], None),
    "<s>[INST]Be brief\n\nHi[/INST]": ([{"role": "developer", "content": "Be brief"}, user("Hi")], None),
    "<s>[INST]A[/INST]B</s>[INST]C[/INST]": (
        [user("A"), {"role": "assistant", "content": "B"}, user("C")],
        None,
    ),
    f"<s>{DESCRIBED}[INST]Hi[/INST]": ([user("Hi")], TOOLS),
    f'<s>{DESCRIBED}[INST]Weather?[/INST][TOOL_CALLS][{{"name": "get_weather", "arguments": {{"place": "Köln"}}, '
    f'"id": "{ID}"}}]</s>[TOOL_RESULTS]{{"content": 12, "call_id": "{ID}"}}[/TOOL_RESULTS]': (
        [user("Weather?"), call(), result("12")],
        TOOLS,
    ),
}
"""What mistral-common 1.13.1 makes of these, with its tokenizer of Mistral Nemo."""


def test_mistral_prompts_equal_mistral_commons(templates: dict[str, ChatTemplate]) -> None:
    write = writer(templates["mistralai-Mistral-Nemo-Instruct-2407.jinja"], mistral.adapt)
    for expected, (messages, tools) in MISTRAL.items():
        assert write(read_conversation(messages, tools), ChatForm()) == expected


@pytest.mark.parametrize(
    "name", ["mistralai-Mistral-Nemo-Instruct-2407.jinja", "Mistral-Small-3.2-24B-Instruct-2506.jinja"]
)
def test_what_mistrals_templates_refuse(templates: dict[str, ChatTemplate], name: str) -> None:
    """Ids of any form, turns of one role in a row, a later system message: refused as they are, taken when adapted."""
    long = "chatcmpl-tool-0123456789abcdef"
    messages = [
        user("A"),
        user("Weather?"),
        call(long),
        result("12", long),
        {"role": "system", "content": "x"},
    ]
    conversation = read_conversation(messages, TOOLS)
    with pytest.raises(RequestError):
        writer(templates[name])(conversation, ChatForm())
    prompt = writer(templates[name], mistral.adapt)(conversation, ChatForm())
    assert prompt.count(mistral.call_id(long)) >= 1
    assert long not in prompt


def test_gpt_oss_as_its_template_has_it(templates: dict[str, ChatTemplate]) -> None:
    """Where the template loses nothing (and adds nothing: it ends instructions in empty lines), the two agree."""
    template = templates["openai-gpt-oss-120b.jinja"]
    for chat in ("user", "turns"):
        conversation = read_conversation(CHATS[chat])
        assert harmony.write(conversation, ChatForm()) == writer(template)(conversation, ChatForm())
