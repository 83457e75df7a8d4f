"""The command line's options, derived from the dataclasses in `oneloop.config`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from oneloop.config import (
    DEFAULT_MODEL,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    WorkerConfig,
    choices,
    size_as_text,
    size_in_bytes,
    type_hints,
)
from oneloop.device.cards import CARDS
from oneloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

ENGINE_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "KV cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": WorkerConfig,
}
TEXT_SETTINGS = (
    "model", "served_model_name", "tokenizer", "chat_template", "renderer", "revision", "max_model_len",
    "generation_config",
)  # fmt: skip
DEFAULT_GENERATE_TOKENS = 256


def add_engine_options(parser: argparse.ArgumentParser, *, model_positional: bool) -> None:
    """Every setting of the engine. Options that are not given do not appear in the namespace.

    model_positional: the model may also be given without --model.
    """
    if model_positional:
        parser.add_argument(
            "model_argument", nargs="?", metavar="MODEL", help=f"as --model; default: {DEFAULT_MODEL}"
        )
    for title, kind in ENGINE_GROUPS.items():
        _add_group(parser, title, kind)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """The settings of a model that matter without its weights."""
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help=f"as --model; default: {DEFAULT_MODEL}"
    )
    _add_group(parser, "model", ModelConfig, only=TEXT_SETTINGS)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Every setting of the endpoint."""
    _add_group(parser, "endpoint", ServerConfig)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """What `serve` plans instead of serving."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--plan",
        action="store_true",
        help="print the memory plan and predicted step times, load nothing, end",
    )
    group.add_argument(
        "--plan-device",
        type=str.lower,
        choices=[card.key for card in CARDS],
        help="plan for an empty card of this kind, as --plan does for the GPU of this machine",
    )
    group.add_argument("--json", action="store_true", help="print the plan as one JSON object (with --plan)")


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """What chat and generate let a person choose. max_tokens: what the command takes where none is given."""
    group = parser.add_argument_group("sampling")
    default = "what the context leaves" if max_tokens is None else str(max_tokens)
    group.add_argument("--max-tokens", type=int, help=f"new tokens at most; default: {default}")
    group.add_argument(
        "--temperature", type=float, help="0: always the most likely token; default: the model's"
    )
    group.add_argument("--top-p", type=float, help="nucleus mass in (0, 1]")
    group.add_argument("--top-k", type=int, help="keep the k most likely tokens; 0: all")
    group.add_argument(
        "--min-p", type=float, help="drop tokens below this part of the most likely one's probability"
    )
    group.add_argument("--repetition-penalty", type=float, help="above 1: repeats less")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)"
    )


def sampling_values(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, under SamplingParams' names; max_tokens always, as None means something."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
    values = {name: getattr(options, name) for name in names}
    values["seed"] = vars(options).get("seed")  # the engine's --seed counts for these requests too
    given = {name: value for name, value in values.items() if value is not None}
    return {"max_tokens": options.max_tokens, **given}


def engine_values(options: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given, flat. ConfigError when two models were named."""
    values = _given(options, ENGINE_GROUPS.values())
    named = getattr(options, "model_argument", None)
    if named is not None:
        if values.get("model", named) != named:
            raise ConfigError("model", f"given twice: {named} and {values['model']}")
        values["model"] = named
    return values


def server_values(options: argparse.Namespace) -> dict[str, Any]:
    """The endpoint settings that were given, here or in the environment."""
    variables = {item.name: item.metadata.get("environment", "") for item in fields(ServerConfig)}
    inherited = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    return {**inherited, **_given(options, [ServerConfig])}


def _given(options: argparse.Namespace, kinds: Iterable[type]) -> dict[str, Any]:
    given = vars(options)
    names = [item.name for kind in kinds for item in fields(kind)]
    return {
        name: tuple(given[name]) if isinstance(given[name], list) else given[name]
        for name in names
        if name in given
    }


def _add_group(
    parser: argparse.ArgumentParser, title: str, kind: type, only: Collection[str] | None = None
) -> None:
    """only: names of the settings that are offered; None: all."""
    group = parser.add_argument_group(title)
    hints = type_hints(kind)
    for item in fields(kind):
        if only is not None and item.name not in only:
            continue
        names = ["--" + item.name.replace("_", "-"), *item.metadata.get("flags", ())]
        help_text = item.metadata["help"].replace("%", "%%")
        if item.default not in (None, ()) and "default" not in help_text:
            default: Any = item.default
            in_bytes = item.metadata.get("parse") == "bytes"
            help_text += f" (default: {size_as_text(default) if in_bytes else default})"
        group.add_argument(
            *names,
            dest=item.name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS if item.metadata.get("hidden") else help_text,
            **_shape(hints[item.name], item.metadata),
        )


def _shape(hint: Any, metadata: Any) -> dict[str, Any]:
    """argparse's keywords for a setting's type."""
    hint, *others = choices(hint)
    if others:
        (words,) = others
        return {"type": partial(_integer_or, get_args(words)), "metavar": "|".join(("N", *get_args(words)))}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": "NAME"}
    kinds: dict[Any, tuple[Callable[[str], Any], str]] = {
        int: (int, "N"),
        float: (float, "X"),
        str: (str, "TEXT"),
    }
    parse, metavar = (_size, "SIZE") if metadata.get("parse") == "bytes" else kinds[hint]
    return {"type": parse, "metavar": metavar}


def _size(text: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer_or(words: tuple[str, ...], text: str) -> int | str:
    """A whole number, or one of the words."""
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {', '.join(words)}") from None
