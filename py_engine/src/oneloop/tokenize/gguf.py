"""A tokenizer built directly from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from oneloop.tokenize.pieces import SPACE_MARK, byte_level_piece, byte_of, marked_piece, sentencepiece_piece
from oneloop.tokenize.pretokenizers import PRE_TOKENIZERS
from oneloop.tokenize.templates import ChatTemplate
from oneloop.tokenize.tokenizer import Tokenizer, TokenizerInfo
from oneloop_core import Vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from oneloop.formats.gguf_metadata import GgufMetadata
    from oneloop.tokenize.template_files import TemplateSource

_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_PRE = "tokenizer.ggml.pre"
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    "<|return|>",
    "<|call|>",
)
"""Tokens that end a turn whatever the file's eos_token_id says (chat models often keep the base model's)."""


@dataclass(frozen=True, slots=True)
class _Vocab:
    """The token list with its types, checked."""

    metadata: GgufMetadata
    tokens: list[str]
    types: NDArray[np.int32]
    ids: dict[str, int]

    def of_type(self, *kinds: int) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isin(self.types, kinds))]


def gguf_tokenizer(metadata: GgufMetadata, *, chat_template: TemplateSource | None = None) -> Tokenizer:
    """Build the tokenizer, with the file's chat template or the one given instead.

    ModelError names the key that is missing, malformed or not supported.
    """
    kind = metadata.string("tokenizer.ggml.model")
    vocab = _read_vocab(metadata)
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(vocab)
        pieces = [byte_level_piece(token) for token in vocab.tokens]
        strip_leading_space = False
    elif kind == "llama":
        add_space_prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", default=True)
        backend, add_bos = _sentencepiece_bpe(vocab, add_space_prefix=add_space_prefix), True
        pieces = [sentencepiece_piece(token) for token in vocab.tokens]
        strip_leading_space = add_space_prefix
    else:
        metadata.fail("tokenizer.ggml.model", f"'{kind}' is not supported; supported are gpt2 and llama")
    added_piece = str.encode if kind == "gpt2" else marked_piece
    for i in vocab.of_type(_CONTROL, _USER_DEFINED, _UNKNOWN):
        pieces[i] = added_piece(vocab.tokens[i])
    for i in vocab.of_type(_UNUSED):
        pieces[i] = b""
    _add_special_tokens(backend, vocab)
    special = _special_ids(vocab)
    _add_bos_eos(backend, vocab, special, add_bos=add_bos)
    special_tokens = {f"{name}_token": vocab.tokens[i] for name, i in special.items()}
    special_ids = vocab.of_type(_CONTROL, _UNKNOWN)
    info = TokenizerInfo(
        vocabulary=Vocabulary(pieces, special_ids, strip_leading_space=strip_leading_space),
        special_ids=frozenset(special_ids),
        bos_token_id=special.get("bos"),
        eos_token_ids=_eos_token_ids(vocab, special),
        special_tokens=special_tokens,
        chat_template=_chat_template(metadata, special_tokens, chat_template),
    )
    return Tokenizer(backend, info)


def _chat_template(
    metadata: GgufMetadata, special_tokens: dict[str, str], override: TemplateSource | None
) -> ChatTemplate | None:
    """The template that was given, else the file's (and its variant for tools)."""
    if override is not None:
        return ChatTemplate(override.source, file=str(override.file), special_tokens=special_tokens)
    if _TEMPLATE not in metadata:
        return None
    tool_key = f"{_TEMPLATE}.tool_use"
    return ChatTemplate(
        metadata.string(_TEMPLATE),
        file=metadata.file,
        tool_source=metadata.string(tool_key) if tool_key in metadata else None,
        special_tokens=special_tokens,
    )


def _read_vocab(metadata: GgufMetadata) -> _Vocab:
    tokens = metadata.strings(_TOKENS)
    if not tokens:
        metadata.fail(_TOKENS, "is empty")
    # as llama.cpp names them, so that an empty token can be neither met nor missed
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        double = next(i for i, token in enumerate(tokens) if ids[token] != i)
        metadata.fail(_TOKENS, f"token {double} appears again as {ids[tokens[double]]}")
    if _TYPES in metadata:
        types = metadata.numbers(_TYPES, len(tokens)).astype(np.int32)
    else:
        types = np.full(len(tokens), _NORMAL, dtype=np.int32)
    return _Vocab(metadata, tokens, types, ids)


