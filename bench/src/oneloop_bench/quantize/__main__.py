"""Writes a checkpoint whose linear maps have 4 bits.

    python -m oneloop_bench.quantize MODEL FOLDER --layout awq|gptq|compressed-tensors [--method gptq] …

MODEL: a llama-architecture GGUF file, "smollm2", or a folder that transformers reads. By "nearest" every weight is
rounded; by "gptq" the errors of one are made up for by others, after inputs of --text. The output head stays as it is.
A GGUF file's tokenizer stays in the file: name that with --tokenizer where the folder is served.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import safetensors.torch
import torch

from oneloop.formats.generation import FILE_NAME as GENERATION_FILE
from oneloop.loader.resolve import resolve_model
from oneloop.tokenize.load import load_tokenizer
from oneloop_bench.quantize.layouts import config_of, tensors_of
from oneloop_bench.quantize.numbers import Grid, gptq, round_to_nearest
from oneloop_bench.reference import transformers_llama
from oneloop_bench.report import BenchError, run_bench

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WINDOW: Final = 256
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", GENERATION_FILE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, quantise, write."""
    options = read_options(arguments)
    if options.layout == "awq" and (options.by_activation or options.symmetric):
        raise BenchError("AWQ's layout has zeros, and groups of neighbours only")
    if options.by_activation and options.method != "gptq":
        raise BenchError("--by-activation is an order of --method gptq")
    source = resolve_model(options.model)
    model = _read(source.path)
    hessians: dict[str, torch.Tensor] = {}
    if options.method == "gptq":
        tokens = load_tokenizer(source.path).encode(options.text.read_text(encoding="utf-8"))
        hessians = calibrate(model, tokens[: options.calibration_tokens])
    tensors = quantize(model, hessians, options)
    options.folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, options.folder / "model.safetensors", metadata={"format": "pt"})
    grid = Grid(options.group_size, options.symmetric)
    config = json.loads(model.config.to_json_string()) | {
        "architectures": [type(model).__name__],
        "quantization_config": config_of(options.layout, grid, by_activation=options.by_activation),
    }
    (options.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copy(source.path / name, options.folder / name)
    if source.kind == "gguf" and source.generation.temperature is not None:
        # Of the embedded model: at 1.0 one so small rambles.
        sampling = {"temperature": source.generation.temperature}
        (options.folder / GENERATION_FILE).write_text(json.dumps(sampling) + "\n", encoding="utf-8")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m oneloop_bench.quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=("awq", "gptq", "compressed-tensors"), required=True)
    parser.add_argument("--method", choices=("nearest", "gptq"), default="nearest")
    parser.add_argument("--group-size", type=int, default=64, help="inputs that share a scale (64)")
    parser.add_argument("--symmetric", action="store_true", help="without zeros")
    parser.add_argument(
        "--by-activation", action="store_true", help="groups in the order of the inputs' size"
    )
    parser.add_argument("--text", type=Path, default=Path("docs/architecture.md"), help="for --method gptq")
    parser.add_argument("--calibration-tokens", type=int, default=4096, help="of the text (4096)")
    return parser.parse_args(arguments)


def calibrate(model: Any, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Name of a linear map → Σ x xᵀ over its inputs."""
    found: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            found[name] = found.get(name, 0.0) + x.T @ x

        return hook

    hooks = [module.register_forward_pre_hook(hook_of(name)) for name, module in linear_maps(model)]
    with torch.inference_mode():
        for start in range(0, len(tokens), _WINDOW):
            model(torch.tensor([list(tokens[start : start + _WINDOW])]))
    for hook in hooks:
        hook.remove()
    return found


def quantize(
    model: Any, hessians: dict[str, torch.Tensor], options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, those that are left alone in float16."""
    grid = Grid(options.group_size, options.symmetric)
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with torch.inference_mode():
        for name, module in linear_maps(model):
            weight = module.weight.float()
            if hessians:
                quantized = gptq(weight, hessians[name], grid, by_activation=options.by_activation)
            else:
                quantized = round_to_nearest(weight, grid)
            del tensors[f"{name}.weight"]
            parts = tensors_of(
                options.layout, quantized, by_activation=options.by_activation, symmetric=options.symmetric
            )
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return tensors


def linear_maps(model: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    """All but the output head."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield name, module


def _read(path: Path) -> Any:
    if path.is_file():
        return transformers_llama(path)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


if __name__ == "__main__":
    run_bench(main)
