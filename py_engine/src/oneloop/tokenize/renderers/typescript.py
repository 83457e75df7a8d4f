"""JSON schemas as TypeScript types: how gpt-oss was taught to read the tools it may call.

Same text as OpenAI's own renderer (openai-harmony), to the letter: what it leaves out of a schema is left out here.
"""

from __future__ import annotations

import json
from typing import Any

_NAMES = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}
_STEP = "    "
_VARIANT = "   "


def type_of(schema: Any, indent: str = "") -> str:
    """The type that a schema describes. indent: of the line it begins on."""
    if not isinstance(schema, dict):
        return "any"
    kind = schema.get("type")
    if "oneOf" in schema and isinstance(schema["oneOf"], list):
        return "".join(f"\n{indent} | {type_of(variant, indent + _VARIANT)}" for variant in schema["oneOf"])
    if isinstance(kind, list):
        return " | ".join(_NAMES.get(name, str(name)) for name in kind)
    match kind:
        case "object":
            found = _object(schema, indent)
        case "array":
            items = schema.get("items")
            found = "Array<any>" if items is None else type_of(items, indent) + "[]"
        case "string" if isinstance(schema.get("enum"), list):
            found = " | ".join(f'"{value}"' for value in schema["enum"] if isinstance(value, str))
        case str() if kind in _NAMES:
            found = _NAMES[kind]
        case _:
            found = "any"
    return f"{found} | null" if schema.get("nullable") is True and kind in _NAMES else found


def _object(schema: dict[str, Any], indent: str) -> str:
    head = f"{indent}// {schema['description']}\n" if isinstance(schema.get("description"), str) else ""
    properties = schema.get("properties")
    required = schema.get("required")
    lines = [
        _property(name, value, indent, needed=isinstance(required, list) and name in required)
        for name, value in (properties.items() if isinstance(properties, dict) else ())
    ]
    return f"{head}{{\n{''.join(lines)}{indent}}}"


def _property(name: str, schema: Any, indent: str, *, needed: bool) -> str:
    given = schema if isinstance(schema, dict) else {}
    lines = _comments(given)
    label = name if needed else f"{name}?"
    default = _default(given)
    variants = given.get("oneOf")
    if not isinstance(variants, list):
        end = "," if default is None else f", // default: {default}"
        lines.append(f"{label}: {type_of(schema, indent + _STEP)}{end}")
        return "".join(f"{indent}{line}\n" for line in lines)
    if default is not None:
        lines.append(f"// default: {default}")
    lines.append(f"{label}:")
    for variant in variants:
        of_variant = _default(variant) if isinstance(variant, dict) else None
        end = "" if of_variant is None else f" // default: {of_variant}"
        lines.append(f" | {type_of(variant, indent + _VARIANT)}{end}")
    lines.append(",")
    return "".join(f"{indent}{line}\n" for line in lines)


def _comments(schema: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if isinstance(schema.get("title"), str):
        lines += [f"// {schema['title']}", "//"]
    if isinstance(schema.get("description"), str):
        lines.append(f"// {schema['description']}")
    if isinstance(schema.get("examples"), list) and schema["examples"]:
        lines += [
            "// Examples:",
            *(f"// - {_json(text)}" for text in schema["examples"] if isinstance(text, str)),
        ]
    return lines


def _default(schema: dict[str, Any]) -> str | None:
    if "default" not in schema:
        return None
    value = schema["default"]
    if isinstance(value, str) and isinstance(schema.get("enum"), list):
        return value
    return _json(value)


def _json(value: Any) -> str:
    """Texts are quoted and not escaped: so the model knows them."""
    if isinstance(value, str):
        return f'"{value}"'
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
