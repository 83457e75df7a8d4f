"""What a request says of its prompt beside the prompt: tools, documents, how much of it is kept, what is told back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import orjson

from oneloop.api.errors import bad_request
from oneloop.api.limits import MAX_DOCUMENT_BYTES, MAX_DOCUMENTS
from oneloop.api.protocol.fields import shown
from oneloop.tokenize.conversation import Truncation

if TYPE_CHECKING:
    from oneloop.api.limits import Limits
    from oneloop.api.protocol.fields import Fields
    from oneloop.engine.params import ResolvedParams
    from oneloop.tokenize.conversation import TruncationSide

_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTruncation:
    """`truncate_prompt_tokens` and `truncation_side`."""

    max_tokens: int
    """-1: as much as the model takes before the answer that was asked for."""
    side: TruncationSide

    def behind(self, limits: Limits, params: ResolvedParams | None) -> Truncation:
        """With the number of tokens settled. params: of the answer; None where there is none."""
        if self.max_tokens != -1:
            return Truncation(max_tokens=self.max_tokens, side=self.side)
        asked = 0 if params is None else params.min_tokens or 1
        if params is not None and params.max_tokens is not None and not params.max_tokens_is_default:
            asked = params.max_tokens
        return Truncation(max_tokens=max(limits.max_model_len - asked, 1), side=self.side)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldBack:
    """What a reply has beside the answer."""

    token_ids: bool = False
    """`prompt_token_ids`, and each choice's `token_ids`."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens "token_id:5"."""
    offsets: bool = False
    """`prompt_token_offsets`: per token of the prompt the characters [start, end) of its text."""
    prompt_text: bool = False


def read_told_back(fields: Fields) -> ToldBack:
    """The `return_*` fields."""
    return ToldBack(
        token_ids=fields.flag("return_token_ids", False),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids", False),
        offsets=fields.flag("return_token_offsets", False),
        prompt_text=fields.flag("return_prompt_text", False),
    )


def read_truncation(fields: Fields, limits: Limits) -> AskedTruncation | None:
    """None: the prompt is taken whole, or refused."""
    side = fields.choice("truncation_side", _SIDES) or "left"
    max_tokens = fields.integer("truncate_prompt_tokens")
    if max_tokens is None:
        return None
    if max_tokens != -1 and not 1 <= max_tokens <= limits.max_model_len:
        raise fields.refuse(
            "truncate_prompt_tokens",
            f"must be in 1 … {limits.max_model_len} (this model's context), or -1 for what it takes; "
            f"got {shown(max_tokens)}",
        )
    return AskedTruncation(max_tokens=max_tokens, side=cast("TruncationSide", side))


def read_documents(fields: Fields) -> list[dict[str, Any]]:
    """`documents`, for templates that show some: objects, bounded together."""
    documents = fields.array("documents", at_most=MAX_DOCUMENTS) or []
    for index, document in enumerate(documents):
        if type(document) is not dict:
            name = fields.name(f"documents[{index}]")
            raise bad_request(name, f"{name} must be an object, got {shown(document)}")
    try:
        size = len(orjson.dumps(documents))
    except orjson.JSONEncodeError:
        raise fields.refuse("documents", "is nested too deeply") from None
    if size > MAX_DOCUMENT_BYTES:
        raise fields.refuse("documents", f"may have at most {MAX_DOCUMENT_BYTES} bytes, got {size}")
    return documents
