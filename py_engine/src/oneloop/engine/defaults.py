"""A model's own generation settings: sampling defaults and end tokens from generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop.engine.params import SamplingDefaults
from oneloop.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_NAME = "generation_config.json"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Generation:
    """What generation_config.json says."""

    defaults: SamplingDefaults
    eos_token_ids: tuple[int, ...]


def read_generation(source: str, model: Path) -> Generation:
    """Read the generation config that the setting `source` means.

    source: "auto" = the model folder's file where it has one; "none" = nothing but the usual defaults (end tokens still
    count); else a folder that must have the file. model: the model's folder, or its GGUF file. Raises ModelError or
    ConfigError.
    """
    if source in ("auto", "none"):
        file = model / FILE_NAME
        config = _read(file) if file.is_file() else {}
    else:
        file = Path(source) / FILE_NAME
        if not file.is_file():
            raise ModelError(source, f"there is no {FILE_NAME} in this folder")
        config = _read(file)
    defaults = SamplingDefaults() if source == "none" else SamplingDefaults.from_generation_config(config)
    return Generation(defaults, _end_tokens(config, file))


def _read(file: Path) -> Mapping[str, Any]:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(file.name, f"larger than {MAX_FILE_BYTES} bytes")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(file.name, f"not valid JSON: {type(error).__name__}") from None
    if not isinstance(config, dict):
        raise ModelError(file.name, "not a JSON object")
    return config


def _end_tokens(config: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelError(file.name, "must be a token id or a list of them", item="eos_token_id")
    return tuple(ids)
