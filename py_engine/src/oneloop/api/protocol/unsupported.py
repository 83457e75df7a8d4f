"""Fields that clients know and this server does not do (yet), and the values of each that ask for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.protocol.fields import Fields

_ABSENT: tuple[Any, ...] = ()
_COMMON: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "watermarking": (False,),
    "repetition_detection": _ABSENT,
    "routed_experts_prompt_start": _ABSENT,
    "stream_interval": (1,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "logits_processors": ([],),
    "prompt_embeds": _ABSENT,
}
CHAT: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": _ABSENT,
    "web_search_options": _ABSENT,
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "return_mm_kwargs": (False,),
}
COMPLETION: Mapping[str, tuple[Any, ...]] = {**_COMMON, "suffix": ("",)}
TOKENIZE: Mapping[str, tuple[Any, ...]] = {
    "mm_processor_kwargs": ({},),
}


def refuse_unsupported(fields: Fields, table: Mapping[str, tuple[Any, ...]]) -> None:
    """Mark every field of the table as read; a 400 naming the first one that asks for something."""
    if not fields.has_any(table):
        return
    for name, harmless in table.items():
        value = fields.given(name)
        if value is not None and not any(_same(value, accepted) for accepted in harmless):
            raise bad_request(fields.name(name), f"{fields.name(name)} is not supported yet; leave it out.")


def _same(value: Any, accepted: Any) -> bool:
    """Equality as JSON has it: true is not 1, but 1 is 1.0."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
