"""Tokenizers of Hugging Face folders: ids, bytes, streams and templates against tokenizers and transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from oneloop.errors import ModelError
from oneloop.tokenize.load import load_tokenizer
from oneloop_core import StreamDecoder

if TYPE_CHECKING:
    from oneloop.tokenize.tokenizer import Tokenizer

TEXTS = (
    "",
    " leading",
    "Hello,  world 123\n\n\tx",
    "日本語と中文 한국어",
    "👨\u200d👩\u200d👧 🇩🇪 e\u0301",
    "don't stop\r\n",
    "שלום مرحبا हिन्दी",
)


@pytest.mark.slow
def test_ids_equal_the_tokenizers_library(
    family_library: tokenizers.Tokenizer, family_tokenizer: Tokenizer
) -> None:
    for text in TEXTS:
        expected = family_library.encode(text, add_special_tokens=False).ids
        assert family_tokenizer.encode(text, add_special_tokens=False) == expected


@pytest.mark.slow
def test_ids_and_special_tokens_equal_transformers(
    family_transformers: Any, family_tokenizer: Tokenizer
) -> None:
    theirs = family_transformers
    assert family_tokenizer.vocab_size == len(theirs)
    assert family_tokenizer.bos_token_id == theirs.bos_token_id
    assert family_tokenizer.eos_token_ids == (theirs.eos_token_id,)
    assert family_tokenizer.special_ids >= set(theirs.all_special_ids)
    for text in TEXTS:
        assert family_tokenizer.encode(text) == theirs.encode(text)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
def test_streams_equal_the_librarys_decode(
    family: Path, family_library: tokenizers.Tokenizer, family_tokenizer: Tokenizer, skip: bool
) -> None:
    source = random.Random(3)
    for _ in range(300):
        text = "".join(source.choice(source.choice(TEXTS[1:])) for _ in range(20))
        ids = family_tokenizer.encode(text)
        decoder = StreamDecoder(family_tokenizer.vocabulary, skip_special_tokens=skip)
        streamed = "".join(decoder.push(i) for i in ids) + decoder.flush()
        if skip and family.name.startswith("llama2"):
            # a stream continues a prompt, so it keeps the space that a whole text loses
            streamed = streamed.removeprefix(" ")
        assert streamed == family_tokenizer.decode(ids, skip_special_tokens=skip)
        assert streamed == family_library.decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
def test_random_ids_decode_like_the_library(
    family_library: tokenizers.Tokenizer, family_tokenizer: Tokenizer
) -> None:
    """Where all bytes are characters: the library writes one U+FFFD per byte of a broken run, we follow Python."""
    source = random.Random(4)
    compared = 0
    for _ in range(2000):
        ids = [source.randrange(family_tokenizer.vocab_size) for _ in range(source.randrange(1, 10))]
        ours = family_tokenizer.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in ours:
            compared += 1
            assert ours == family_library.decode(ids, skip_special_tokens=False)
    assert compared > 500


CHATS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": " A "},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "日本"},
    ],
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place, e.g. “Köln”",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]


@pytest.mark.slow
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompts_equal_transformers(
    family_transformers: Any,
    family_tokenizer: Tokenizer,
    messages: list,
    tools: list | None,
    add_generation_prompt: bool,
) -> None:
    theirs, template = family_transformers, family_tokenizer.chat_template
    if template is None:
        assert theirs.chat_template is None
        return
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    prompt = template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert prompt == expected
    ids = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert family_tokenizer.encode(prompt, add_special_tokens=False) == ids


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, oneloop.tokenize.load, oneloop.loader.resolve\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def byte_level_folder(folder: Path, **config: object) -> Path:
    """A folder with a small byte-level tokenizer."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "x"),
        ({"add_bos_token": True}, "<s>x"),
        ({"add_bos_token": True, "add_eos_token": True}, "<s>x</s>"),
    ],
)
def test_bos_and_eos_by_configuration(tmp_path: Path, config: dict, expected: str) -> None:
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, **config))
    assert tokenizer.decode(tokenizer.encode("x"), skip_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("x", add_special_tokens=False), skip_special_tokens=False) == "x"


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    byte_level_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 257, 3]}')
    assert load_tokenizer(tmp_path).eos_token_ids == (257, 3)


def test_tokens_that_only_the_configuration_knows(tmp_path: Path) -> None:
    entry = {"content": "<|tool|>", "special": True}
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, added_tokens_decoder={"258": entry}))
    assert tokenizer.encode("a<|tool|>")[-1] == 258
    assert 258 in tokenizer.special_ids
    with pytest.raises(ModelError, match="id 300"):
        load_tokenizer(byte_level_folder(tmp_path, added_tokens_decoder={"300": entry}))


def test_added_tokens_are_literal_text(tmp_path: Path) -> None:
    """é is a byte letter in the vocabulary, but an added token é means the character."""
    folder = byte_level_folder(tmp_path, added_tokens_decoder={"258": {"content": "«é»"}})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("x«é»")) == "x«é»"


@pytest.mark.parametrize(
    ("decoder", "message"),
    [(None, "none is not supported"), (tokenizers.decoders.WordPiece(), "WordPiece is not supported")],
)
def test_other_decoders_are_refused(tmp_path: Path, decoder: object, message: str) -> None:
    folder = byte_level_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["decoder"] = json.loads(decoder.__getstate__()) if decoder else None
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 3}', b"[" * 100_000, b"\xff\xfe"])
def test_a_broken_tokenizer_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match="is no valid tokenizer"):
        load_tokenizer(tmp_path)


def test_older_files_are_converted(tmp_path: Path) -> None:
    """vocab.json and merges.txt without a tokenizer.json, through transformers."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"ab": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab<|endoftext|>") == [256, 257]
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer"):
        load_tokenizer(tmp_path)


def test_code_in_a_tokenizer_config_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    folder = byte_level_folder(
        tmp_path, auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil"
    )
    assert load_tokenizer(folder).encode("x")
    assert not marker.exists()
