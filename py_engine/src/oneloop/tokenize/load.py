"""Which tokenizer a path means: a Hugging Face folder or a GGUF file; or bytes, without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.errors import ModelError
from oneloop.formats.gguf import GgufFile, read_gguf
from oneloop.tokenize.bytes import byte_tokenizer
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop.tokenize.hf import hf_tokenizer
from oneloop.tokenize.template_files import TemplateSource, read_template_file

if TYPE_CHECKING:
    from pathlib import Path

    from oneloop.tokenize.tokenizer import Tokenizer


def load_tokenizer(
    path: Path | None, *, gguf: GgufFile | None = None, chat_template_file: Path | None = None
) -> Tokenizer:
    """The tokenizer of a model folder, tokenizer.json's folder or GGUF file, with its chat template.

    path: None: there is no model, bytes are tokens. gguf: the file's header where it was read before.
    chat_template_file: replaces the model's own template. ModelError names the file and key that is missing,
    malformed or not supported.
    """
    override = None
    if chat_template_file is not None:
        override = TemplateSource(chat_template_file, read_template_file(chat_template_file))
    if path is None:
        return byte_tokenizer(chat_template=override)
    if path.is_dir():
        return hf_tokenizer(path, chat_template=override)
    if path.name == "tokenizer.json":
        return hf_tokenizer(path.parent, chat_template=override)
    if not path.is_file():
        message = "no such file or folder; a folder with tokenizer.json or a GGUF file has a tokenizer"
        raise ModelError(str(path), message)
    return gguf_tokenizer((gguf or read_gguf(path)).metadata, chat_template=override)
