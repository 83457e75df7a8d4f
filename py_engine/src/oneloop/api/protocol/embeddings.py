"""POST /v1/embeddings: the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.protocol.completions import read_prompts
from oneloop.api.protocol.fields import Fields
from oneloop.api.protocol.prompt_fields import AskedTruncation, read_truncation
from oneloop.api.protocol.sampling import Scheduling, read_scheduling
from oneloop.engine.pooling import POOLINGS, pooling_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A checked request."""

    model: str | None
    prompts: list[str | list[int]]
    params: ResolvedParams
    normalize: bool
    base64: bool
    """Whether vectors are base64 of little-endian float32, instead of lists."""
    add_special_tokens: bool
    truncation: AskedTruncation | None
    scheduling: Scheduling
    ignored: list[str]


def read_embedding(members: Mapping[str, Any], limits: Limits, hidden_size: int) -> EmbeddingRequest:
    """Check a body. ApiError (400) naming the field. hidden_size: of the model; 0 where it gives no vectors."""
    fields = Fields(members)
    model = fields.text("model")
    if not hidden_size:
        raise fields.refuse("model", "gives no embeddings on this server: its executor has no hidden states")
    if fields.has("messages"):
        raise fields.refuse("messages", "is not supported here; send input")
    prompts = read_prompts(fields.given("input"), limits, "input")
    dimensions = fields.integer("dimensions")
    if dimensions is not None and dimensions != hidden_size:
        raise fields.refuse(
            "dimensions",
            f"must be {hidden_size}, got {dimensions}: parts of this model's vectors mean nothing by themselves",
        )
    normalize = fields.flag("normalize", fields.flag("use_activation", True))
    return EmbeddingRequest(
        model=model,
        prompts=prompts,
        params=pooling_params(fields.choice("pooling", POOLINGS) or "last"),
        normalize=normalize,
        base64=fields.choice("encoding_format", ("float", "base64")) == "base64",
        add_special_tokens=fields.flag("add_special_tokens", True),
        truncation=read_truncation(fields, limits),
        scheduling=read_scheduling(fields, limits),
        ignored=fields.unread(),
    )
