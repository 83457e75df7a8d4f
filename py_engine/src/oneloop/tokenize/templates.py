"""Chat templates: messages → prompt text, as transformers renders them, in a bounded sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jinja2 import Template, TemplateError, TemplateSyntaxError

from oneloop.errors import ModelError, RequestError
from oneloop.tokenize.messages import flatten_content, prepare_messages, wrap_content
from oneloop.tokenize.sandbox import BoundedEnvironment
from oneloop.tokenize.template_limits import TemplateLimitError, weigh
from oneloop.tokenize.watchdog import TimeLimitError, run_limited

RENDER_TIME_LIMIT_S = 1.0
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
ContentFormat = Literal["string", "list", "both"]
"""What a template reads as a message's content: text, a list of typed parts, or either."""

_PROBE = ("oneloopProbeOne", "oneloopProbeTwo")


class ChatTemplate:
    """A model's chat template (and its variant for tools, where it has one). Immutable, thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        file: str,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """file: where the template is from, for errors. special_tokens: bos_token, eos_token, … for the template.

        ModelError for a template that cannot be compiled.
        """
        environment = BoundedEnvironment()
        self.source = source
        self.tool_source = tool_source
        self._file = file
        self._special_tokens = dict(special_tokens or {})
        self._default = self._compile(environment, source)
        self._tool_use = self._compile(environment, tool_source) if tool_source is not None else None
        self.content_format = self._probe_content_format()

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
        if self.content_format == "string":
            prepared = [flatten_content(message) for message in prepared]
        elif self.content_format == "list":
            prepared = [wrap_content(message) for message in prepared]
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

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render within the limits; whatever a template can raise becomes a RequestError."""
        try:
            return run_limited(lambda: _render(template, variables), RENDER_TIME_LIMIT_S)
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
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError) as error:
            # a template is a program; these are the ways in which it fails on input it was not written for
            raise RequestError("messages", f"the chat template fails on these messages: {error}") from error

    def _compile(self, environment: BoundedEnvironment, source: str) -> Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                self._file, f"has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed"
            )
        try:
            return run_limited(lambda: environment.from_string(source), COMPILE_TIME_LIMIT_S)
        except TimeLimitError:
            raise ModelError(self._file, "takes too long to compile", item="chat_template") from None
        except TemplateError as error:
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ModelError(
                self._file, f"is no valid template: {error}{line}", item="chat_template"
            ) from error
        except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise ModelError(self._file, f"cannot be compiled: {error}", item="chat_template") from error

    def _probe_content_format(self) -> ContentFormat:
        """Render a text and a list of two text parts: what appears in the prompt is what the template reads."""
        parts = [{"type": "text", "text": text} for text in _PROBE]
        if not self._shows(parts):
            return "string"
        return "both" if self._shows("".join(_PROBE)) else "list"

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        try:
            prompt = self._run(self._default, variables)
        except RequestError:
            return False
        # a list printed whole shows its quoted keys
        return all(text in prompt for text in _PROBE) and "'text'" not in prompt


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
