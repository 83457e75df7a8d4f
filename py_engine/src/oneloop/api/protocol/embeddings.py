"""POST /v1/embeddings: the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.protocol.completions import read_prompts
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.protocol.prompt_fields import AskedTruncation, read_truncation
from oneloop.api.protocol.sampling import Scheduling, read_scheduling
from oneloop.engine.pooling import POOLINGS, pooling_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams
    from oneloop.executor.base import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A checked request."""

    model: str | None
    prompts: list[str | list[int]]
    params: ResolvedParams
    dimensions: int | None
    """Numbers of a vector that are given, from its start; None: all."""
    normalize: bool
    base64: bool
    """Whether vectors are base64 of little-endian float32, instead of lists."""
    add_special_tokens: bool
    truncation: AskedTruncation | None
    scheduling: Scheduling
    ignored: list[str]


def read_embedding(members: Mapping[str, Any], limits: Limits, info: ModelInfo) -> EmbeddingRequest:
    """Check a body. ApiError (400) naming the field. info: of the served model."""
    fields = Fields(members)
    model = fields.text("model")
    if not info.hidden_size:
        raise fields.refuse("model", "gives no embeddings on this server: its executor has no hidden states")
    if fields.has("messages"):
        raise fields.refuse("messages", "is not supported here; send input")
    prompts = read_prompts(fields.given("input"), limits, "input")
    normalize = fields.flag("normalize", fields.flag("use_activation", True))
    return EmbeddingRequest(
        model=model,
        prompts=prompts,
        params=pooling_params(fields.choice("pooling", POOLINGS) or "last"),
        dimensions=_read_dimensions(fields, info),
        normalize=normalize,
        base64=fields.choice("encoding_format", ("float", "base64")) == "base64",
        add_special_tokens=fields.flag("add_special_tokens", True),
        truncation=read_truncation(fields, limits),
        scheduling=read_scheduling(fields, limits),
        ignored=fields.unread(),
    )


def _read_dimensions(fields: Fields, info: ModelInfo) -> int | None:
    """`dimensions`: only where the model was trained for vectors that are cut, as it says itself."""
    size, whole, sizes = fields.integer("dimensions"), info.hidden_size, info.short_vectors
    if size is None or size == whole:
        return None
    if sizes is None:
        raise fields.refuse(
            "dimensions",
            f"cannot be chosen for this model: parts of its vectors of {whole} numbers mean nothing by themselves",
        )
    if sizes and size not in sizes:
        raise fields.refuse("dimensions", f"must be one of {', '.join(map(str, sizes))}, got {shown(size)}")
    if not 1 <= size < whole:
        raise fields.refuse("dimensions", f"must be in 1 … {whole}, got {shown(size)}")
    return size
