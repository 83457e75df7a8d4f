"""The formats by name, and which of them a model's template asks for.

Formats of others are entry points of the group `oneloop.parsers`: name → a ToolFormat or a ReasoningFormat. They are
loaded when they are named.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

from oneloop.errors import ConfigError
from oneloop.parsers import harmony
from oneloop.parsers.formats import Format, ReasoningFormat, ToolFormat
from oneloop.parsers.reasoning import granite as granite_thinking
from oneloop.parsers.reasoning import mistral as mistral_thinking
from oneloop.parsers.reasoning import think
from oneloop.parsers.tools import (
    deepseek_v3,
    glm45,
    granite,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    phi4_mini,
    pythonic,
    qwen3_coder,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRY_POINTS = "oneloop.parsers"

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    harmony.TOOLS,
    kimi_k2.FORMAT,
    deepseek_v3.FORMAT,
    mistral.FORMAT,
    granite.FORMAT,
    phi4_mini.FORMAT,
    qwen3_coder.FORMAT,
    glm45.FORMAT,
    pythonic.FORMAT,
    hermes.FORMAT,
    llama3_json.FORMAT,
)
"""In the order in which a template is held against them: those that others could be taken for come last."""
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    harmony.REASONING,
    mistral_thinking.FORMAT,
    granite_thinking.FORMAT,
    think.KIMI_K2,
    think.DEEPSEEK_R1,
    think.DEEPSEEK_V3,
    think.QWEN3,
)

F = TypeVar("F", bound=Format)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of that name; "auto": the one that the template asks for, if any; "none": none.

    ConfigError for a name that there is not.
    """
    return _choose("tool_call_parser", name, template, TOOL_FORMATS, ToolFormat)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """As tool_format."""
    return _choose("reasoning_parser", name, template, REASONING_FORMATS, ReasoningFormat)


def _choose(field: str, name: str, template: str, known: Sequence[F], kind: type[F]) -> F | None:
    if name == "none":
        return None
    if name == "auto":
        return next((each for each in known if each.recognises(template)), None)
    for each in known:
        if name == each.name or name in each.aliases:
            return each
    for point in entry_points(group=ENTRY_POINTS, name=name):
        found = point.load()
        if isinstance(found, kind):
            return found
    names = ", ".join(sorted(each.name for each in known))
    raise ConfigError(field, f"there is no format {name!r}; there are auto, none, {names}")
