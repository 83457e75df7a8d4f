"""Chat templates: messages → prompt text, as transformers renders them, in a bounded sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from oneloop.errors import ModelError, RequestError
from oneloop.tokenize.messages import flatten_content, prepare_messages, wrap_content
from oneloop.tokenize.sandbox import BoundedEnvironment
from oneloop.tokenize.template_limits import TemplateLimitError, weigh
from oneloop.tokenize.template_probes import CallForm, Print, call_form, content_format, names_role
from oneloop.tokenize.watchdog import TimeLimitError, run_limited

RENDER_TIME_LIMIT_S = 1.0
PROBE_TIME_LIMIT_S = 1.0
"""Of all that is rendered to find out what a template reads."""
COMPILE_TIME_LIMIT_S = 4.0
MAX_TEMPLATE_CHARS = 1 << 20

RESERVED_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
"""Names that chat_template_kwargs may not set: they are arguments of their own, or would change what a render is."""
_MAX_KWARGS = 64
_MAX_KWARGS_WEIGHT = 1 << 16
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PLAIN_ROLES = {"developer": "system", "function": "tool"}
"""What newer and older names of a role mean to templates that do not know them: they would drop the message."""


class ChatTemplate:
    """A model's chat template (and its variant for tools, where it has one). Immutable, thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        file: str,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        compile_limit_s: float = COMPILE_TIME_LIMIT_S,
    ) -> None:
        """file: where the template is from, for errors. special_tokens: bos_token, eos_token, … for the template.

        ModelError for a template that cannot be compiled.
        """
        environment = BoundedEnvironment()
        self.source = source
        self.tool_source = tool_source
        self._file = file
        self._compile_limit_s = compile_limit_s
        self._special_tokens = dict(special_tokens or {})
        self._default = self._compile(environment, source)
        self._tool_use = self._compile(environment, tool_source) if tool_source is not None else None
        self._roles = {role: plain for role, plain in _PLAIN_ROLES.items() if not self._names(role)}
        budget = _Budget()
        self.content_format = content_format(self._print(self._default, budget))
        of_calls = self._tool_use or self._default
        self.call_form = call_form(self._print(of_calls, budget), parts=self.content_format == "list")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Takes up to RENDER_TIME_LIMIT_S: call it off the event loop.

        messages: dicts with role, content (text, None, or a list of text parts) and whatever else the template
        reads. continue_final_message: the prompt ends inside the last message. RequestError names the field.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message", "cannot be combined with add_generation_prompt")
        extra = _checked_kwargs(chat_template_kwargs or {})
        prepared = prepare_messages(messages)
        for message in prepared:
            self._fit(message)
        final_text = _tag_final_message(prepared) if continue_final_message else None
        template = self._tool_use if self._tool_use is not None and tools else self._default
        variables = {
            **self._special_tokens,
            **extra,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._run(template, variables)
        return prompt if final_text is None else _cut_at_tag(prompt, final_text)

    def _run(
        self, template: Template, variables: Mapping[str, Any], limit_s: float = RENDER_TIME_LIMIT_S
    ) -> str:
        """Render within the limits; whatever a template can raise becomes a RequestError."""
        try:
            return run_limited(lambda: _render(template, variables), limit_s)
        except TimeLimitError:
            raise RequestError(
                "messages", f"the chat template ran longer than {RENDER_TIME_LIMIT_S:g} s"
            ) from None
        except TemplateLimitError as error:
            raise RequestError("messages", str(error)) from error
        except TemplateError as error:
            raise RequestError("messages", f"the chat template refuses these messages: {error}") from error
        except RecursionError as error:
            raise RequestError("messages", "the chat template nests too deeply") from error
        except Exception as error:
            # a template is a program: it may fail in any way on input that it was not written for
            raise RequestError("messages", f"the chat template fails on these messages: {error}") from error

    def _compile(self, environment: BoundedEnvironment, source: str) -> Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                self._file, f"has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed"
            )
        try:
            return run_limited(lambda: environment.from_string(source), self._compile_limit_s)
        except TimeLimitError:
            raise ModelError(self._file, "takes too long to compile", item="chat_template") from None
        except TemplateError as error:
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ModelError(
                self._file, f"is no valid template: {error}{line}", item="chat_template"
            ) from error
        except Exception as error:  # what Python says of the code that was made of it
            raise ModelError(self._file, f"cannot be compiled: {error}", item="chat_template") from error

    def _names(self, role: str) -> bool:
        return names_role(self.source, role) or names_role(self.tool_source or "", role)

    def _fit(self, message: dict[str, Any]) -> None:
        """Give a prepared message the form that this template reads."""
        message["role"] = self._roles.get(message["role"], message["role"])
        if self.content_format == "string":
            flatten_content(message)
        elif self.content_format == "list":
            wrap_content(message)
        if message.get("tool_calls"):
            _fit_calls(message, self.call_form)

    def _print(self, template: Template, budget: _Budget) -> Print:
        """The template as probes render it."""
        tools = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}]
        rest = {**self._special_tokens, "documents": None, "add_generation_prompt": False}

        def show(variables: Mapping[str, Any]) -> str:
            calls = len(variables["messages"]) > 1
            shown = {**rest, "tools": tools if calls else None, **variables}
            try:
                return self._run(template, shown, budget.left_s())
            except RequestError as error:
                if isinstance(error.__cause__, TemplateLimitError):
                    budget.spend()
                raise

        return show


