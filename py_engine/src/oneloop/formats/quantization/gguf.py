"""The weights of a GGUF file that stay quantised on a GPU: every tensor has a type of its own. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oneloop.formats.quantization.packed import Form, halves_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        "Q4_0": Form(4, 32, shifts=False),
        "Q4_1": Form(4, 32, shifts=True),
        "Q5_0": Form(6, 32, shifts=False),
        "Q5_1": Form(6, 32, shifts=True),
        "Q8_0": Form(8, 32, shifts=False),
        "Q4_K": Form(4, 32, shifts=True),
        "Q5_K": Form(6, 32, shifts=True),
        "Q6_K": Form(6, 16, shifts=False),
    }
)
"""GGUF's name of a type → how it is kept; other types are dequantised while they are loaded."""


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """The types of a map's parts."""

    types: tuple[str, ...]

    def pieces(self) -> tuple[tuple[Form | None, tuple[int, ...]], ...]:
        """Parts side by side that are computed as one, by their indices; None: those that are dequantised."""
        forms = [FORMS.get(kind) for kind in self.types]
        grouped = groupby(range(len(forms)), key=forms.__getitem__)
        return tuple((form, tuple(indices)) for form, indices in grouped)

    def expert_form(self, num_parts: int, in_size: int) -> Form | None:
        """As Int4Scheme.expert_form: parts of several types are kept as plain numbers."""
        first, *others = self.types[:num_parts]
        form = FORMS.get(first)
        return form if form is not None and all(kind == first for kind in others) else None

    def kept_bytes(self, parts: tuple[int, ...], in_size: int) -> int:
        """Memory of a map of so many results for each of its parts, the plain ones in 16 bits."""
        total = 0
        for form, indices in self.pieces():
            sizes = tuple(parts[index] for index in indices)
            if form is None:
                total += 2 * sum(sizes) * in_size
            else:
                halves = halves_of(sizes) if len(sizes) == len(parts) else 1
                total += form.kept_bytes(sum(sizes), in_size, halves=halves)
        return total


@dataclass(frozen=True, slots=True)
class GgufQuantization:
    """See QuantizationSpec, whose place it takes."""

    types: Mapping[str, str] = field(hash=False)
    """Module (Hugging Face's name) → GGUF's name of its weight's type."""
    method: str = "gguf"

    def scheme_of(self, modules: Collection[str]) -> GgufScheme | None:
        """How the weights are kept of modules that are computed as one map; None: all as plain numbers."""
        types = tuple(self.types.get(module, "") for module in modules)
        return GgufScheme(types) if any(kind in FORMS for kind in types) else None
