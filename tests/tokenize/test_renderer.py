"""Which renderer a model gets, what each makes of messages, and how a prompt is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oneloop.errors import ConfigError, RequestError
from oneloop.tokenize.bytes import byte_tokenizer
from oneloop.tokenize.conversation import ChatForm, Conversation, Message, Tool, ToolCall, Truncation
from oneloop.tokenize.messages import read_conversation, template_message
from oneloop.tokenize.output_text import Ended, TextForm, TextState, next_text, whole_text
from oneloop.tokenize.renderer import Renderer, choose_renderer, kept
from oneloop.tokenize.renderers import hf, mistral
from oneloop.tokenize.template_probes import CallForm
from oneloop.tokenize.templates import ChatTemplate
from oneloop_core import Vocabulary

USER = {"role": "user", "content": "Hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
}


def tokenizer(template: str | None = None, tokens: tuple[str, ...] = ()) -> Any:
    """What renderers ask of one."""
    compiled = None if template is None else ChatTemplate(template, file="t.jinja")
    return SimpleNamespace(
        chat_template=compiled,
        special_tokens={},
        bos_token_id=None,
        token_id=lambda token: tokens.index(token) if token in tokens else None,
    )


def rendered(template: str, messages: list[Any], **form: Any) -> str:
    renderer = Renderer(tokenizer(template), hf.kind)
    return renderer.render_text(read_conversation(messages), ChatForm(**form))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((), "hf"),
        (("[INST]", "[/INST]"), "mistral"),
        (("<|start|>", "<|channel|>", "<|message|>"), "harmony"),
        (("<|start|>",), "hf"),
    ],
)
def test_the_renderer_of_a_tokenizer(tokens: tuple[str, ...], expected: str) -> None:
    assert choose_renderer(tokenizer("x", tokens)).name == expected
    assert choose_renderer(tokenizer("x", tokens), own_template=False).name == "hf"
    assert choose_renderer(tokenizer("x", tokens), "mistral").name == "mistral"
    with pytest.raises(ConfigError, match="none of auto, hf"):
        choose_renderer(tokenizer("x", tokens), "other")  # type: ignore[arg-type]


def test_a_model_without_a_template() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        Renderer(tokenizer(), hf.kind).render_text(read_conversation([USER]), ChatForm())


def test_a_template_of_the_request() -> None:
    assert rendered("own", [USER], chat_template="{{ messages[0].content }}!") == "Hi!"
    for template, says in (("{% for %}", "no valid template"), ("x" * 70_000, "at most 65536")):
        with pytest.raises(RequestError, match=says) as caught:
            rendered("own", [USER], chat_template=template)
        assert caught.value.field == "chat_template"


def test_roles_that_a_template_does_not_know() -> None:
    """They would be dropped; a template that names them keeps them."""
    source = (
        "{% for m in messages %}{% if m.role in ('system', 'tool') %}[{{ m.role }}]{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    messages = [{"role": "developer", "content": "x"}, {"role": "function", "name": "f", "content": "y"}]
    assert rendered(source, messages) == "[system]x[tool]y"
    assert rendered(source.replace("'system'", "'developer'"), messages) == "[developer]x[tool]y"


def of_calls(arguments: str) -> str:
    """A template that prints each call's arguments so."""
    return (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        + arguments.replace("ARGUMENTS", "c.function.arguments")
        + "{% endfor %}{% endfor %}"
    )


OBJECT = of_calls("{% for k, v in ARGUMENTS.items() %}{{ k }}={{ v }};{% endfor %}")
JSON = of_calls("{{ ARGUMENTS | tojson }}")
TEXT = of_calls("{{ '<' + ARGUMENTS + '>' }}")
PRINTED = of_calls("{{ ARGUMENTS }}")
NULL = (
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "form", "expected"),
    [
        (OBJECT, CallForm(), "a=é;"),
        (JSON, CallForm(), '{"a": "é"}'),
        (TEXT, CallForm(arguments_are_text=True), '<{"a": "é"}>'),
        (PRINTED, CallForm(arguments_are_text=True), '{"a": "é"}'),
        (NULL, CallForm(content_is_null=True), 'Hi{"a": "é"}'),
        ("{{ messages[0].content }}", CallForm(), "Hi"),
    ],
)
def test_calls_in_the_form_that_a_template_reads(source: str, form: CallForm, expected: str) -> None:
    assert ChatTemplate(source, file="t").call_form == form
    assert rendered(source, [USER, CALL]) == expected
    assert CALL["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'


def test_an_endless_template_is_not_probed_for_ever() -> None:
    import time

    began = time.monotonic()
    ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", file="t.jinja"
    )
    assert time.monotonic() - began < 4


