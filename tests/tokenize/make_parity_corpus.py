"""Writes data/smollm2_parity.jsonl: strings and the token ids that llama.cpp gives them, for the embedded model.

Run with llama-cpp-python installed: python tests/tokenize/make_parity_corpus.py [GGUF file]
The strings are seeded, so a second run on the same llama.cpp writes the same file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).parent / "data" / "smollm2_parity.jsonl"
NUM_RANDOM = 2400

POOLS = {
    "digits": "0123456789",
    "spaces": "  \t\n\r",
    "latin": "abcdefghij ABCDEF ",
    "accents": "éèüßñøÅçœ",
    "combining": "e\u0301a\u0300o\u0308",
    "cjk": "的一是不我日本語かなカナ한국어中文",
    "scripts": "абвгд שלום हिन्दी ไทย العربية ქართული",
    "emoji": "😀🎉✨👍🏽🇩🇪👨\u200d👩\u200d👧❤️",
    "marks": "'s't're'll'd\"!?.,;:-_()[]{}<>|/\\@#$%^&*+=~`",
    "odd_spaces": "\u00a0\u2003\u200b\u0085\u3000\u1680\u2028\ufeff",
    "odd_digits": "١٢٣ⅣⅤ½²₃９",
    "code": "def f(x):\n    return x+1\n\tif a==b: {}\n",
    "control": "\x00\x01\x1b\x7f",
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<jupyter_start>")

FIXED = (
    "",
    " ",
    "a  1",
    "Hello, world!",
    "  leading and trailing  ",
    "1234567890",
    "3.14159 and 1,000,000",
    "line one\nline two\r\nline three\n\n\n",
    "\t\tindented\n    four",
    "don't I'll we've you're it's DON'T",
    "The quick brown fox jumps over the lazy dog.",
    "日本語のテキストです。",
    "中文和English混合1234",
    "😀😀 👨\u200d👩\u200d👧\u200d👦 end",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|>",
    "not special: <|im_star|> <im_end> <|",
    "x" * 300,
    " " * 100,
    "\n" * 50,
    "0" * 64,
)


def strings() -> Iterator[str]:
    """Fixed ones, every pool alone, mixtures of pools, with special tokens strewn in."""
    yield from FIXED
    source = random.Random(20260101)
    names = sorted(POOLS)
    for i in range(NUM_RANDOM):
        chosen = source.sample(names, 1 if i % 4 == 0 else source.randint(2, 4))
        pieces: list[str] = []
        for _ in range(source.randint(1, 14)):
            pool = POOLS[source.choice(chosen)]
            run = source.randint(1, 4)
            pieces.append("".join(source.choice(pool) for _ in range(run)))
            if source.random() < 0.06:
                pieces.append(source.choice(SPECIAL))
        yield "".join(pieces)


def main() -> None:
    import llama_cpp

    from oneloop.loader.embedded import fetch_embedded

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch_embedded()
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    with OUTPUT.open("w", encoding="utf-8") as file:
        for text in dict.fromkeys(strings()):
            ids = model.tokenize(text.encode(), add_bos=False, special=True)
            file.write(
                json.dumps({"text": text, "ids": ids}, ensure_ascii=True, separators=(",", ":")) + "\n"
            )


if __name__ == "__main__":
    main()
