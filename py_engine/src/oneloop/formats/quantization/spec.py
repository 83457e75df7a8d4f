"""QuantizationSpec: which linear maps are not stored as plain numbers, and how. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from oneloop.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection

    from oneloop.formats.quantization.fp8 import Fp8Scheme
    from oneloop.formats.quantization.int4 import Int4Scheme

PATTERN = "re:"
"""What begins a regular expression among `ignored`."""


class StoredTensor(NamedTuple):
    """A tensor as a checkpoint may have it."""

    shapes: tuple[tuple[int, ...], ...]
    """Any one of them; the same number of elements."""
    dtypes: tuple[str, ...]
    """Any one of them; names of safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """One scheme for all linear maps but those that are left alone."""

    method: str
    """quant_method of config.json, or the --quantization that is applied while loading."""
    scheme: Fp8Scheme | Int4Scheme
    ignored: tuple[str, ...] = ("lm_head",)
    """Modules that are stored plainly: whole names, their ends or beginnings between dots, or "re:" and a pattern that
    their beginning matches."""

    def scheme_of(self, modules: Collection[str]) -> Fp8Scheme | Int4Scheme | None:
        """How the modules' weights are stored that are computed as one map; None: as plain numbers.

        modules: checkpoint name prefixes. ModelError where they differ.
        """
        ignored = {module: self._is_ignored(module) for module in modules}
        if len(set(ignored.values())) > 1:
            names = ", ".join(module for module in modules if ignored[module])
            raise ModelError(
                "quantization_config", f"leaves {names} alone, but not what is computed together with it: "
                f"{', '.join(module for module in modules if not ignored[module])}",
            )  # fmt: skip
        return None if True in ignored.values() else self.scheme

    def _is_ignored(self, module: str) -> bool:
        return any(_names(entry, module) for entry in self.ignored)


def _names(entry: str, module: str) -> bool:
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), module) is not None
    return module == entry or module.startswith(entry + ".") or module.endswith("." + entry)
