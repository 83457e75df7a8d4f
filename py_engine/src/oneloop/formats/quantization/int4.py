"""Weights of 4 bits, scaled by groups of a row, and the layouts of config.json that have them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from oneloop.errors import ModelError
from oneloop.formats.quantization.packed import Form, halves_of
from oneloop.formats.quantization.spec import StoredTensor
from oneloop.formats.safetensors import FLOATS

if TYPE_CHECKING:
    from oneloop.formats.json_values import JsonValues

PACKED: Final = 8
"""Weights in a 32-bit word."""
MIDDLE: Final = 8
"""The zero point of groups that have none of their own."""
_WORDS: Final = ("I32",)
_MAX_GROUP: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Scheme:
    """Weights of 4 bits; activations stay as they are."""

    layout: Literal["awq", "gptq", "compressed-tensors"]
    group_size: int | None
    """Inputs that share a scale; None: all of them."""
    zero_points: bool
    """Groups have a zero point of their own; else it is MIDDLE."""
    act_order: bool = False
    """A tensor says which group each input belongs to; else groups follow one another."""
    zeros_less_one: bool = False
    """Stored zero points are one less than what they mean (GPTQ's first format)."""

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """What a checkpoint has for a map: last part of the name → tensor. ModelError where it cannot be packed."""
        groups = self.num_groups(in_size)
        if self.layout == "compressed-tensors":
            tensors = {
                "weight_packed": StoredTensor(((out_size, -(-in_size // PACKED)),), _WORDS),
                "weight_scale": StoredTensor(((out_size, groups),), FLOATS),
            }
            if self.zero_points:
                tensors["weight_zero_point"] = StoredTensor(((-(-out_size // PACKED), groups),), _WORDS)
            tensors["weight_g_idx"] = self._groups_of_inputs(in_size)
            return tensors
        if out_size % PACKED or in_size % (PACKED if self.layout == "gptq" else 1):
            message = (
                f"a map of {in_size} inputs and {out_size} outputs cannot be stored in words of {PACKED} numbers; "
                "name its module in modules_to_not_convert if it is not"
            )
            raise ModelError("config.json", message, item="quantization_config")
        packed = {"awq": (in_size, out_size // PACKED), "gptq": (in_size // PACKED, out_size)}[self.layout]
        tensors = {
            "qweight": StoredTensor((packed,), _WORDS),
            "qzeros": StoredTensor(((groups, out_size // PACKED),), _WORDS),
            "scales": StoredTensor(((groups, out_size),), FLOATS),
        }
        if self.layout == "gptq":
            tensors["g_idx"] = self._groups_of_inputs(in_size)
        return tensors

    def _groups_of_inputs(self, in_size: int) -> StoredTensor:
        return StoredTensor(((in_size,),), _WORDS, optional=not self.act_order)

    def num_groups(self, in_size: int) -> int:
        """Groups of a row."""
        return 1 if self.group_size is None else -(-in_size // self.group_size)

    def word_of(self, zero: int) -> int:
        """The signed 32-bit word of equal zero points, as they are stored."""
        stored = (zero - 1 if self.zeros_less_one else zero) & 15
        return int.from_bytes(bytes([stored << 4 | stored]) * 4, "little", signed=True)

    @property
    def form(self) -> Form:
        """How such weights are kept on a GPU."""
        return Form(4, self.group_size, shifts=self.zero_points, ordered=self.act_order)

    def expert_form(self, num_parts: int, in_size: int) -> Form | None:
        """How a map of experts is kept on a GPU, whose parts are so many in each; None: as plain numbers."""
        return self.form if self.form.is_packable(in_size) else None

    def kept_bytes(self, parts: tuple[int, ...], in_size: int) -> int:
        """Memory of a map of so many results for each part; of 16-bit numbers where no kernel has its groups."""
        if not self.form.is_packable(in_size):
            return 2 * sum(parts) * in_size
        return self.form.kept_bytes(sum(parts), in_size, halves=halves_of(parts))


def awq_scheme(config: JsonValues) -> Int4Scheme:
    """quant_method awq, written by AutoAWQ."""
    _check_bits(config, "bits" if "bits" in config else "w_bit")
    _check_layout(config, ("version", "format"), "gemm", ("gemm",))
    if config.raw("backend") == "llm-awq":
        config.fail("backend", "the layout of llm-awq is not supported; supported is AutoAWQ's gemm")
    group = config.integer("group_size" if "group_size" in config else "q_group_size", -1, _MAX_GROUP)
    zero_points = config.boolean("zero_point", default=True)
    if not zero_points:
        config.fail("zero_point", "false is not supported: the layout has zero points")
    return Int4Scheme(layout="awq", group_size=_group(config, group), zero_points=True)


def gptq_scheme(config: JsonValues) -> Int4Scheme:
    """quant_method gptq."""
    _check_bits(config, "bits")
    layout = _check_layout(config, ("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"))
    if config.boolean("lm_head", default=False):
        config.fail("lm_head", "a quantised output head is not supported")
    if config.boolean("is_marlin_format", default=False):
        config.fail(
            "is_marlin_format", "weights in Marlin's order are not supported; take the GPTQ checkpoint"
        )
    if config.string("pack_dtype", default="int32") != "int32":
        config.fail("pack_dtype", f"{config.raw('pack_dtype')!r} is not supported; supported is int32")
    return Int4Scheme(
        layout="gptq",
        group_size=_group(config, config.integer("group_size", -1, _MAX_GROUP)),
        zero_points=not config.boolean("sym", default=True),
        act_order=config.boolean("desc_act", default=False),
        zeros_less_one=layout == "gptq",
    )


def packed_group_scheme(group: JsonValues) -> Int4Scheme:
    """A group of compressed-tensors' config_groups whose weights are whole numbers of 4 bits."""
    weights = group.object("weights")
    if "input_activations" in group:
        group.fail("input_activations", "only plain activations are supported beside 4-bit weights")
    whole_rows = weights.raw("group_size") in (None, -1)
    strategy = weights.string("strategy", default="channel" if whole_rows else "group")
    if strategy not in ("group", "channel"):
        weights.fail("strategy", f"{strategy!r} is not supported; supported are group, channel")
    size = weights.integer("group_size", 1, _MAX_GROUP) if strategy == "group" else None
    return Int4Scheme(
        layout="compressed-tensors",
        group_size=size,
        zero_points=not weights.boolean("symmetric", default=True),
        act_order=_is_ordered(weights),
    )


def _is_ordered(weights: JsonValues) -> bool:
    """actorder: "group" sorts inputs into groups, and "weight" only changes how the numbers were found."""
    order = weights.raw("actorder")
    if isinstance(order, str):
        names = {"group": True, "dynamic": True, "weight": False, "static": False}
        if order.lower() not in names:
            weights.fail("actorder", f"{order[:40]!r} is not supported; supported are {', '.join(names)}")
        return names[order.lower()]
    return weights.boolean("actorder", default=False)


def _check_layout(config: JsonValues, keys: tuple[str, str], default: str, supported: tuple[str, ...]) -> str:
    """The value in lower case under the first of the two names that is there."""
    key = keys[0] if keys[0] in config else keys[1]
    layout = config.string(key, default=default).lower()
    if layout not in supported:
        config.fail(key, f"{layout[:40]!r} is not supported; supported is {', '.join(supported)}")
    return layout


def _check_bits(config: JsonValues, key: str) -> None:
    if (bits := config.integer(key, 1, 64)) != 4:
        config.fail(key, f"{bits} is not supported; supported is 4")


def _group(config: JsonValues, size: int) -> int | None:
    if size == 0:
        config.fail("group_size", "is 0; -1 means whole rows")
    return None if size == -1 else size