class _Budget:
    """Time for probes. A template that is too costly for one of them is not asked again."""

    def __init__(self) -> None:
        self._deadline = monotonic() + PROBE_TIME_LIMIT_S

    def left_s(self) -> float:
        """RequestError where nothing is left."""
        left_s = self._deadline - monotonic()
        if left_s <= 0:
            raise RequestError("messages", "the chat template is too costly")
        return left_s

    def spend(self) -> None:
        """Leave nothing."""
        self._deadline = 0.0


def _fit_calls(message: dict[str, Any], form: CallForm) -> None:
    """message: a copy of the caller's, but what it holds is the caller's own."""
    if form.arguments_are_text:
        message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    if form.content_is_null and not message["content"]:
        message["content"] = None


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {
        **call,
        "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
    }


def _render(template: Template, variables: Mapping[str, Any]) -> str:
    weigh(variables)
    return template.render(variables)


def _checked_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Bounded, and no name that means something else."""
    field = "chat_template_kwargs"
    if len(kwargs) > _MAX_KWARGS:
        raise RequestError(field, f"has {len(kwargs)} entries, at most {_MAX_KWARGS} are allowed")
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise RequestError(field, "names must be identifiers")
        if name in RESERVED_KWARGS:
            raise RequestError(field, f"{name} cannot be set here")
    try:
        weigh(kwargs, _MAX_KWARGS_WEIGHT)
    except (TemplateLimitError, RecursionError) as error:
        raise RequestError(field, "is too large or nested too deeply") from error
    return kwargs


def _tag_final_message(messages: list[dict[str, Any]]) -> str:
    """Append the tag to the last message's text and return that text without it."""
    if not messages:
        raise RequestError("messages", "is empty; there is no final message to continue")
    final = messages[-1]
    content = final["content"]
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return text
    raise RequestError("continue_final_message", "the final message holds no text to continue")


def _cut_at_tag(prompt: str, final_text: str) -> str:
    """The prompt up to the end of the final message's text, as transformers cuts it."""
    tag = _CONTINUE_TAG.strip()
    at = prompt.rfind(tag)
    if at < 0 or final_text.strip() not in prompt:
        raise RequestError(
            "continue_final_message", "the chat template does not show the final message as it is"
        )
    if prompt.startswith(_CONTINUE_TAG, at):
        return prompt[:at]
    # the template trims messages, so the text's own trailing space is not part of the prompt
    return prompt[:at].rstrip()
