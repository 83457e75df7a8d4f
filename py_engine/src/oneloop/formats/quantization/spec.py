"""QuantizationSpec: which linear maps are not stored as plain numbers, and how. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from oneloop.errors import ModelError
from oneloop.formats.quantization.names import is_named

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from oneloop.formats.quantization.fp8 import Fp8Scheme
    from oneloop.formats.quantization.int4 import Int4Scheme


_MAX_NAMED: Final = 4
"""Modules in a message."""


class StoredTensor(NamedTuple):
    """A tensor as a checkpoint may have it."""

    shapes: tuple[tuple[int, ...], ...]
    """Any one of them; the same number of elements."""
    dtypes: tuple[str, ...]
    """Any one of them; names of safetensors."""
    optional: bool = False
    """A checkpoint may lack it; where it is there, it must say what is assumed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """One scheme for all linear maps but those that are left alone."""

    method: str
    """quant_method of config.json, or the --quantization that is applied while loading."""
    scheme: Fp8Scheme | Int4Scheme
    ignored: tuple[str, ...] = ("lm_head",)
    """Modules that are stored plainly: whole names, parts of them between dots, or "re:" and a pattern that their
    beginning matches."""
    only: tuple[str, ...] | None = None
    """All others are stored plainly too; None: there are no others."""

    def scheme_of(self, modules: Collection[str]) -> Fp8Scheme | Int4Scheme | None:
        """How the modules' weights are stored that are computed as one map; None: as plain numbers.

        modules: checkpoint name prefixes. ModelError where they differ.
        """
        left = [module for module in modules if self._is_ignored(module)]
        if left and len(left) < len(modules):
            others = [module for module in modules if module not in set(left)]
            message = (
                f"leaves {_some(left)} alone, but not what is computed together with it: {_some(others)}; "
                "take a checkpoint that has them alike"
            )
            raise ModelError("config.json", message, item="quantization_config")
        return None if left else self.scheme

    def _is_ignored(self, module: str) -> bool:
        return is_named(module, self.ignored) or (self.only is not None and not is_named(module, self.only))


def _some(modules: Sequence[str]) -> str:
    """Their names, but not those of hundreds of experts."""
    more = len(modules) - _MAX_NAMED
    return ", ".join(modules[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
