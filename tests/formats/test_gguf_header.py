"""GGUF headers: hostile files are refused by name, in bounded time and memory (B-15, T24); legal ones are read."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf.constants
import numpy as np
import pytest

from oneloop.errors import ModelError
from oneloop.formats.ggml_types import GGML_TYPES
from oneloop.formats.gguf import read_gguf
from oneloop.formats.gguf_spec import gguf_model_spec
from oneloop.loader.embedded import fetch_embedded

S, A, U, I, F, B, L = 8, 9, 4, 5, 6, 7, 10  # noqa: E741  (GGUF value types: string, array, u32, i32, f32, bool, u64)
HUGE = 2**63

HEADERS: dict[str, tuple[Any, str, str]] = {
    # name: (kit → bytes, item named, words of the message)
    "empty": (lambda k: b"", "", "too short"),
    "magic only": (lambda k: b"GGUF", "", "too short"),
    "other magic": (lambda k: k.gguf(magic=b"GGML"), "", "not a GGUF"),
    "version 0": (lambda k: k.gguf(version=0), "version", "version 0"),
    "version 1": (lambda k: k.gguf(version=1), "version", "version 1"),
    "version 99": (lambda k: k.gguf(version=99), "version", "version 99"),
    "big-endian": (lambda k: k.gguf(version=3 << 24), "version", "big-endian"),
    "tensor count 2^63": (lambda k: k.gguf(num_tensors=HUGE), "tensor count", "more than"),
    "tensor count 2^64-1": (lambda k: k.gguf(num_tensors=2**64 - 1), "tensor count", "more than"),
    "key count 2^63": (lambda k: k.gguf(num_keys=HUGE), "key count", "more than"),
    "key count 10": (lambda k: k.gguf(num_keys=10, data=100), "key count", "more than"),
    "string length 2^64-1": (lambda k: k.gguf([("k", S, struct.pack("<Q", 2**64 - 1))]), "k", "claims"),
    "string past the end": (lambda k: k.gguf([("k", S, struct.pack("<Q", 999))]), "k", "truncated"),
    "string of 32 MiB": (
        lambda k: k.gguf([("k", S, struct.pack("<Q", 1 << 25))], data=1 << 25),
        "k",
        "at most",
    ),
    "name length 2^64-1": (lambda k: k.gguf(num_keys=1, data=64)[:24] + b"\xff" * 64, "key 0", "claims"),
    "empty name": (lambda k: k.gguf([("", U, 1)]), "key 0", "claims 0"),
    "array of 2^63 numbers": (lambda k: k.gguf([("k", A, struct.pack("<IQ", U, HUGE))]), "k", "truncated"),
    "array of 2^63 strings": (lambda k: k.gguf([("k", A, struct.pack("<IQ", S, HUGE))]), "k", "more than"),
    "array of 2^61 u64": (lambda k: k.gguf([("k", A, struct.pack("<IQ", L, 2**61))]), "k", "truncated"),
    "strings cut off": (
        lambda k: k.gguf(
            [("k", A, struct.pack("<IQ", S, 3) + k.string("x" * 20) * 2 + bytes(4))], alignment=1
        ),
        "k",
        "inside entry 2",
    ),
    "million strings": (
        lambda k: k.gguf([("k", A, struct.pack("<IQ", S, 1 << 21))], data=1 << 24),
        "k",
        "any known",
    ),
    "arrays 10^4 deep": (lambda k: k.gguf([("k", A, struct.pack("<IQ", A, 1) * 10_000)]), "k", "deeper"),
    "array of many arrays": (
        lambda k: k.gguf([("k", A, struct.pack("<IQ", A, 1 << 17) + struct.pack("<IQ", U, 0) * (1 << 17))]),
        "k",
        "any known",
    ),
    "value type 13": (lambda k: k.gguf([("k", 13, b"")], data=64), "k", "type 13"),
    "element type 13": (lambda k: k.gguf([("k", A, struct.pack("<IQ", 13, 1))], data=64), "k", "type 13"),
    "truth value 2": (lambda k: k.gguf([("k", B, b"\x02")]), "k", "truth value"),
    "truth value 7 in an array": (
        lambda k: k.gguf([("k", A, struct.pack("<IQ", B, 1) + b"\x07")]),
        "k",
        "truth",
    ),
    "duplicate keys": (lambda k: k.gguf([("k", U, 1), ("k", U, 2)]), "k", "twice"),
    "key not UTF-8": (lambda k: k.gguf([(b"\xff\xfe", U, 1)]), "key 0", "UTF-8"),
    "value not UTF-8": (lambda k: k.gguf([("k", S, k.string(b"\xc3\x28"))]), "k", "UTF-8"),
    "token not UTF-8": (
        lambda k: k.gguf([("k", A, struct.pack("<IQ", S, 1) + k.string(b"\xed\xa0\x80"))]),
        "k",
        "UTF-8",
    ),
    "alignment 0": (lambda k: k.gguf([("general.alignment", U, 0)]), "general.alignment", "power of two"),
    "alignment 3": (lambda k: k.gguf([("general.alignment", U, 3)]), "general.alignment", "power of two"),
    "alignment 2^31": (
        lambda k: k.gguf([("general.alignment", U, 2**31)]),
        "general.alignment",
        "power of two",
    ),
    "alignment a string": (
        lambda k: k.gguf([("general.alignment", S, "x")]),
        "general.alignment",
        "whole number",
    ),
    "tensor name not UTF-8": (
        lambda k: k.gguf(tensors=[k.tensor(b"\xff", [8], 0, 0)], data=32),
        "tensor 0",
        "UTF-8",
    ),
    "no dimensions": (lambda k: k.gguf(tensors=[k.tensor("t", [], 0, 0)], data=32), "t", "0 dimensions"),
    "5 dimensions": (lambda k: k.gguf(tensors=[k.tensor("t", [1] * 5, 0, 0)], data=32), "t", "5 dimensions"),
    "2^32-1 dimensions": (
        lambda k: k.gguf(tensors=[k.string("t") + struct.pack("<I", 2**32 - 1)], data=64),
        "t",
        "dimensions",
    ),
    "dimension 0": (lambda k: k.gguf(tensors=[k.tensor("t", [0, 4], 0, 0)], data=32), "t", "does not fit"),
    "dims product 2^128": (
        lambda k: k.gguf(tensors=[k.tensor("t", [HUGE, HUGE], 0, 0)], data=32),
        "t",
        "truncated",
    ),
    "dims product wraps to 4": (
        lambda k: k.gguf(tensors=[k.tensor("t", [2**32, 2**32 + 1], 0, 0)], data=32),
        "t",
        "truncated",
    ),
    "unknown type": (lambda k: k.gguf(tensors=[k.tensor("t", [32], 31, 0)], data=32), "t", "type 31"),
    "type 2^32-1": (
        lambda k: k.gguf(tensors=[k.tensor("t", [32], 2**32 - 1, 0)], data=32),
        "t",
        "tensor type",
    ),
    "row no whole blocks": (
        lambda k: k.gguf(tensors=[k.tensor("t", [33], 8, 0)], data=64),
        "t",
        "does not fit",
    ),
    "offset beyond the file": (
        lambda k: k.gguf(tensors=[k.tensor("t", [8], 0, 4096)], data=32),
        "t",
        "truncated",
    ),
    "offset 2^64-32": (
        lambda k: k.gguf(tensors=[k.tensor("t", [8], 0, 2**64 - 32)], data=32),
        "t",
        "truncated",
    ),
    "offset not aligned": (lambda k: k.gguf(tensors=[k.tensor("t", [8], 0, 4)], data=64), "t", "alignment"),
    "overlap": (
        lambda k: k.gguf(tensors=[k.tensor("a", [16], 0, 0), k.tensor("b", [8], 0, 32)], data=96),
        "b",
        "overlaps",
    ),
    "same place": (
        lambda k: k.gguf(tensors=[k.tensor("a", [8], 0, 0), k.tensor("b", [8], 0, 0)], data=64),
        "",
        "overlaps",
    ),
    "tensor twice": (
        lambda k: k.gguf(tensors=[k.tensor("a", [8], 0, 0), k.tensor("a", [8], 0, 32)], data=64),
        "a",
        "twice",
    ),
    "data cut off": (lambda k: k.gguf(tensors=[k.tensor("t", [8], 0, 0)], data=31), "t", "truncated"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused(name: str, kit: Any, write: Any) -> None:
    make, item, message = HEADERS[name]
    path = write(make(kit))
    with kit.bounded(), pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert not item or caught.value.item == item
    assert len(str(caught.value)) < len(str(path)) + 400


SPECS: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (changed keys, key named, words of the message)
    "experts of an architecture that is not known": (
        {"general__architecture": (S, "deepseek2")},
        "general.architecture",
        "supported are llama",
    ),
    "no architecture": ({"general__architecture": None}, "general.architecture", "missing"),
    "unknown architecture": (
        {"general__architecture": (S, "mamba")},
        "general.architecture",
        "supported are llama",
    ),
    "no layers": ({"llama__block_count": (U, 0)}, "llama.block_count", "out of range"),
    "10^9 layers": ({"llama__block_count": (U, 10**9)}, "llama.block_count", "out of range"),
    "layers a string": ({"llama__block_count": (S, "1")}, "llama.block_count", "whole number"),
    "negative width": ({"llama__embedding_length": (I, -8)}, "llama.embedding_length", "out of range"),
    "heads do not divide": ({"llama__attention__head_count": (U, 3)}, "llama.attention.head_count", "divide"),
    "odd head size": ({"llama__attention__key_length": (U, 3)}, "llama.attention.key_length", "odd"),
    "more KV heads than heads": (
        {"llama__attention__head_count_kv": (U, 4)},
        "llama.attention.head_count_kv",
        "range",
    ),
    "KV heads per layer": (
        {"llama__attention__head_count_kv": (A, (U, [1]))},
        "llama.attention.head_count_kv",
        "different numbers",
    ),
    "partly rotated heads": ({"llama__rope__dimension_count": (U, 2)}, "llama.rope.dimension_count", "part"),
    "NaN rope base": ({"llama__rope__freq_base": (F, float("nan"))}, "llama.rope.freq_base", "out of range"),
    "infinite rope base": (
        {"llama__rope__freq_base": (F, float("inf"))},
        "llama.rope.freq_base",
        "out of range",
    ),
    "rope base 0": ({"llama__rope__freq_base": (F, 0.0)}, "llama.rope.freq_base", "out of range"),
    "unknown rope scaling": (
        {"llama__rope__scaling__type": (S, "longrope")},
        "llama.rope.scaling.type",
        "longrope",
    ),
    "rope scaling without factor": (
        {"llama__rope__scaling__type": (S, "linear")},
        "llama.rope.scaling.factor",
        "missing",
    ),
    "epsilon 0": (
        {"llama__attention__layer_norm_rms_epsilon": (F, 0.0)},
        "llama.attention.layer_norm_rms_epsilon",
        "range",
    ),
    "experts, and nobody says how many a token gets": (
        {"llama__expert_count": (U, 8)},
        "llama.expert_used_count",
        "missing",
    ),
    "more experts of a token than there are": (
        {"llama__expert_count": (U, 8), "llama__expert_used_count": (U, 9)},
        "llama.expert_used_count",
        "out of range",
    ),
    "10^6 experts": ({"llama__expert_count": (U, 10**6)}, "llama.expert_count", "out of range"),
    "experts routed by sigmoids": (
        {"llama__expert_count": (U, 8), "llama__expert_gating_func": (U, 2)},
        "llama.expert_gating_func",
        "softmax",
    ),
    "experts in groups": (
        {"llama__expert_count": (U, 8), "llama__expert_group_count": (U, 4)},
        "llama.expert_group_count",
        "groups",
    ),
    "experts whose weights are scaled": (
        {"llama__expert_count": (U, 8), "llama__expert_weights_scale": (F, 2.5)},
        "llama.expert_weights_scale",
        "multiplied",
    ),
    "experts in every second layer": (
        {"llama__expert_count": (U, 8), "llama__interleave_moe_layer_step": (U, 2)},
        "llama.interleave_moe_layer_step",
        "between",
    ),
    "a dense layer before those with experts": (
        {"llama__expert_count": (U, 8), "llama__leading_dense_block_count": (U, 1)},
        "llama.leading_dense_block_count",
        "layers without experts",
    ),
    "a shared expert in a Mixtral": (
        {"llama__expert_count": (U, 8), "llama__expert_shared_count": (U, 1)},
        "llama.expert_shared_count",
        "shared",
    ),
    "sliding window": (
        {"llama__attention__sliding_window": (U, 16)},
        "llama.attention.sliding_window",
        "window",
    ),
    "vocab claimed longer": ({"llama__vocab_size": (U, 5)}, "llama.vocab_size", "claims 5"),
    "vocab shorter than the embedding": (
        {"tokenizer__ggml__tokens": (A, (S, ["a", "b"]))},
        "tokenizer.ggml.tokens",
        "2 tokens",
    ),
    "vocab no strings": (
        {"tokenizer__ggml__tokens": (A, (U, [1, 2, 3, 4]))},
        "tokenizer.ggml.tokens",
        "strings",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_impossible_models_are_refused(name: str, kit: Any, write: Any) -> None:
    changes, item, message = SPECS[name]
    path = write(
        kit.gguf(kit.model_keys(**changes), [kit.tensor("token_embd.weight", [8, 4], 0, 0)], data=128)
    )
    with kit.bounded(), pytest.raises(ModelError, match=message) as caught:
        gguf_model_spec(read_gguf(path))
    assert caught.value.item == item
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "item"),
    [
        ([], "token_embd.weight"),
        ([("token_embd.weight", [4, 8])], "token_embd.weight"),
        ([("x", [8, 4])], "token_embd.weight"),
    ],
)
def test_the_embedding_must_fit(tensors: list, item: str, kit: Any, write: Any) -> None:
    path = write(
        kit.gguf(kit.model_keys(), [kit.tensor(name, dims, 0, 0) for name, dims in tensors], data=128)
    )
    with pytest.raises(ModelError) as caught:
        gguf_model_spec(read_gguf(path))
    assert caught.value.item == item


def test_a_legal_file(kit: Any, write: Any) -> None:
    keys = [
        *kit.model_keys(llama__rope__freq_base=(F, 5000.0)),
        ("flags", A, (B, [1, 0])),
        ("nested", A, (A, [(U, [1, 2]), (S, ["x"])])),
        ("general.alignment", U, 64),
    ]
    tensors = [
        kit.tensor("b", [8, 2, 3], 0, 64 * 2),
        kit.tensor("token_embd.weight", [8, 4], 0, 0),
        kit.tensor("q", [32], 8, 64 * 5),
    ]
    file = read_gguf(write(kit.gguf(keys, tensors, data=64 * 5 + 34, alignment=64)))
    assert list(file.tensors) == ["token_embd.weight", "b", "q"]
    assert file.tensors["b"].shape == (3, 2, 8)
    assert file.tensors["q"].num_bytes == 34
    assert file.tensors["b"].offset - file.tensors["token_embd.weight"].offset == 128
    spec = gguf_model_spec(file)
    assert (spec.vocab_size, spec.head_dim, spec.rope_theta) == (4, 4, 5000.0)
    assert spec.tie_word_embeddings


def test_rope_factors(kit: Any, tmp_path: Path) -> None:
    tensors = [kit.tensor("token_embd.weight", [8, 4], 0, 0), kit.tensor("rope_freqs.weight", [2], 0, 128)]
    content = bytearray(kit.gguf(kit.model_keys(), tensors, data=136))
    path = tmp_path / "m.gguf"
    for factors, legal in (((1.0, 8.0), True), ((1.0, float("nan")), False), ((0.0, 1.0), False)):
        content[-8:] = np.array(factors, dtype="<f4").tobytes()
        path.write_bytes(content)
        if legal:
            assert gguf_model_spec(read_gguf(path)).rope_scaling.factors == factors
        else:
            with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
                gguf_model_spec(read_gguf(path))


def test_yarn(kit: Any, write: Any) -> None:
    keys = kit.model_keys(
        llama__rope__scaling__type=(S, "yarn"),
        llama__rope__scaling__factor=(F, 4.0),
        llama__rope__scaling__original_context_length=(U, 16),
    )
    file = read_gguf(write(kit.gguf(keys, [kit.tensor("token_embd.weight", [8, 4], 0, 0)], data=128)))
    scaling = gguf_model_spec(file).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("yarn", 4.0, 16)
    assert scaling.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize("seed", range(4))
def test_every_truncation_is_refused(seed: int, kit: Any, tmp_path: Path) -> None:
    """A whole small model, and the embedded one, cut at 100 random points each (25 per seed)."""
    source = random.Random(seed)
    tensors = [kit.tensor(name, [8, 4], 0, 128 * i) for i, name in enumerate(("token_embd.weight", "x", "y"))]
    small = kit.gguf(kit.model_keys(), tensors, data=384)
    whole = fetch_embedded()
    path = tmp_path / "cut.gguf"
    for _ in range(25):
        path.write_bytes(small[: source.randrange(len(small))])
        with pytest.raises(ModelError, match=str(path)):
            read_gguf(path)
    with whole.open("rb") as file:
        head = file.read(1_800_000)
    for _ in range(25):
        path.write_bytes(head[: source.randrange(len(head))])
        with kit.bounded(), pytest.raises(ModelError, match=str(path)):
            read_gguf(path)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_never_crash(seed: int, kit: Any, tmp_path: Path) -> None:
    """Random damage: a ModelError or a file that still reads, nothing else."""
    source = random.Random(seed)
    tensors = [kit.tensor(name, [8, 4], 0, 128 * i) for i, name in enumerate(("token_embd.weight", "x", "y"))]
    small = kit.gguf(kit.model_keys(), tensors, data=384)
    path = tmp_path / "damaged.gguf"
    refused = 0
    with kit.bounded():
        for _ in range(400):
            content = bytearray(small)
            for _ in range(source.randint(1, 4)):
                content[source.randrange(len(small) - 384)] = source.choice(
                    (0, 1, 0x7F, 0x80, 0xFF, source.randrange(256))
                )
            path.write_bytes(content)
            try:
                gguf_model_spec(read_gguf(path))
            except ModelError:
                refused += 1
    assert refused > 100


def split_parts(kit: Any, folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for i in range(count):
        keys = [("split.no", U, i), ("split.count", U, count), ("split.tensors.count", I, count)]
        own = kit.model_keys() if i == 0 else []
        name = "token_embd.weight" if i == 0 else f"t{i}"
        content = kit.gguf([*own, *keys], [kit.tensor(name, [8, 4], 0, 0)], data=128)
        paths.append(folder / f"m-{i + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(content)
    return paths


def test_split_files_are_read_together(kit: Any, tmp_path: Path) -> None:
    paths = split_parts(kit, tmp_path)
    file = read_gguf(paths[0])
    assert {name: tensor.path for name, tensor in file.tensors.items()} == {
        "token_embd.weight": paths[0],
        "t1": paths[1],
        "t2": paths[2],
    }


def test_split_files_that_are_missing_renamed_or_reordered(kit: Any, tmp_path: Path) -> None:
    paths = split_parts(kit, tmp_path)
    with pytest.raises(ModelError, match="give the first part"):
        read_gguf(paths[1])
    third = paths[2].read_bytes()
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match="mixed up"):
        read_gguf(paths[0])
    paths[2].write_bytes(third.replace(b"t2", b"t1"))
    with pytest.raises(ModelError, match="earlier part"):
        read_gguf(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelError, match="00003-of-00003"):
        read_gguf(paths[0])
    renamed = tmp_path / "model.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    with pytest.raises(ModelError, match="original names"):
        read_gguf(renamed)


def test_the_type_table_equals_the_gguf_packages() -> None:
    for kind, (block_size, block_bytes) in gguf.constants.GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[int(kind)]
        assert (ours.name, ours.block_size, ours.block_bytes) == (kind.name, block_size, block_bytes)


def test_a_folder_or_nothing_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match="cannot be read"):
            read_gguf(path)


def test_the_embedded_header_is_read_fast() -> None:
    import time

    path = fetch_embedded()
    read_gguf(path)
    best = min(_timed(read_gguf, path, time.process_time) for _ in range(3))
    assert best < 0.2


def _timed(function: Any, argument: Any, clock: Any) -> float:
    begin = clock()
    function(argument)
    return clock() - begin
