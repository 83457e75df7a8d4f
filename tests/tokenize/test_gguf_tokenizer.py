"""The embedded model's tokenizer, built from GGUF metadata, against llama.cpp's token ids."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oneloop.errors import RequestError
from oneloop.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from oneloop.formats.gguf import GgufFile

GOLDEN = Path(__file__).parent / "data" / "smollm2_parity.jsonl"


@pytest.fixture(scope="module")
def golden() -> list[tuple[str, list[int]]]:
    lines = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    return [(line["text"], line["ids"]) for line in lines]


def test_ids_equal_llama_cpp_on_the_committed_corpus(embedded: Tokenizer, golden: list) -> None:
    assert len(golden) >= 2000
    differing = [(text, ids, embedded.encode(text)) for text, ids in golden if embedded.encode(text) != ids]
    assert differing == []


@pytest.mark.slow
def test_the_corpus_is_what_llama_cpp_gives_now(embedded_header: GgufFile, golden: list) -> None:
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed; the golden file stands in"
    )
    model = llama_cpp.Llama(str(embedded_header.path), vocab_only=True, verbose=False)
    for text, ids in golden[::10]:
        assert model.tokenize(text.encode(), add_bos=False, special=True) == ids


def test_decoding_gives_the_text_back(embedded: Tokenizer, golden: list) -> None:
    for text, ids in golden:
        assert embedded.decode(ids, skip_special_tokens=False) == text


def test_digits_are_split_and_spaces_are_not(embedded: Tokenizer) -> None:
    pieces = [embedded.token_bytes(i) for i in embedded.encode("a  1")]
    assert pieces == [b"a", b"  ", b"1"]


def test_the_end_of_turn_ends_and_the_start_of_turn_does_not(embedded: Tokenizer) -> None:
    assert embedded.eos_token_ids[0] == embedded.token_id("<|im_end|>")
    assert embedded.token_id("<|im_start|>") not in embedded.eos_token_ids
    assert embedded.bos_token_id == embedded.token_id("<|im_start|>")


def test_no_bos_is_added_where_the_file_says_so(embedded: Tokenizer) -> None:
    assert embedded.encode("x", add_special_tokens=True) == embedded.encode("x", add_special_tokens=False)


def test_skip_special_tokens(embedded: Tokenizer) -> None:
    ids = embedded.encode("<|im_start|>user\nHi<|im_end|>")
    assert embedded.decode(ids) == "user\nHi"
    assert embedded.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


def test_token_text_and_bytes(embedded: Tokenizer) -> None:
    ids = embedded.encode("é😀")
    assert b"".join(embedded.token_bytes(i) for i in ids) == "é😀".encode()
    assert any("\ufffd" in embedded.token_str(i) for i in ids)
    for bad in (-1, embedded.vocab_size):
        with pytest.raises((IndexError, OverflowError)):
            embedded.token_bytes(bad)


def test_lone_surrogates_are_refused(embedded: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        embedded.encode("a\ud800b")


def test_a_panic_of_the_backend_is_an_exception(embedded: Tokenizer) -> None:
    """A panic of Rust's comes as a BaseException, past everyone who handles errors of a request."""

    class Panic(BaseException):
        pass

    class Backend:
        def encode_batch_fast(self, texts: list[str], **_: object) -> list[object]:
            raise Panic

    with pytest.raises(RuntimeError, match="tokenizer"):
        Tokenizer(Backend(), embedded._info).encode("x")  # type: ignore[arg-type]


def test_threads_get_the_same_ids(embedded: Tokenizer, golden: list) -> None:
    failures: list[str] = []

    def work(offset: int) -> None:
        for text, ids in golden[offset::8]:
            if embedded.encode(text) != ids:
                failures.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
