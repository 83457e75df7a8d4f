"""What `bench throughput` and `bench latency` share: this engine in this process, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop.cli.arguments import engine_values
from oneloop.engine.offline import LLM
from oneloop_bench.load.prompts import IdPrompts
from oneloop_bench.load.result import save

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from oneloop import SamplingParams
    from oneloop_bench.load.workload import Prompt


def add_offline_options(parser: argparse.ArgumentParser) -> None:
    """Those that both have, beside the engine's."""
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, the likeliest token"
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--disable-detokenize", action="store_true", help="make no text of the tokens")


def open_model(options: argparse.Namespace) -> LLM:
    """The model on whichever executor the options choose. Raises ConfigError, ModelError."""
    return LLM(use_tqdm=True, **engine_values(options))


def ordinary_ids(llm: LLM) -> IdPrompts:
    """Prompts of any tokens but the special ones."""
    tokenizer = llm.get_tokenizer()
    return IdPrompts([token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids])


def generate(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, shows_progress: bool
) -> list[int]:
    """How many tokens each reply has. Raises RequestError, GenerationError."""
    outputs = llm.generate(list(prompts), list(params), use_tqdm=shows_progress)
    return [len(output.outputs[0].token_ids) for output in outputs]


def finish(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Save the result, where that was asked for."""
    if options.output_json is not None:
        save(result, options.output_json)
        print(f"saved as {options.output_json}")
