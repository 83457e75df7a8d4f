"""quantization_config of config.json → QuantizationSpec. Refuses by name what is not supported."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from oneloop.errors import ConfigError
from oneloop.formats.quantization.fp8 import Fp8Scheme, float_group_scheme, fp8_scheme
from oneloop.formats.quantization.int4 import Int4Scheme, awq_scheme, gptq_scheme, packed_group_scheme
from oneloop.formats.quantization.spec import PATTERN, QuantizationSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.config import QuantizationName
    from oneloop.formats.json_values import JsonValues

METHODS: Final = ("compressed-tensors", "fbgemm_fp8", "fp8", "awq", "gptq")
"""quant_method of checkpoints."""
WHILE_LOADING: Final[Mapping[str, Fp8Scheme]] = {
    "fp8": Fp8Scheme(scales="channel", stored=False),
    "fp8-block": Fp8Scheme(scales="block", stored=False),
}
"""--quantization → what is made of a checkpoint of plain numbers."""

_HEAD: Final = "lm_head"
_MAX_IGNORED: Final = 1 << 16
_MAX_NAME: Final = 200


def read_quantization(config: JsonValues) -> QuantizationSpec | None:
    """How the file's maps are stored; None: as plain numbers. config: all of config.json.

    ModelError names the key that is missing, impossible or not supported.
    """
    key = "quantization_config" if "quantization_config" in config else "compression_config"
    if key not in config:
        return None
    values = config.object(key)
    method = values.string(
        "quant_method", default="compressed-tensors" if "config_groups" in values else None
    )
    if method == "compressed-tensors":
        ignored = _names(values, "ignore")
        return QuantizationSpec(method=method, scheme=_only_group(values), ignored=ignored)
    if method == "fbgemm_fp8":
        scheme: Fp8Scheme | Int4Scheme = Fp8Scheme(scales="channel")
    elif method == "fp8":
        scheme = fp8_scheme(values)
    elif method == "awq":
        scheme = awq_scheme(values)
    elif method == "gptq":
        scheme = gptq_scheme(values)
    else:
        values.fail("quant_method", f"{method[:60]!r} is not supported; supported are {', '.join(METHODS)}")
    ignored = (*_names(values, "modules_to_not_convert"), *_names(values, "ignored_layers"))
    return QuantizationSpec(method=method, scheme=scheme, ignored=(_HEAD, *ignored))


def chosen_quantization(
    found: QuantizationSpec | None, wanted: QuantizationName | None, model: str
) -> QuantizationSpec | None:
    """What a model is served with. found: in its files. wanted: by --quantization. ConfigError where they disagree."""
    if wanted is None or (found is not None and found.method == wanted):
        return found
    if found is not None:
        message = (
            f"is {wanted}, but {model} is quantised already, by {found.method}; leave --quantization away"
        )
        raise ConfigError("quantization", message)
    if wanted not in WHILE_LOADING:
        ways = " or ".join(WHILE_LOADING)
        raise ConfigError(
            "quantization", f"is {wanted}, but {model} is not; {ways} quantises it while loading"
        )
    return QuantizationSpec(method=wanted, scheme=WHILE_LOADING[wanted])


def _only_group(config: JsonValues) -> Fp8Scheme | Int4Scheme:
    """The scheme of compressed-tensors' config_groups: one group, of all linear maps."""
    groups = config.object("config_groups")
    names = list(config.raw("config_groups"))
    if len(names) != 1:
        config.fail("config_groups", f"has {len(names)} groups; one for all linear maps is supported")
    group = groups.object(names[0])
    if group.raw("targets") != ["Linear"]:
        group.fail("targets", f"{str(group.raw('targets'))[:60]} is not supported; supported is ['Linear']")
    weights = group.object("weights")
    kind = weights.string("type", default="int"), weights.integer("num_bits", 1, 64, default=8)
    if kind not in (("float", 8), ("int", 4)):
        weights.fail(
            "type", f"{kind[1]}-bit {kind[0]} is not supported; supported are 8-bit float and 4-bit int"
        )
    if kind == ("float", 8):
        return float_group_scheme(group)
    layout = config.string("format", default="pack-quantized")
    if layout != "pack-quantized":
        config.fail("format", f"{layout!r} is not supported for 4 bits; supported is pack-quantized")
    return packed_group_scheme(group)


def _names(config: JsonValues, key: str) -> tuple[str, ...]:
    """A list of module names and patterns; nothing where it is absent."""
    names = config.raw(key) or []
    if (
        not isinstance(names, list)
        or len(names) > _MAX_IGNORED
        or not all(isinstance(name, str) and 0 < len(name) <= _MAX_NAME for name in names)
    ):
        config.fail(key, "is no list of module names")
    for name in names:
        if name.startswith(PATTERN):
            try:
                re.compile(name.removeprefix(PATTERN))
            except re.error as error:
                config.fail(key, f"{name!r} is no regular expression: {error}")
    return tuple(names)
