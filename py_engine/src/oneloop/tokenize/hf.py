"""A tokenizer from a Hugging Face folder: tokenizer.json, tokenizer_config.json, special_tokens_map.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeGuard

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from oneloop.errors import ModelError
from oneloop.formats.generation import hf_generation_defaults
from oneloop.formats.json_file import read_json_object
from oneloop.tokenize.pieces import PieceRule, piece_rule
from oneloop.tokenize.template_files import TemplateSource, read_templates
from oneloop.tokenize.templates import ChatTemplate
from oneloop.tokenize.tokenizer import Tokenizer, TokenizerInfo
from oneloop_core import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAX_TOKENIZER_BYTES = 128 << 20
_MAX_CONFIG_BYTES = 16 << 20
_MAX_IDS = 1 << 24
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def hf_tokenizer(folder: Path, *, chat_template: TemplateSource | None = None) -> Tokenizer:
    """The folder's tokenizer and its chat template; end tokens are those of generation_config.json too.

    chat_template: replaces the folder's own. ModelError names the file that is missing or malformed.
    """
    config = _read_optional(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    special_tokens = _special_tokens(folder, config)
    _add_missing_tokens(backend, folder, config, special_tokens)
    _set_bos_eos(backend, config, special_tokens)
    backend.no_padding()
    backend.no_truncation()
    rule = piece_rule(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
    if isinstance(rule, str):
        raise ModelError(str(folder / "tokenizer.json"), rule, item="decoder")
    added = backend.get_added_tokens_decoder()
    ids = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
    pieces = _pieces(backend, folder, rule, added)
    special_ids = [i for i, token in added.items() if token.special]
    info = TokenizerInfo(
        vocabulary=Vocabulary(pieces, special_ids, strip_leading_space=rule.strip_leading_space),
        special_ids=frozenset(special_ids),
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=_eos_token_ids(folder, ids.get("eos_token")),
        special_tokens=special_tokens,
        chat_template=_chat_template(folder, config, special_tokens, chat_template),
    )
    return Tokenizer(backend, info)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, max_bytes=_MAX_CONFIG_BYTES) if path.is_file() else {}


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tekken.json")):
            return _convert(folder)
        raise ModelError(
            str(path), "is missing, and there is no other tokenizer file; give one with --tokenizer"
        )
    if path.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise ModelError(str(path), f"is larger than {_MAX_TOKENIZER_BYTES} bytes")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(str(path), f"is no valid tokenizer: {error}") from error


def _convert(folder: Path) -> Backend:
    """Folders without a tokenizer.json: transformers converts their older files. Slow to import, so only here."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return Backend.from_str(converted.backend_tokenizer.to_str())
    except (ImportError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ModelError(
            str(folder), f"has no tokenizer.json, and its tokenizer cannot be converted: {error}"
        ) from error


def _token_text(value: Any) -> str | None:
    """A special token is a string or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … → text; tokenizer_config.json wins over special_tokens_map.json."""
    older = _read_optional(folder / "special_tokens_map.json")
    found: dict[str, str] = {}
    for name in _NAMED:
        text = _token_text(config[name] if name in config else older.get(name))
        if text is not None:
            found[name] = text
    return found


def _add_missing_tokens(
    backend: Backend, folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json knows, at the ids it gives; named special tokens count as special."""
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    entries: dict[str, dict[str, Any]] = listed if _is_id_map(listed) else {}
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        text = _token_text(entry)
        if int(key) in known or text is None:
            continue
        special = entry.get("special") is True
        backend.add_tokens([AddedToken(text, special=special, normalized=entry.get("normalized") is True)])
        if backend.token_to_id(text) != int(key):
            raise ModelError(
                str(folder / "tokenizer_config.json"),
                f"gives token {text!r} id {key}; the vocabulary has it at {backend.token_to_id(text)}",
                item="added_tokens_decoder",
            )
    special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    missing = [text for text in special_tokens.values() if backend.token_to_id(text) not in special_ids]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _is_id_map(value: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) < 9 and isinstance(entry, dict)
        for key, entry in value.items()
    )


def _set_bos_eos(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """tokenizer_config.json's add_bos_token and add_eos_token, where given, replace tokenizer.json's rule."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    parts = ["$A"]
    named: list[tuple[str, int]] = []
    for name in ("bos", "eos"):
        text = special_tokens.get(f"{name}_token")
        if config.get(f"add_{name}_token") is not True or text is None:
            continue
        parts.insert(0 if name == "bos" else len(parts), text)
        token_id = backend.token_to_id(text)
        if token_id is not None and (text, token_id) not in named:
            named.append((text, token_id))
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=named)


def _pieces(backend: Backend, folder: Path, rule: PieceRule, added: Mapping[int, AddedToken]) -> list[bytes]:
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= _MAX_IDS:
        raise ModelError(str(folder / "tokenizer.json"), f"has ids up to {size - 1}", item="vocab")
    pieces = [b""] * size
    for token, token_id in vocab.items():
        pieces[token_id] = rule.piece(token)
    for token_id, added_token in added.items():
        pieces[token_id] = rule.added_piece(added_token.content)
    return pieces


def _eos_token_ids(folder: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The tokenizer's end token and those of generation_config.json (else config.json)."""
    listed: tuple[int, ...] = ()
    if (folder / "generation_config.json").is_file() or (folder / "config.json").is_file():
        listed = hf_generation_defaults(folder).eos_token_ids
    own = (eos_token_id,) if eos_token_id is not None else ()
    return tuple(dict.fromkeys(own + listed))


def _chat_template(
    folder: Path,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    override: TemplateSource | None,
) -> ChatTemplate | None:
    found = override or read_templates(folder, config)
    if found is None:
        return None
    return ChatTemplate(
        found.source, file=str(found.file), tool_source=found.tool_source, special_tokens=special_tokens
    )