def test_conversations_and_back() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": CALL["tool_calls"]},
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    ]
    found = read_conversation(messages, tools, [{"text": "d"}])
    assert found == Conversation(
        messages=(
            Message(role="system", content=("a", "b")),
            Message(
                role="assistant",
                reasoning="why",
                tool_calls=(ToolCall(name="f", arguments={"a": "é"}, id="1"),),
            ),
            Message(role="tool", tool_call_id="1", name="f"),
        ),
        tools=(Tool(name="f", parameters={"type": "object"}, strict=True),),
        documents=({"text": "d"},),
    )
    assert found.tools[0].wire() == tools[0]
    shown = template_message(found.messages[1])
    assert (shown["reasoning"], shown["thinking"], shown["content"]) == ("why", "why", "")
    assert None not in shown.values()


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "assistant", "content": "", "tool_calls": ["x"]}], None),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}], None),
        ([{"role": "user", "content": "x", "name": 5}], None),
        ([USER], [{"type": "function"}]),
        ([USER], ["f"]),
    ],
)
def test_malformed_conversations_are_refused(messages: list[Any], tools: list[Any] | None) -> None:
    with pytest.raises(RequestError) as caught:
        read_conversation(messages, tools)
    assert caught.value.field == ("messages" if tools is None else "tools")


def test_mistrals_form() -> None:
    call = ToolCall(name="f", id="call_0123456789")
    adapted = mistral.adapt(
        [
            Message(role="system", content="one"),
            Message(role="user", content="A"),
            Message(role="user", content=("B", "C")),
            Message(role="assistant", content="x", tool_calls=(call,)),
            Message(role="tool", content="y", tool_call_id="call_0123456789"),
            Message(role="tool", content="z", tool_call_id="abcdefghi"),
            Message(role="assistant", content=""),
            Message(role="assistant", content="w"),
            Message(role="developer", content="two"),
        ]
    )
    identity = mistral.call_id("call_0123456789")
    assert identity.isalnum()
    assert len(identity) == 9
    assert [(message.role, message.content) for message in adapted] == [
        ("system", "one\n\ntwo"), ("user", "A\n\nB\nC"), ("assistant", "x"), ("tool", "y"), ("tool", "z"),
        ("assistant", "w"),
    ]  # fmt: skip
    assert adapted[2].tool_calls[0].id == adapted[3].tool_call_id == identity
    assert (adapted[3].name, adapted[4].name, adapted[4].tool_call_id) == ("f", None, "abcdefghi")


@pytest.mark.parametrize(
    ("truncation", "bos", "expected"),
    [
        (None, None, [1, 2, 3, 4]),
        (Truncation(max_tokens=9), None, [1, 2, 3, 4]),
        (Truncation(max_tokens=2), None, [3, 4]),
        (Truncation(max_tokens=2, side="right"), None, [1, 2]),
        (Truncation(max_tokens=2), 1, [1, 4]),
        (Truncation(max_tokens=1), 1, [1]),
        (Truncation(max_tokens=3, side="right"), 1, [1, 2, 3]),
    ],
)
def test_what_a_truncation_keeps(truncation: Truncation | None, bos: int | None, expected: list[int]) -> None:
    ids = [1, 2, 3, 4]
    assert kept(ids, ids, truncation, bos) == expected
    assert kept(list("abcd"), ids, truncation, bos) == ["abcd"[token - 1] for token in expected]


def test_text_and_ids_together() -> None:
    renderer = choose_renderer(byte_tokenizer())
    found = renderer.render_chat(read_conversation([USER]), ChatForm(), Truncation(max_tokens=5))
    assert found.text.endswith("<|im_start|>assistant\n")
    assert bytes(found.token_ids) == b"tant\n"


PIECES = [bytes([i]) for i in range(256)] + [b"<end>", b"three", b" four"]
VOCABULARY = Vocabulary(PIECES, [256])
FORMS = [
    TextForm(),
    TextForm(stop=("three f", "日")),
    TextForm(stop=("three f",), include_stop_str_in_output=True, min_tokens=4),
    TextForm(skip_special_tokens=False),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_token", [True, False])
def test_however_tokens_are_cut_the_text_is_the_same(form: TextForm, by_token: bool) -> None:
    """Every way of cutting in three."""
    tokens = [*b"one ", 257, 258, *"é日".encode()[:4], 257, 32, 102, 256]
    ended = Ended(by_token=by_token)
    whole = whole_text(VOCABULARY, form, tokens, ended)
    for first in range(len(tokens) + 1):
        for second in range(
            first, len(tokens) + (not by_token)
        ):  # the end comes with the token that it is by
            state, text = TextState(), ""
            for start, end in ((0, first), (first, second)):
                added, state = next_text(VOCABULARY, form, state, tokens[start:end], None)
                text += added
            added, state = next_text(VOCABULARY, form, state, tokens[second:], ended)
            assert text + added == whole
            assert state.tail == []


def test_a_tail_stays_short() -> None:
    form, state = TextForm(stop=("xyz",)), TextState()
    tokens = list(("日本 xy" * 500).encode())
    for token in tokens:
        _, state = next_text(VOCABULARY, form, state, [token], None)
        assert len(state.tail) <= 4
    for size in (100, 1000, 3999):
        for start in range(0, 3000, size):
            text, state = next_text(VOCABULARY, form, TextState(), tokens[: start + size], None)
            assert len(state.tail) <= 128
            assert text == bytes(tokens[: start + size]).decode(errors="ignore").removesuffix(
                "y"
            ).removesuffix("x")