def _byte_level_bpe(vocab: _Vocab) -> tuple[Backend, bool]:
    """The backend, and whether this family adds a BOS by default."""
    metadata = vocab.metadata
    name = metadata.string(_PRE)
    family = PRE_TOKENIZERS.get(name)
    if family is None:
        metadata.fail(
            _PRE, f"pre-tokenizer '{name}' is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [_split_merge(metadata, i, merge) for i, merge in enumerate(metadata.strings(_MERGES))]
    backend = _bpe(vocab, merges, ignore_merges=family.ignore_merges)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in family.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, family.add_bos


def _split_merge(metadata: GgufMetadata, index: int, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        metadata.fail(_MERGES, f"entry {index} is no pair of tokens")
    return left, right


def _sentencepiece_bpe(vocab: _Vocab, *, add_space_prefix: bool) -> Backend:
    """SentencePiece BPE knows no merges: any two neighbours whose union is a token may merge, best score first."""
    metadata = vocab.metadata
    scores = metadata.numbers(_SCORES, len(vocab.tokens)).astype(np.float64)
    if not np.isfinite(scores).all():
        metadata.fail(_SCORES, "has entries that are not finite")
    for i in vocab.of_type(_BYTE):
        if byte_of(vocab.tokens[i]) is None:
            metadata.fail(_TOKENS, f"token {i} is a byte token but is not written <0xAB>")
    backend = _bpe(vocab, _merges_by_score(vocab, scores), byte_fallback=True)
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(vocab: _Vocab, scores: NDArray[np.float64]) -> list[tuple[str, str]]:
    """Every split of every normal token into two tokens, best score of the whole first."""
    ids = vocab.ids
    found: list[tuple[float, int, str, str]] = []
    for i in vocab.of_type(_NORMAL, _USER_DEFINED, _UNUSED):
        token = vocab.tokens[i]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[i], cut, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _bpe(vocab: _Vocab, merges: list[tuple[str, str]], **options: Any) -> Backend:
    unknown = vocab.of_type(_UNKNOWN)
    if unknown and options.get("byte_fallback"):
        options |= {"unk_token": vocab.tokens[unknown[0]], "fuse_unk": True}
    try:
        return Backend(models.BPE(vocab.ids, merges, **options))
    except Exception as error:  # the tokenizers library raises plain Exception
        vocab.metadata.fail(_MERGES, f"cannot be used: {error}")


def _add_special_tokens(backend: Backend, vocab: _Vocab) -> None:
    """Tokens that are recognised in text before anything else cuts it."""
    for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        tokens = [
            AddedToken(vocab.tokens[i], special=special, normalized=False) for i in vocab.of_type(*kinds)
        ]
        backend.add_tokens(tokens)


def _special_ids(vocab: _Vocab) -> dict[str, int]:
    """bos, eos, unk, pad, eot, … where the file names them."""
    names = {
        "bos": "bos_token_id",
        "eos": "eos_token_id",
        "unk": "unknown_token_id",
        "pad": "padding_token_id",
        "sep": "seperator_token_id",
        "eot": "eot_token_id",
        "eom": "eom_token_id",
    }
    defaults = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    found: dict[str, int] = {}
    for name, key in names.items():
        full_key = f"tokenizer.ggml.{key}"
        if full_key in vocab.metadata:
            found[name] = vocab.metadata.integer(full_key, 0, len(vocab.tokens) - 1)
        elif defaults.get(name) in vocab.ids:
            found[name] = vocab.ids[defaults[name]]
    return found


def _add_bos_eos(backend: Backend, vocab: _Vocab, special: dict[str, int], *, add_bos: bool) -> None:
    metadata = vocab.metadata
    parts = ["$A"]
    named: list[tuple[str, int]] = []
    for name, default, at in (("bos", add_bos, 0), ("eos", False, len(parts))):
        key = f"tokenizer.ggml.add_{name}_token"
        if not metadata.boolean(key, default=default):
            continue
        if name not in special:
            if key in metadata:
                metadata.fail(f"tokenizer.ggml.{name}_token_id", f"is missing although {key} is true")
            continue
        token = vocab.tokens[special[name]]
        named.append((token, special[name]))
        parts.insert(at if name == "bos" else len(parts), token)
    if named:
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=named)


def _eos_token_ids(vocab: _Vocab, special: dict[str, int]) -> tuple[int, ...]:
    """The file's own end tokens first, then special tokens known by name.

    In the harmony format <|end|> only closes one message of several, so it ends nothing where <|return|> exists.
    """
    ends = [special[name] for name in ("eos", "eot", "eom") if name in special]
    markers = set(vocab.of_type(_CONTROL, _USER_DEFINED))
    harmony = "<|return|>" in vocab.ids and "<|call|>" in vocab.ids
    for token in _END_TOKENS:
        token_id = vocab.ids.get(token)
        if token_id in markers and token_id is not None and not (harmony and token == "<|end|>"):
            ends.append(token_id)
    return tuple(dict.fromkeys(ends))
