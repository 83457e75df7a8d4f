"""quantization_config of config.json → QuantizationSpec. Refuses by name what is not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop.errors import ConfigError
from oneloop.formats.quantization.fp8 import Fp8Scheme, float_group_scheme, fp8_scheme
from oneloop.formats.quantization.int4 import Int4Scheme, awq_scheme, gptq_scheme, packed_group_scheme
from oneloop.formats.quantization.names import excluded_modules, module_names
from oneloop.formats.quantization.spec import QuantizationSpec

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
_BLOCK_MODULES: Final = "modules_in_block_to_quantize"
"""Of a layer, the others being left alone; a list of lists."""


def read_quantization(config: JsonValues) -> QuantizationSpec | None:
    """How the file's maps are stored; None: as plain numbers. config: all of config.json.

    ModelError names the key that is missing, impossible or not supported.
    """
    key = quantization_key(config)
    if key is None:
        return None
    values = config.object(key)
    method = values.string(
        "quant_method", default="compressed-tensors" if "config_groups" in values else None
    )
    if method == "compressed-tensors":
        _refuse_others_of_compressed(values)
        ignored = module_names(values, "ignore")
        return QuantizationSpec(method=method, scheme=_only_group(values), ignored=ignored)
    only: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()
    if method == "fbgemm_fp8":
        scheme: Fp8Scheme | Int4Scheme = Fp8Scheme(scales="channel")
    elif method == "fp8":
        scheme = fp8_scheme(values)
    elif method == "awq":
        scheme = awq_scheme(values)
    elif method == "gptq":
        scheme = gptq_scheme(values)
        only = module_names(values, _BLOCK_MODULES) or None
        excluded = excluded_modules(values, "dynamic")
    else:
        values.fail("quant_method", f"{method[:60]!r} is not supported; supported are {', '.join(METHODS)}")
    ignored = (*module_names(values, "modules_to_not_convert"), *module_names(values, "ignored_layers"))
    return QuantizationSpec(method=method, scheme=scheme, ignored=(_HEAD, *ignored, *excluded), only=only)


def quantization_key(config: JsonValues) -> str | None:
    """The key of config.json that says how weights are stored; None where it says nothing."""
    return next((key for key in ("quantization_config", "compression_config") if key in config), None)


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
    place = group if "format" in group else config
    layout = place.string("format", default="pack-quantized")
    if layout != "pack-quantized":
        place.fail("format", f"{layout!r} is not supported for 4 bits; supported is pack-quantized")
    return packed_group_scheme(group)


def _refuse_others_of_compressed(config: JsonValues) -> None:
    """What changes the meaning of a compressed-tensors checkpoint beside its groups."""
    if config.raw("transform_config"):
        config.fail(
            "transform_config", "rotated weights are not supported; take a checkpoint without transforms"
        )
    if config.raw("sparsity_config"):
        sparsity = config.object("sparsity_config")
        layout = sparsity.string("format", default="dense")
        if layout != "dense":
            sparsity.fail("format", f"{layout!r} is not supported; supported is dense")
