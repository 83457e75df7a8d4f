"""How byte-level BPE families cut text into words: GGUF's `tokenizer.ggml.pre` → the models' own regexes.

The patterns are those of the models' published tokenizers; llama.cpp's table says which `pre` name means which.
A text is cut by the first pattern, each piece by the next, and so on; what lies between matches is a piece too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One family's rules."""

    patterns: tuple[str, ...]
    """Oniguruma regexes, applied one after the other."""
    ignore_merges: bool = False
    """A whole word that is a token is taken as it is."""
    add_bos: bool = False
    """Default where the file does not say whether a BOS is added."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SYMBOLS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SYMBOLS}"
_GPT4O = rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}"
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdb"
    "ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)

_GPT2_FAMILY = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2_FAMILY = PreTokenizer((_QWEN2,))
_LLAMA3_FAMILY = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_LLAMA3,))
_GPT4O_FAMILY = PreTokenizer((_GPT4O,))
_BAILING_FAMILY = PreTokenizer((_BAILING,))
_DEEPSEEK3_FAMILY = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_FAMILY,
    "phi-2": _GPT2_FAMILY,
    "mpt": _GPT2_FAMILY,
    "olmo": _GPT2_FAMILY,
    "jais": _GPT2_FAMILY,
    "trillion": _GPT2_FAMILY,
    "gigachat": _GPT2_FAMILY,
    "exaone4": _GPT2_FAMILY,
    "mellum": _GPT2_FAMILY,
    "granite-docling": _GPT2_FAMILY,
    "a.x-4.0": _GPT2_FAMILY,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "falcon-h1": _LLAMA3_FAMILY,
    "pixtral": _LLAMA3_FAMILY,
    "midm-2.0": _LLAMA3_FAMILY,
    "lfm2": _LLAMA3_FAMILY,
    "dbrx": _LLAMA3_PLAIN,
    "smaug-bpe": _LLAMA3_PLAIN,
    "glm4": _LLAMA3_PLAIN,
    "chatglm-bpe": _LLAMA3_PLAIN,
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "megrez": _QWEN2_FAMILY,
    "kormo": _QWEN2_FAMILY,
    "stablelm2": _QWEN2_FAMILY,
    "hunyuan": _QWEN2_FAMILY,
    "grok-2": _QWEN2_FAMILY,
    "solar-open": _QWEN2_FAMILY,
    "qwen35": PreTokenizer((_QWEN35,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe": _BAILING_FAMILY,
    "bailingmoe2": _BAILING_FAMILY,
    "llada-moe": _BAILING_FAMILY,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_FAMILY,
    "llama4": _GPT4O_FAMILY,
    "kanana2": _GPT4O_FAMILY,
    "minimax-m2": _GPT4O_FAMILY,
    "bloom": PreTokenizer((_BLOOM,)),
    "poro-chat": PreTokenizer((_BLOOM,)),
    "gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK3_FAMILY,
    "hunyuan-dense": _DEEPSEEK3_FAMILY,
    "joyai-llm": _DEEPSEEK3_FAMILY,
}
