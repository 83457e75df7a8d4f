"""POST /v1/embeddings: the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.protocol.completions import read_prompts
from oneloop.api.protocol.fields import Fields
from oneloop.api.protocol.sampling import Scheduling, read_scheduling
from oneloop.engine.pooling import POOLINGS, pooling_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What is kept of a prompt that is too long."""

    max_tokens: int
    keeps_end: bool
    """Its last tokens, or its first."""

    def apply(self, token_ids: list[int]) -> list[int]:
        """At most max_tokens of them."""
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[-self.max_tokens :] if self.keeps_end else token_ids[: self.max_tokens]


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
    truncation: Truncation | None
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
        truncation=_truncation(fields, limits),
        scheduling=read_scheduling(fields, limits),
        ignored=fields.unread(),
    )


def _truncation(fields: Fields, limits: Limits) -> Truncation | None:
    side = fields.choice("truncation_side", ("left", "right")) or "left"
    max_tokens = fields.integer("truncate_prompt_tokens")
    if max_tokens is None:
        return None
    if max_tokens != -1 and not 1 <= max_tokens <= limits.max_model_len:
        raise fields.refuse(
            "truncate_prompt_tokens",
            f"must be -1 (what the context holds) or in 1 … {limits.max_model_len}, got {max_tokens}",
        )
    return Truncation(
        max_tokens=limits.max_model_len if max_tokens == -1 else max_tokens, keeps_end=side == "left"
    )
