"""Text of token ids, against Python's own decoder and the tokenizers library."""

from __future__ import annotations

import array
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from oneloop_core import StreamDecoder, Vocabulary

TEXTS = [
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "Größe, naïve, Ærøskøbing: æøå ÆØÅ ß",
    "你好，世界！こんにちは世界。안녕하세요 세계",
    "👨‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301 \u200d \ufffd",
    "def f(x):\n\treturn {'a': [x ** 2, None]}\r\n",
    "नमस्ते दुनिया  مرحبا بالعالم",
]

BYTES = Vocabulary([bytes([byte]) for byte in range(256)])


def stream(decoder: StreamDecoder, ids: list[int]) -> str:
    return "".join(map(decoder.push, ids)) + decoder.flush()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.binary(max_size=6)))
def test_any_bytes_decode_as_python_decodes_them(pieces: list[bytes]) -> None:
    vocabulary = Vocabulary(pieces)
    ids = list(range(len(pieces)))
    expected = b"".join(pieces).decode("utf-8", "replace")
    assert vocabulary.decode(ids) == expected
    assert stream(StreamDecoder(vocabulary), ids) == expected


def test_every_pair_and_triple_of_edge_bytes_decodes_as_python_decodes_them() -> None:
    edges = bytes.fromhex("00417f808f909fa0bfc0c1c2dfe0e1edeef0f1f4f5ff")
    for first in edges:
        for second in edges:
            for third in edges:
                data = bytes([first, second, third])
                assert stream(StreamDecoder(BYTES), list(data)) == data.decode("utf-8", "replace"), data


def test_text_appears_as_soon_as_it_is_certain() -> None:
    decoder = StreamDecoder(BYTES)
    assert [decoder.push(byte) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]
    # A second lead byte proves the first one dead; it is itself still open.
    assert [decoder.push(byte) for byte in (0xE4, 0xE4, 0x41)] == ["", "\ufffd", "\ufffdA"]
    assert decoder.push(0xF0) == ""
    assert decoder.flush() == "\ufffd"


def test_special_tokens_and_leading_space() -> None:
    vocabulary = Vocabulary([b" a", b"<s>", b" b"], [1], strip_leading_space=True)
    assert vocabulary.decode([1, 0, 2]) == "a b"
    assert vocabulary.decode([0, 1, 2], skip_special_tokens=False) == "a<s> b"
    assert stream(StreamDecoder(vocabulary), [1, 0, 2]) == " a b"
    assert stream(StreamDecoder(vocabulary, skip_special_tokens=False), [0, 1]) == " a<s>"


def test_a_skipped_token_does_not_break_a_character() -> None:
    vocabulary = Vocabulary([b"\xe4\xbd", b"<s>", b"\xa0"], [1])
    assert stream(StreamDecoder(vocabulary), [0, 1, 2]) == "你"
    assert stream(StreamDecoder(vocabulary, skip_special_tokens=False), [0, 1, 2]) == "\ufffd<s>\ufffd"


@pytest.mark.parametrize(
    "make", [list, tuple, lambda ids: array.array("i", ids), lambda ids: np.array(ids, np.int32)]
)
def test_ids_come_from_buffers_and_sequences(make) -> None:
    assert BYTES.decode(make([72, 105])) == "Hi"


def test_ids_from_a_strided_or_wider_array() -> None:
    ids = np.array([72, 0, 105, 0], np.int32)
    assert BYTES.decode(ids[::2]) == "Hi"
    assert BYTES.decode(ids[::2].astype(np.int64)) == "Hi"


@pytest.mark.parametrize("bad", [-1, 256, 2**31, 2**40, -(2**70), 10**30])
def test_ids_out_of_range_are_index_errors(bad: int) -> None:
    with pytest.raises(IndexError, match="token id"):
        BYTES.decode([1, bad])
    with pytest.raises(IndexError, match="token id"):
        BYTES.piece(bad)
    with pytest.raises(IndexError, match="token id"):
        StreamDecoder(BYTES).push(bad)


def test_a_vocabulary_is_checked() -> None:
    for bad in (2, -1, 2**80):
        with pytest.raises(ValueError, match="special_ids"):
            Vocabulary([b"a", b"b"], [bad])
    with pytest.raises(TypeError):
        Vocabulary(["text"])
    with pytest.raises(TypeError):
        BYTES.decode("12")
    with pytest.raises(TypeError):
        BYTES.decode([1.5])


def byte_table() -> dict[str, int]:
    """Printable stand-in → byte of GPT-2's byte-level alphabet: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def test_byte_level_vocabulary_equals_the_tokenizers_library() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    table = byte_table()
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    pieces = [name.encode() if i == 0 else bytes(table[c] for c in name) for i, name in enumerate(names)]
    vocabulary = Vocabulary(pieces, [0])
    rng = random.Random(1)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert vocabulary.decode(ids) == text
    for _ in range(2000):
        ids = [rng.randrange(len(pieces)) for _ in range(rng.randrange(12))]
        expected = tokenizer.decode(ids)
        assert vocabulary.decode(ids) == expected
        assert stream(StreamDecoder(vocabulary), ids) == expected


def test_byte_fallback_vocabulary_equals_the_tokenizers_library() -> None:
    words = ["\u2581the", "\u2581", "cat", "\u2581cat", "é", "世"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *"abcdefghijklmnopqrstuvwxyz"]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_next")
    byte = {f"<0x{b:02X}>": bytes([b]) for b in range(256)}
    pieces = [byte.get(name, name.replace("\u2581", " ").encode()) for name in names]
    vocabulary = Vocabulary(pieces, [0], strip_leading_space=True)
    rng = random.Random(2)
    for _ in range(2000):
        parts = [
            rng.choice([*"ab", "😀", "世", "ß", "\u2581the", "\u2581", "cat"])
            for _ in range(rng.randrange(8))
        ]
        tokens = [[p] if p in names else [f"<0x{b:02X}>" for b in p.encode()] for p in parts]
        ids = [names.index(token) for part in tokens for token in part]
        assert vocabulary.decode(ids) == tokenizer.decode(ids)


def test_marks_are_shown_and_other_special_tokens_are_not() -> None:
    vocabulary = Vocabulary([b"a", b"<think>", b"</s>", b"b"], [1, 2])
    for shown, text in (((), "ab"), ((1,), "a<think>b"), ((2, 1), "a<think></s>b")):
        decoder = StreamDecoder(vocabulary, shown_special_ids=shown)
        assert "".join([decoder.push(token) for token in (0, 1, 2, 3)]) + decoder.flush() == text
