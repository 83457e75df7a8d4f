"""Which models the table of h200.py measures, and how: those of the anchors, as they are or in another form.

A label is a model's name, or "MODEL+VARIANT". Weights are dummies, so a form needs no checkpoint: what config.json
would say of one is written into a temporary folder beside the model's other files.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SETTINGS_VARIABLE: Final = "ONELOOP_BENCH_SETTINGS"
"""More settings of the engine (anchors.py), as JSON: the driver that makes it hands none on."""


@dataclass(frozen=True, slots=True)
class Variant:
    """settings: of the engine. config: what config.json has beside the model's own. batches: of decode steps; none: as
    the anchors have them."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = ()


PLAIN: Final = Variant()
VARIANTS: Final[Mapping[str, Variant]] = {
    "fp8": Variant(settings={"quantization": "fp8", "kv_cache_dtype": "fp8"}, batches=(1, 256)),
    "fp8block": Variant(settings={"quantization": "fp8-block", "kv_cache_dtype": "fp8"}, batches=(1, 256)),
    "w4a16": Variant(
        config={
            "quantization_config": {
                "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
            }
        },
        batches=(1, 16),
    ),
    "steps8k": Variant(settings={"max_num_batched_tokens": 8192}),
}  # fmt: skip
"""fp8: weights quantised by row while they are loaded, keys and values in 8 bits too. fp8block: by block.
w4a16: as a GPTQ checkpoint. steps8k: steps of up to 8,192 tokens instead of 2,048."""


def split_label(label: str) -> tuple[str, Variant]:
    """A label's model and variant. ValueError names a variant that is not there."""
    model, plus, name = label.partition("+")
    if not plus:
        return model, PLAIN
    if name not in VARIANTS:
        raise ValueError(f"{label}: {name!r} is no variant; there are {', '.join(VARIANTS)}")
    return model, VARIANTS[name]


@contextmanager
def model_folder(plain: Path, variant: Variant) -> Iterator[Path]:
    """The model's folder; where the variant's config says more than the model's, a temporary one with links to it."""
    if not variant.config:
        yield plain
        return
    with tempfile.TemporaryDirectory(prefix="oneloop-variant-") as parent:
        folder = Path(parent, plain.name)
        folder.mkdir()
        for file in plain.resolve().iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config | dict(variant.config)), encoding="utf-8")
        yield folder
