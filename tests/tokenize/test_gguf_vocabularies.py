"""Other families' tokenizers, written to GGUF and built from it, against the tokenizers library and llama.cpp."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest
import tokenizers

from oneloop.errors import ModelError
from oneloop.formats.gguf import read_gguf
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop.tokenize.pieces import byte_letters
from oneloop.tokenize.pretokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.tokenize.tokenizer import Tokenizer

PRE = {"qwen3": "qwen2", "llama3_1": "llama-bpe", "gptoss": "gpt-4o"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
POOLS = (
    "0123456789",
    "  \t\n\r",
    "abcdeABC hello world ",
    "的一是不我日本語かなカナ한국어",
    "😀👨\u200d👩🇩🇪✨e\u0301ß",
    "'s't'RE\"!?.,;:-_()[]{}<>|/",
    "\u00a0\u2003\u3000",
    "١٢٣Ⅳ½",
    "абвгדהदेव",
)


def texts(count: int, special: list[str]) -> list[str]:
    source = random.Random(7)
    found = []
    for _ in range(count):
        pieces = [
            source.choice(special) if source.random() < 0.05 else source.choice(source.choice(POOLS))
            for _ in range(source.randint(1, 30))
        ]
        found.append("".join(pieces))
    return found


def write_gguf(path: Path, name: str, tokenizer_json: Path) -> list[str]:
    """A GGUF with this tokenizer and nothing else, as llama.cpp's converter writes it; its special tokens."""
    data = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocab: dict[str, int] = dict(data["model"]["vocab"])
    added = {token["content"]: token for token in data["added_tokens"]}
    vocab |= {content: token["id"] for content, token in added.items()}
    tokens = [""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    types = [NORMAL] * len(tokens)
    for token in added.values():
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    writer = gguf.GGUFWriter(path, "llama")
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    if name == "llama2":
        types[0] = UNKNOWN
        types[3:259] = [BYTE] * 256
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(spm_scores(tokens, merges))
    else:
        tokens = [token or f"[PAD{i}]" for i, token in enumerate(tokens)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(PRE[name])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(False)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [content for content, token in added.items() if token["special"]]


def spm_scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece's BPE scores: minus the rank of the merge that makes the token."""
    scores = dict.fromkeys(tokens, -1e6)
    for rank, merge in enumerate(merges):
        whole = merge.replace(" ", "")
        if scores.get(whole) == -1e6:
            scores[whole] = -float(rank)
    return [scores[token] for token in tokens]


def has_marks(text: str) -> bool:
    return any(unicodedata.category(character).startswith("M") for character in text)


@pytest.fixture(scope="module", params=["qwen3", "llama3_1", "llama2", "gptoss"])
def converted(
    request: pytest.FixtureRequest,
    fetch_family: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, list[str]]:
    """A GGUF file, the folder it was made from, its special tokens. (Gemma's scores are in no tokenizer.json.)"""
    folder = fetch_family(request.param)
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return path, folder, write_gguf(path, request.param, folder / "tokenizer.json")


@pytest.mark.slow
def test_ids_equal_the_tokenizers_library(converted: tuple[Path, Path, list[str]]) -> None:
    path, family, special = converted
    ours: Tokenizer = gguf_tokenizer(read_gguf(path).metadata)
    theirs = tokenizers.Tokenizer.from_file(str(family / "tokenizer.json"))
    for drawn in texts(1500, special):
        # Qwen's own tokenizer composes characters first; neither GGUF nor llama.cpp knows of that
        text = unicodedata.normalize("NFC", drawn)
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, repr(text)


@pytest.mark.slow
def test_ids_equal_llama_cpp(converted: tuple[Path, Path, list[str]]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path, family, special = converted
    ours = gguf_tokenizer(read_gguf(path).metadata)
    # llama.cpp writes the gpt-4o pattern without its class of combining marks
    compared = [t for t in texts(1500, special) if not family.name.startswith("gptoss") or not has_marks(t)]
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    differing = []
    assert len(compared) > 500
    for text in compared:
        expected = model.tokenize(text.encode(), add_bos=False, special=True)
        if ours.encode(text, add_special_tokens=False) != expected:
            differing.append(text)
    assert differing == []


@pytest.mark.slow
@pytest.mark.parametrize("converted", ["llama2"], indirect=True)
def test_sentencepiece_bos_and_leading_space(converted: tuple[Path, Path, list[str]]) -> None:
    path, _, _ = converted
    tokenizer = gguf_tokenizer(read_gguf(path).metadata)
    ids = tokenizer.encode("Hello")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.encode(" Hello") != ids
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"
    assert tokenizer.eos_token_ids == (2,)


def tiny_gguf(path: Path, **changes: object) -> Path:
    """A GGUF with a byte-level vocabulary of a few tokens; `changes` replaces or (None) drops fields."""
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["a", "b", "ab", "<|im_end|>"],
        "token_type": [NORMAL, NORMAL, NORMAL, CONTROL],
        "merges": ["a b"],
        "eos_token_id": 3,
    } | changes
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build(path: Path) -> Tokenizer:
    return gguf_tokenizer(read_gguf(path).metadata)


def test_a_tiny_vocabulary(tmp_path: Path) -> None:
    tokenizer = build(tiny_gguf(tmp_path / "t.gguf"))
    assert tokenizer.encode("abba<|im_end|>") == [2, 1, 0, 3]
    assert tokenizer.decode([2, 3, 1]) == "abb"


def sentencepiece_gguf(path: Path, **changes: object) -> Path:
    """A SentencePiece vocabulary: bytes, a few letters, and words with the scores that decide what merges."""
    words = {"▁": -3.0, "a": -4.0, "b": -5.0, "c": -6.0, "ab": -1.0, "bc": -0.5, "▁ab": -2.0, "abc": -9.0}
    specials = ["<unk>", "<s>", "</s>"]
    return tiny_gguf(
        path,
        model="llama",
        pre=None,
        merges=None,
        tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *words],
        token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words),
        scores=[0.0] * 259 + list(words.values()),
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokenizer = build(sentencepiece_gguf(tmp_path / "t.gguf"))

    def pieces(text: str) -> list[bytes]:
        return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]

    assert pieces("ab") == [b"<s>", b" ab"]
    # bc has the best score and merges first; then ▁ab cannot arise, but a and bc make abc
    assert pieces("abc") == [b"<s>", b" ", b"abc"]
    assert pieces("bcb") == [b"<s>", b" ", b"bc", b"b"]
    assert pieces("aé") == [b"<s>", b" ", b"a", b"\xc3", b"\xa9"]
    assert pieces("ab</s>ab") == [b"<s>", b" ab", b"</s>", b" ab"]
    assert tokenizer.encode("ab", add_special_tokens=False) == tokenizer.encode("ab")[1:]
    assert tokenizer.decode(tokenizer.encode(" ab é")) == " ab é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_a_sentencepiece_vocabulary_without_the_prefix(tmp_path: Path) -> None:
    tokenizer = build(sentencepiece_gguf(tmp_path / "t.gguf", add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("ab ab")] == [b"ab", b" ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    ("changes", "item", "message"),
    [
        ({"pre": "no-such-thing"}, "tokenizer.ggml.pre", "no-such-thing"),
        ({"pre": None}, "tokenizer.ggml.pre", "missing"),
        ({"model": "bert"}, "tokenizer.ggml.model", "bert"),
        ({"model": None}, "tokenizer.ggml.model", "missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens", "missing"),
        ({"tokens": ["a", "b", "ab", "a"]}, "tokenizer.ggml.tokens", "again"),
        ({"tokens": ["a", "b"]}, "tokenizer.ggml.token_type", "4 entries"),
        ({"merges": None}, "tokenizer.ggml.merges", "missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges", "no pair"),
        ({"merges": ["a x"]}, "tokenizer.ggml.merges", "cannot be used"),
        ({"eos_token_id": 4}, "tokenizer.ggml.eos_token_id", "out of range"),
        ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id", "missing"),
        ({"model": "llama"}, "tokenizer.ggml.scores", "missing"),
        ({"model": "llama", "scores": [0.0, 0.0, 0.0, float("nan")]}, "tokenizer.ggml.scores", "finite"),
    ],
)
def test_bad_metadata_is_refused_by_key(tmp_path: Path, changes: dict, item: str, message: str) -> None:
    path = tiny_gguf(tmp_path / "t.gguf", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        build(path)
    assert caught.value.item == item
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("token", ["<0x-1>", "<0xZZ>", "<0x100>", "<0x1>", "byte"])
def test_byte_tokens_are_two_hex_digits(tmp_path: Path, token: str) -> None:
    path = tiny_gguf(
        tmp_path / "t.gguf",
        model="llama",
        tokens=["<unk>", "a", token, "</s>"],
        token_type=[UNKNOWN, NORMAL, BYTE, CONTROL],
        scores=[0.0, -1.0, -2.0, 0.0],
    )
    with pytest.raises(ModelError, match="token 2 is a byte token"):
        build(path)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(tmp_path: Path, pre: str) -> None:
    """The 256 byte letters and one merge as vocabulary: whatever the regexes cut, no byte is lost or moved."""
    tokens = [*byte_letters(), "ĠĠ", "<|im_end|>"]
    path = tiny_gguf(
        tmp_path / "t.gguf",
        pre=pre,
        tokens=tokens,
        token_type=[NORMAL] * 257 + [CONTROL],
        merges=["Ġ Ġ"],
        bos_token_id=257,
        eos_token_id=257,
    )
    tokenizer = build(path)
    for text in texts(100, ["<|im_end|>"]):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.encode("a")[0] == 257) == PRE_TOKENIZERS[pre].add_bos
