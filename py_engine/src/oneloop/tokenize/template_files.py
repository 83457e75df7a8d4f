"""Where a model folder keeps its chat template: chat_template.jinja, chat_template.json, tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneloop.errors import ModelError
from oneloop.formats.json_file import read_json_object

_MAX_BYTES = 4 << 20
_TOOL_NAME = "tool_use"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text and the file it is from."""

    file: Path
    source: str
    tool_source: str | None = None
    """The template to use when the request has tools, where the model has one of its own for that."""


def read_templates(folder: Path, config: Mapping[str, Any]) -> TemplateSource | None:
    """The folder's templates, None for a base model. config: its tokenizer_config.json.

    A chat_template.jinja wins over everything else, as in transformers.
    """
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        tool = folder / "additional_chat_templates" / f"{_TOOL_NAME}.jinja"
        return TemplateSource(
            plain, read_template_file(plain), read_template_file(tool) if tool.is_file() else None
        )
    legacy = folder / "chat_template.json"
    if legacy.is_file():
        return _from_value(legacy, read_json_object(legacy, max_bytes=_MAX_BYTES).get("chat_template"))
    return _from_value(folder / "tokenizer_config.json", config.get("chat_template"))


def read_template_file(path: Path) -> str:
    """A template's source. ModelError for what cannot be read, is too large or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ModelError(str(path), f"is larger than {_MAX_BYTES} bytes")
        return raw.decode("utf-8")
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(str(path), "is not valid UTF-8") from error


def _from_value(file: Path, value: Any) -> TemplateSource | None:
    """A template, or a list of named ones."""
    if value is None:
        return None
    if isinstance(value, str):
        return TemplateSource(file, value)
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("name") if isinstance(entry, dict) else None
        source = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelError(str(file), "must be a string or a list of named templates", item="chat_template")
        named[name] = source
    if "default" not in named:
        raise ModelError(str(file), "has no template named 'default'", item="chat_template")
    return TemplateSource(file, named["default"], named.get(_TOOL_NAME))
