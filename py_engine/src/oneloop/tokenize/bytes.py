"""A tokenizer without files: every byte is a token of its own number. For engines that have no model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from oneloop.tokenize.pieces import byte_letters
from oneloop.tokenize.template_files import TemplateSource
from oneloop.tokenize.templates import ChatTemplate
from oneloop.tokenize.tokenizer import Tokenizer, TokenizerInfo
from oneloop_core import Vocabulary

TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"
VOCAB_SIZE: Final = 258
"""The bytes, then the two special tokens."""
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat_template: TemplateSource | None = None) -> Tokenizer:
    """Token i is byte i; 256 and 257 begin and end a turn. chat_template: replaces the ChatML one."""
    template = chat_template or TemplateSource(Path("ChatML"), _TEMPLATE)
    backend = Backend(models.BPE(byte_letters(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([TURN_BEGIN, TURN_END])
    special_tokens = {"eos_token": TURN_END}
    pieces = [*(bytes((byte,)) for byte in range(256)), TURN_BEGIN.encode(), TURN_END.encode()]
    special_ids = [256, 257]
    info = TokenizerInfo(
        vocabulary=Vocabulary(pieces, special_ids),
        special_ids=frozenset(special_ids),
        eos_token_ids=(257,),
        special_tokens=special_tokens,
        chat_template=ChatTemplate(template.source, file=str(template.file), special_tokens=special_tokens),
    )
    return Tokenizer(backend, info)
