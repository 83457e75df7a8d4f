"""Bytes of one token, in both spellings of bytes: GPT-2's byte-level letters and SentencePiece's `<0xAB>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SPACE_MARK = "▁"
"""SentencePiece's visible space (U+2581)."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_letters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the 68 other bytes for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LETTERS = byte_letters()
_TRANSLATION = {ord(letter): chr(byte) for letter, byte in _BYTE_LETTERS.items()}
_ALL_LETTERS = re.compile(f"[{re.escape(''.join(_BYTE_LETTERS))}]*")


def byte_level_piece(token: str) -> bytes:
    """A byte-level token's bytes; one that holds other characters stands for its own UTF-8."""
    if _ALL_LETTERS.fullmatch(token):
        return token.translate(_TRANSLATION).encode("latin-1")
    return token.encode()


def byte_of(token: str) -> int | None:
    """The byte that a token of the form <0xAB> (exactly two hex digits) stands for."""
    match = _BYTE_PIECE.fullmatch(token)
    return int(match[1], 16) if match else None


def sentencepiece_piece(token: str) -> bytes:
    """A SentencePiece token's bytes: `▁` is a space, `<0xAB>` a byte."""
    byte = byte_of(token)
    return bytes((byte,)) if byte is not None else token.replace(SPACE_MARK, " ").encode()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a tokenizer's decoder turns one token into bytes."""

    piece: Callable[[str], bytes]
    added_piece: Callable[[str], bytes]
    """The same for added tokens, which stand in the vocabulary as plain text."""
    strip_leading_space: bool = False


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | str:
    """The rule of a tokenizer.json decoder, or the reason why it is not supported.

    Supported are the two kinds that act on each token alone: byte-level, and SentencePiece with or without byte
    fallback (as a Metaspace decoder, or as the sequence Replace, ByteFallback, Fuse, Strip).
    """
    steps = list(_flatten(decoder))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(byte_level_piece, str.encode)
    allowed = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
    unknown = [kind for kind in kinds if kind not in allowed]
    if not steps or unknown:
        name = unknown[0] if unknown else "none"
        return f"{name} is not supported; supported are byte-level and SentencePiece decoders"
    byte_fallback = "ByteFallback" in kinds
    strip = False
    for step in steps:
        if step["type"] == "Replace" and (step.get("pattern"), step.get("content")) != (
            {"String": SPACE_MARK},
            " ",
        ):
            return "a Replace of anything but the space mark is not supported"
        if step["type"] == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                return "a Strip of anything but one leading space is not supported"
            strip = True
        if step["type"] == "Metaspace":
            strip = strip or step.get("prepend_scheme", "always") != "never"
    return PieceRule(sentencepiece_piece if byte_fallback else marked_piece, marked_piece, strip)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def marked_piece(token: str) -> bytes:
    """A SentencePiece token that stands for no byte."""
    return token.replace(SPACE_MARK, " ").encode()
