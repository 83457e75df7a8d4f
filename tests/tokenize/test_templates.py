"""Chat templates: the same prompt as transformers renders, messages prepared as clients send them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.errors import ModelError, RequestError
from oneloop.tokenize.template_files import read_templates
from oneloop.tokenize.templates import ChatTemplate

if TYPE_CHECKING:
    from pathlib import Path

    from oneloop.tokenize.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content %}<{{ part['text'] }}>{% endfor %}{% endfor %}"
)
USER = [{"role": "user", "content": "Hi"}]


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, file="model/chat_template.jinja", **options)


def transformers_prompt(source: str, messages: list, **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    return rendered[0]


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U{{ m.content|trim }}\n    {% endif %}\n"
        "{% endfor %}\n",
        "{%- for m in messages -%}{%- if loop.index0 == 1 -%}{%- continue -%}{%- endif -%}"
        "{{ m.content }}{%- endfor -%}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|"
        "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n * 3 ** 2 % 7 }}",
        "{% macro show(m, x='-') %}{{ x }}{{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{{ messages | map(attribute='content') | join('+') }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
        "{{ bos_token }}{{ messages[0].content.split('i')[0].upper() }}"
        "{{ messages[-1]['content'].strip() }}{{ eos_token }}",
        "{{ 'a' ~ 1 ~ none ~ messages|length }}{{ 'x' in 'xyz' }}{{ 1 < 2 <= 2 }}{{ 1 in [1, 2] and 3 not in [1] }}",
        "{{ '%s-%05d' % ('a', 7) }}{{ '{:>6}|{}'.format('b', 2) }}{{ 'ab' * 3 }}{{ [1] + [2] }}"
        "{{ 'a,b' | replace(',', ';') }}",
        "{{ ['b', 'a'] | sort | join }}{{ {'k': 1} | dictsort }}{{ 'a\nb' | indent(3) }}"
        "{{ undefined_name | default('d') }}",
        "{{ dict(a=1)['a'] }}{{ messages[0].get('content') }}{{ messages[0].items() | list }}{{ range(3) | list }}",
        "{% if tools is not none and tools %}T{% endif %}{% if documents %}D{% endif %}{{ add_generation_prompt }}",
        "{{ strftime_now('%Y') }}",
        "{{ messages[0].content[::-1] }}{{ (messages | last).content }}{{ 'é' | tojson }}{{ '<&>' }}{{ '<&>' | e }}",
    ],
)
def test_prompts_equal_transformers(source: str) -> None:
    messages = [
        {"role": "user", "content": " Hi <b> é"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "日本"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "“x” <&>"}}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = transformers_prompt(source, messages, tools=tools, add_generation_prompt=True, **special)
    assert template(source, special_tokens=special).render(messages, tools=tools) == expected


def test_the_embedded_template(embedded: Tokenizer) -> None:
    prompt = embedded.chat_template.render(USER)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert prompt == transformers_prompt(embedded.chat_template.source, USER, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "content_format", "expected"),
    [
        (CHATML, "string", "<|im_start|>user\na\nb<|im_end|>\n"),
        (PARTS, "both", "[user]<a><b>"),
        (ONLY_PARTS, "list", "[user]<a><b>"),
    ],
)
def test_content_parts(source: str, content_format: str, expected: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    compiled = template(source)
    assert compiled.content_format == content_format
    assert compiled.render([{"role": "user", "content": parts}], add_generation_prompt=False) == expected


def test_plain_text_for_a_template_that_reads_parts_only() -> None:
    assert template(ONLY_PARTS).render(USER, add_generation_prompt=False) == "[user]<Hi>"


@pytest.mark.parametrize("content", ["", None, "absent"])
@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_empty_content_is_empty_text(role: str, content: str | None) -> None:
    message = {"role": role} if content == "absent" else {"role": role, "content": content}
    prompt = template(CHATML).render([*USER, message, *USER], add_generation_prompt=False)
    assert f"<|im_start|>{role}\n<|im_end|>\n" in prompt
    assert "None" not in prompt


def test_tool_call_arguments_are_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    assert template(source).render([message]) == '{"city": "Köln"}'
    call["function"]["arguments"] = "not json"
    assert template(source).render([message]) == '"not json"'
    assert call["function"]["arguments"] == "not json"


def test_reasoning_reaches_the_template_under_the_name_it_reads() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }};{% endfor %}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert template(source).render([{"role": "assistant", "content": "x", name: "why"}]) == "why/why;"


@pytest.mark.parametrize("text", ["The answer is", "The answer is ", " x "])
@pytest.mark.parametrize("source", [CHATML, CHATML.replace("m['content']", "m['content']|trim")])
def test_continue_final_message_equals_transformers(source: str, text: str) -> None:
    messages = [*USER, {"role": "assistant", "content": text}]
    expected = transformers_prompt(source, messages, continue_final_message=True)
    prompt = template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == expected
    assert prompt.rstrip().endswith(text.strip())


def test_continue_final_message_of_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": parts}]
    prompt = template(PARTS).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "[assistant]<a><b"
    assert parts[1]["text"] == "b"


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="does not show") as caught:
        template("{{ 1 }}").render(USER, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_both_continuation_and_generation_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="combined"):
        template(CHATML).render(USER, continue_final_message=True)


def test_kwargs_reach_the_template() -> None:
    source = "{{ enable_thinking }}{{ messages[0].content }}"
    assert template(source).render(USER, chat_template_kwargs={"enable_thinking": False}) == "FalseHi"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "x"},
        {"tokenize": True},
        {"tools": []},
        {"messages": []},
        {"padding": True},
        {"truncation": True},
        {"return_dict": True},
        {"not an identifier": 1},
        {"_private": 1},
        {"x": "y" * (1 << 20)},
        {f"k{i}": i for i in range(10_000)},
        {"deep": json.loads("[" * 900 + "]" * 900)},
    ],
    ids=lambda kwargs: str(kwargs)[:24],
)
def test_reserved_and_oversized_kwargs_are_refused(kwargs: dict) -> None:
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(USER, chat_template_kwargs=kwargs)
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "", "content": "x"}],
        ["x"],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)
def test_malformed_messages_are_refused(messages: list) -> None:
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.field == "messages"


def test_what_a_template_says_reaches_the_client() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    with pytest.raises(RequestError, match="Roles must alternate"):
        template(source).render([{"role": "system", "content": "x"}])


def test_messages_are_not_changed() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None},
    ]
    before = json.dumps(messages)
    template(CHATML).render(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% if a %}", "{{ a | no_such_filter }}", "{% nope %}"]
)
def test_broken_templates_are_refused_at_start(source: str) -> None:
    with pytest.raises(ModelError, match=r"model/chat_template\.jinja"):
        template(source)


def test_a_template_of_its_own_for_tools() -> None:
    compiled = template("plain", tool_source="with tools")
    assert compiled.render(USER) == "plain"
    assert compiled.render(USER, tools=[{"type": "function"}]) == "with tools"


def test_where_templates_are_looked_for(tmp_path: Path) -> None:
    assert read_templates(tmp_path, {}) is None
    assert read_templates(tmp_path, {"chat_template": "c"}).source == "c"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    found = read_templates(tmp_path, {"chat_template": named})
    assert (found.source, found.tool_source) == ("d", "t")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert read_templates(tmp_path, {"chat_template": "c"}).source == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    found = read_templates(tmp_path, {"chat_template": "c"})
    assert (found.source, found.tool_source) == ("file", "tool file")


@pytest.mark.parametrize("value", [3, [{"name": "x"}], [{"name": "rag", "template": "t"}], {"a": "b"}])
def test_malformed_template_entries_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="chat_template"):
        read_templates(tmp_path, {"chat_template": value})
