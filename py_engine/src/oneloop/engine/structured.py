"""What a request may ask of the form of its answer. Checked here for its shape; the core checks what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import orjson

from oneloop.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_CHOICES = 4096
MAX_SOURCE_BYTES = 256 << 10
"""Bytes of a schema, a pattern, all choices together, or a grammar's text (the core's bound)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar to be compiled, as the core takes it. Equal ones are compiled once."""

    kind: GrammarKind
    source: str | tuple[str, ...]
    """JSON text, a pattern, a grammar's text, or the choices."""
    compact: bool = False
    """JSON without white space."""
    whitespace_pattern: str | None = None
    """What may stand between two tokens of JSON."""
    closed_objects: bool = False
    """Objects that say nothing of additional properties have none."""
    field: str = field(default="structured_outputs", compare=False)
    """The request field it came in, for errors."""

    def spec(self) -> GrammarSpec:
        """Itself: it is made already."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer; exactly one of the first six. Names as vLLM's users know them."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A pattern that the whole answer matches."""
    choice: Sequence[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar in Lark or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with tagged parts that follow schemas."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def spec(self, prefix: str = "structured_outputs.") -> GrammarSpec:
        """The grammar that is asked for. RequestError naming the field, prefix before its name."""
        given = [name for name in _READERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                prefix.rstrip("._"),
                f"{prefix.rstrip('._')} needs exactly one of {', '.join(_READERS)}; got "
                + (" and ".join(given) or "none"),
            )
        name = given[0]
        kind, read = _READERS[name]
        source = read(prefix + name, getattr(self, name))
        pattern = self.whitespace_pattern
        if pattern is not None:
            _text(f"{prefix}whitespace_pattern", pattern)
        return GrammarSpec(
            kind=kind,
            source=source,
            compact=_flag(f"{prefix}disable_any_whitespace", self.disable_any_whitespace),
            whitespace_pattern=pattern,
            closed_objects=_flag(
                f"{prefix}disable_additional_properties", self.disable_additional_properties
            ),
            field=prefix + name,
        )


def read_spec(value: StructuredOutputsParams | GrammarSpec | None) -> GrammarSpec | None:
    """What `SamplingParams.structured_outputs` asks for. RequestError naming the field."""
    if value is None:
        return None
    if not isinstance(value, StructuredOutputsParams | GrammarSpec):
        raise RequestError(
            "structured_outputs", f"structured_outputs must be StructuredOutputsParams, got {_shown(value)}"
        )
    return value.spec()


def json_text(name: str, value: object) -> str:
    """JSON text of a schema or a structural tag: as given, or of an object. RequestError for anything else."""
    if isinstance(value, str):
        return _text(name, value)
    if not isinstance(value, Mapping):
        raise RequestError(name, f"{name} must be an object or JSON text, got {_shown(value)}")
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise RequestError(name, f"{name} is no JSON: {error}") from None
    return _sized(name, text)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(name, f"{name} must be a string that is not empty, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(name, f"{name} holds a lone surrogate, which is no character") from None
    return _sized(name, value)


def _sized(name: str, text: str) -> str:
    if len(text) > MAX_SOURCE_BYTES:
        raise RequestError(name, f"{name} may have at most {MAX_SOURCE_BYTES} bytes, got {len(text)}")
    return text


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(name, f"{name} must be true or false, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """As JSON has it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return "a string" if value else "an empty string"
        case Mapping():
            return "an object"
        case Sequence():
            return f"a list of {len(value)}" if value else "an empty list"
        case int() | float():
            return repr(value)
        case _:
            return f"a {type(value).__name__}"


def _choices(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not 0 < len(value) <= MAX_CHOICES:
        raise RequestError(name, f"{name} must be a list of 1 to {MAX_CHOICES} strings, got {_shown(value)}")
    return tuple(_text(name, text) for text in value)


def _json_object(name: str, value: object) -> str:
    if value is not True:
        raise RequestError(name, f"{name} must be true, or left out, got {_shown(value)}")
    return ""


_READERS: Mapping[str, tuple[GrammarKind, Callable[[str, object], str | tuple[str, ...]]]] = {
    "json": ("json_schema", json_text),
    "regex": ("regex", _text),
    "choice": ("choice", _choices),
    "grammar": ("grammar", _text),
    "json_object": ("json_object", _json_object),
    "structural_tag": ("structural_tag", json_text),
}
FIELDS = tuple(field.name for field in fields(StructuredOutputsParams))
"""Names of all fields, those that name a grammar first."""
