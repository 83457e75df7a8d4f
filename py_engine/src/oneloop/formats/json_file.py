"""JSON files of a model folder: bounded in size and depth, errors named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneloop.errors import ModelError


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file. ModelError for everything else: too large, not UTF-8, malformed, too deep."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error.strerror or error}") from error
    if len(raw) > max_bytes:
        raise ModelError(str(path), f"is larger than {max_bytes} bytes")
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes, file: str, *, item: str | None = None) -> dict[str, Any]:
    """The object that `raw` is; duplicate keys are refused."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ModelError(file, "is not valid UTF-8", item=item) from error
    except RecursionError as error:
        raise ModelError(file, "is nested too deeply", item=item) from error
    except _DuplicateKeyError as error:
        raise ModelError(file, "this name appears twice", item=str(error)[:120]) from error
    except ValueError as error:
        raise ModelError(file, f"is not valid JSON: {error}", item=item) from error
    if not isinstance(value, dict):
        raise ModelError(file, "is not a JSON object", item=item)
    return value


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKeyError(name)
            seen.add(name)
    return result
