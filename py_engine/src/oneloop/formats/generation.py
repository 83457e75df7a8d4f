"""GenerationDefaults: what a model's generation_config.json says about sampling and end tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from oneloop.errors import ModelError
from oneloop.formats.json_file import read_json_object

FILE_NAME = "generation_config.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """None or empty = the file says nothing. Names as in SamplingParams.

    do_sample is not looked at: a request says whether it samples by its temperature.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Cap on the new tokens of a request that names no limit."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def hf_generation_defaults(folder: Path) -> GenerationDefaults:
    """Defaults of a model folder; where generation_config.json is absent, config.json's token ids.

    ModelError names the key that is of the wrong type or out of range.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        config = folder / "config.json"
        values = read_json_object(config, max_bytes=_MAX_BYTES)
        ids = {key: values.get(key) for key in ("bos_token_id", "eos_token_id")}
        return _defaults(str(config), ids)
    return _defaults(str(path), read_json_object(path, max_bytes=_MAX_BYTES))


def _defaults(file: str, values: dict[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=_real(file, values, "temperature", 0.0, 100.0),
        top_p=_real(file, values, "top_p", 0.0, 1.0),
        top_k=_integer(file, values, "top_k", 0, 1 << 31),
        min_p=_real(file, values, "min_p", 0.0, 1.0),
        repetition_penalty=_real(file, values, "repetition_penalty", 1e-3, 1e3),
        max_new_tokens=_integer(file, values, "max_new_tokens", 1, 1 << 31),
        bos_token_id=_integer(file, values, "bos_token_id", 0, 1 << 31),
        eos_token_ids=_token_ids(file, values, "eos_token_id"),
    )


def _real(file: str, values: dict[str, Any], key: str, low: float, high: float) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(file, f"is {value!r}, a number is needed", item=key)
    if not isfinite(value) or not low <= value <= high:
        raise ModelError(file, f"{value} is out of range, {low} to {high} are possible", item=key)
    return float(value)


def _integer(file: str, values: dict[str, Any], key: str, low: int, high: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(file, f"is {value!r}, a whole number from {low} to {high} is needed", item=key)
    return value


def _token_ids(file: str, values: dict[str, Any], key: str) -> tuple[int, ...]:
    value = values.get(key)
    if value is None:
        return ()
    entries = value if isinstance(value, list) else [value]
    if len(entries) > 1024:
        raise ModelError(file, f"lists {len(entries)} ids, at most 1024 are allowed", item=key)
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < 1 << 31:
            raise ModelError(file, f"{entry!r} is no token id", item=key)
    return tuple(dict.fromkeys(entries))
