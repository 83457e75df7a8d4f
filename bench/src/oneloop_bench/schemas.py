"""Ten JSON schemas of the kinds that applications ask for: what structured output is timed and sampled with."""

from __future__ import annotations

from typing import Any, Final


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """A closed object. required: which properties; none given: all."""
    names = list(required or properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


PERSON_SCHEMA: Final = _object(
    {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["poet", "engineer", "painter"]}, "maxItems": 4},
    }
)
TREE_SCHEMA: Final = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
        }
    },
}
WIDE_NAMES: Final = tuple(f"field_{index}" for index in range(60))
WIDE_SCHEMA: Final = {
    "type": "object",
    "properties": {name: {"type": ["string", "null"]} for name in WIDE_NAMES},
    "additionalProperties": False,
}
_WEATHER: Final = _object(
    {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "city",
)
_ORDER: Final = _object(
    {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,6}$"},
        "lines": {
            "type": "array",
            "items": _object(
                {
                    "sku": {"type": "string", "minLength": 2, "maxLength": 12},
                    "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 99},
                    "price": {"type": "number", "minimum": 0, "maximum": 10000},
                }
            ),
            "minItems": 1,
            "maxItems": 3,
        },
        "paid": {"type": "boolean"},
    }
)
_EVENT: Final = _object(
    {
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "from": {"type": "string", "format": "ipv4"},
        "run": {"type": "string", "format": "uuid"},
        "level": {"enum": ["debug", "info", "warning", "error"]},
    }
)
_SHAPE: Final = {
    "anyOf": [
        _object({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
        _object(
            {
                "kind": {"const": "rectangle"},
                "sides": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            }
        ),
        {"type": "null"},
    ]
}
_ROW: Final = {
    "type": "array",
    "prefixItems": [{"type": "string", "maxLength": 8}, {"type": "integer"}, {"type": ["boolean", "null"]}],
    "items": False,
    "minItems": 3,
}
_SCORES: Final = {
    "type": "object",
    "patternProperties": {"^q[0-9]$": {"type": "integer", "minimum": -5, "maximum": 5, "multipleOf": 5}},
    "additionalProperties": False,
}
_STEPS: Final = _object(
    {
        "steps": {
            "type": "array",
            "items": _object({"explanation": {"type": "string"}, "output": {"type": "string"}}),
            "minItems": 1,
        },
        "final_answer": {"type": "string"},
    }
)

_CONTACT: Final = _object(
    {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}[.]org$"},
        "tags": PERSON_SCHEMA["properties"]["tags"],
    }
)

SCHEMAS: Final[dict[str, Any]] = {
    "contact": _CONTACT,
    "tree": TREE_SCHEMA,
    "wide": WIDE_SCHEMA,
    "weather": _WEATHER,
    "order": _ORDER,
    "event": _EVENT,
    "shape": _SHAPE,
    "row": _ROW,
    "scores": _SCORES,
    "steps": _STEPS,
}
