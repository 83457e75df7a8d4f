"""Perplexity of models on one text: what quantising costs. By the engine's own prompt log-probabilities.

    python -m oneloop_bench.perplexity MODEL … [--text FILE …] [--tokenizer FILE] [--window 512] [--json FILE]

MODEL@fp8 is MODEL with --quantization fp8. The text (by default this repository's docs/*.md but architecture.md, which
quantisers are calibrated on) is cut into windows; the first token of each is not scored. Every model is compared with
the first.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oneloop import LLM, SamplingParams
from oneloop_bench.report import BenchError, print_result, run_bench, save_result

if TYPE_CHECKING:
    from collections.abc import Sequence

CALIBRATION: Final = "architecture.md"
_DOCS: Final = Path("docs")


def default_text() -> list[Path]:
    """The docs that no quantiser has seen."""
    return sorted(path for path in _DOCS.glob("*.md") if path.name != CALIBRATION)


def windows_of(tokens: Sequence[int], size: int, limit: int) -> list[list[int]]:
    """Windows of so many tokens, of the first `limit`; a rest is left out."""
    usable = min(len(tokens), limit)
    return [list(tokens[start : start + size]) for start in range(0, usable - size + 1, size)]


def score(llm: LLM, windows: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Sum of the negative log-probabilities of all tokens but the first of each window, and their number."""
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": list(window)} for window in windows], params, use_tqdm=False)
    total, count = 0.0, 0
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            total -= entry[token].logprob
            count += 1
    return total, count


def measure(model: str, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model's row. model: with @ and a --quantization behind it, perhaps."""
    name, _, quantization = model.partition("@")
    settings = {"dtype": options.dtype, "max_model_len": options.window + 1, "use_tqdm": False}
    with LLM(name, tokenizer=options.tokenizer, quantization=quantization or None, **settings) as llm:
        windows = windows_of(llm.get_tokenizer().encode(text), options.window, options.tokens)
        if not windows:
            raise BenchError(f"the text has no window of {options.window} tokens")
        total, count = score(llm, windows)
    return {"model": model, "perplexity": math.exp(total / count), "tokens": count}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, nargs="+", help="files; default: docs/*.md")
    parser.add_argument("--tokenizer", help="of all models; default: each one's own")
    parser.add_argument("--window", type=int, default=512, help="tokens that are scored together (512)")
    parser.add_argument("--tokens", type=int, default=1 << 30, help="of the text, at most (all)")
    parser.add_argument("--dtype", default="auto", help="as of serve (auto)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """A line for each model, then the JSON object."""
    options = read_options(arguments)
    files = options.text or default_text()
    if not files:
        raise BenchError("there is no docs folder here; name a text with --text")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        row = measure(model, text, options)
        rows.append(row)
        change = row["perplexity"] / rows[0]["perplexity"] - 1
        print(f"{row['perplexity']:9.4f} {change:+8.2%}  {row['tokens']} tokens  {model}", flush=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    result = {
        "bench": "perplexity",
        "rows": rows,
        "window": options.window,
        "dtype": options.dtype,
        "text": digest,
    }
    if options.json is not None:
        save_result(options.json, result)
    print_result(result)


if __name__ == "__main__":
    run_bench(main)
