"""The options of `oneloop bench serve`, with the names that users of `vllm bench serve` know."""

from __future__ import annotations

import argparse
from pathlib import Path

from oneloop_bench.commands.values import (
    count,
    json_object,
    number,
    number_above_0,
    number_from_0,
    number_range,
    numbers,
    whole_number,
    whole_numbers,
)
from oneloop_bench.load.datasets import MultiTurn, PrefixRepetition, RandomLengths
from oneloop_bench.load.metrics import METRICS
from oneloop_bench.load.prompts import TOKEN_IDS
from oneloop_bench.load.workload import CHAT_PATH, COMPLETIONS_PATH

DATASETS = ("random", "prefix_repetition", "multi_turn", "sharegpt", "custom", "timed_trace")
BACKENDS = ("openai", "openai-chat", "vllm")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them, by groups."""
    _add_server(parser.add_argument_group("server"))
    _add_traffic(parser.add_argument_group("traffic"))
    add_workload(parser.add_argument_group("workload"))
    add_lengths(parser.add_argument_group("lengths"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_request(parser.add_argument_group("request"))
    _add_results(parser.add_argument_group("results"))
    _add_client(parser.add_argument_group("client"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="openai (or vllm): completions; openai-chat: chat; default: by --endpoint",
    )
    group.add_argument(
        "--base-url", metavar="URL", help="the server's address; default: from --host and --port"
    )
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument(
        "--endpoint", metavar="PATH", help=f"default: {COMPLETIONS_PATH}, or {CHAT_PATH} by --backend"
    )
    group.add_argument("--model", help="the name in requests; default: the first that /v1/models tells")
    group.add_argument(
        "--header", nargs="*", metavar="KEY=VALUE", help="more headers, e.g. Authorization=Bearer …"
    )
    group.add_argument("--insecure", action="store_true", help="take any TLS certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=number_from_0,
        default=0.0,
        metavar="S",
        help="wait so long for the server to answer before the run; default: not at all",
    )


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=numbers,
        default=[float("inf")],
        metavar="X[,X…]",
        help="requests per second, whether or not the server keeps up; inf (default): all at once; several: "
        "one run after another",
    )
    group.add_argument(
        "--burstiness",
        type=number_above_0,
        default=1.0,
        metavar="X",
        help="1 (default): a Poisson process; less: in bursts; more: evenly (gamma gaps)",
    )
    group.add_argument(
        "--max-concurrency",
        type=whole_numbers,
        default=[None],
        metavar="N[,N…]",
        help="at most so many requests at once (a closed loop, with --request-rate inf); several: one run "
        "after another",
    )
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="let the rate grow from the first request to the last",
    )
    group.add_argument("--ramp-up-start-rps", type=number_from_0, metavar="X", help="the first rate")
    group.add_argument("--ramp-up-end-rps", type=number_above_0, metavar="X", help="the last rate")
    group.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        help="send when the workload's timestamps say; default: where it has some",
    )


def add_workload(group: argparse._ArgumentGroup, *, with_chats: bool = True) -> None:
    """What is asked. with_chats: whether it may be conversations, whose turns wait for replies."""
    chats = "multi_turn: conversations; " if with_chats else ""
    group.add_argument(
        "--dataset-name",
        choices=[name for name in DATASETS if with_chats or name != "multi_turn"],
        default="random",
        help="random (default): independent prompts; prefix_repetition: shared prefixes; sharegpt: lengths "
        f"as in ShareGPT, built in; {chats}custom, timed_trace: a file",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="JSONL of custom or timed_trace")
    group.add_argument(
        "--num-prompts", type=count, default=1000, metavar="N", help="requests; default: %(default)s"
    )
    group.add_argument("--disable-shuffle", action="store_true", help="custom prompts in the file's order")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="model folder or GGUF file: prompts are then words that are a "
        "token each. Default: token ids for completions, common words for chat",
    )
    group.add_argument(
        "--prompt-form",
        choices=("text", "ids"),
        help="default: ids for completions without --tokenizer, else text",
    )
    group.add_argument(
        "--token-id-range",
        type=number_range,
        metavar="LOW:HIGH",
        help=f"ids drawn where there is no --tokenizer; default: {TOKEN_IDS[0]}:{TOKEN_IDS[1]}, or as far down as "
        "a smaller vocabulary is, where the server tells its size",
    )


def add_lengths(group: argparse._ArgumentGroup, *, with_chats: bool = True) -> None:
    """How long. with_chats: as for add_workload."""
    random, prefix = RandomLengths(), PrefixRepetition()
    group.add_argument(
        "--input-len",
        type=count,
        metavar="N",
        help="tokens of a prompt: random, prefix_repetition (its suffix)" + ", multi_turn" * with_chats,
    )
    group.add_argument(
        "--output-len",
        type=count,
        metavar="N",
        help="new tokens of a reply, for every dataset but timed_trace",
    )
    integers = {
        "--random-input-len": random.input_len,
        "--random-output-len": random.output_len,
        "--random-prefix-len": random.prefix_len,
        "--prefix-repetition-prefix-len": prefix.prefix_len,
        "--prefix-repetition-suffix-len": prefix.suffix_len,
        "--prefix-repetition-num-prefixes": prefix.num_prefixes,
        "--prefix-repetition-output-len": prefix.output_len,
    }
    _add_integers(group, integers)
    group.add_argument(
        "--random-range-ratio",
        type=number_from_0,
        default=random.range_ratio,
        metavar="X",
        help="lengths are from (1 − X) to (1 + X) times theirs; default: %(default)s",
    )
    if with_chats:
        _add_lengths_of_chats(group)
    group.add_argument(
        "--custom-output-len", type=count, metavar="N", help="max_tokens of lines that do not say"
    )
    group.add_argument(
        "--timed-trace-sec-multiplier",
        type=number_above_0,
        default=1.0,
        metavar="X",
        help="seconds per unit of the trace's timestamps (0.001: they are ms)",
    )
    group.add_argument(
        "--timed-trace-chunk-hash-size",
        type=count,
        default=16,
        metavar="N",
        help="tokens per hash id of the trace (512 for Mooncake's); default: %(default)s",
    )


def _add_lengths_of_chats(group: argparse._ArgumentGroup) -> None:
    chat = MultiTurn()
    integers = {
        "--multi-turn-num-turns": chat.num_turns,
        "--multi-turn-input-len": chat.input_len,
        "--multi-turn-output-len": chat.output_len,
        "--multi-turn-system-len": chat.system_len,
    }
    _add_integers(group, integers)
    group.add_argument(
        "--multi-turn-think-time",
        type=number_from_0,
        default=chat.think_time_s,
        metavar="S",
        help="mean pause before a next turn; default: %(default)s",
    )


def _add_integers(group: argparse._ArgumentGroup, defaults: dict[str, int]) -> None:
    for name, default in defaults.items():
        group.add_argument(name, type=int, default=default, metavar="N", help="default: %(default)s")


def _add_request(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate to the full length; default: for drawn prompts, not for custom ones",
    )
    group.add_argument(
        "--disable-stream", action="store_true", help="ask for whole replies: no TTFT, TPOT, ITL"
    )
    for name in SAMPLING:
        kind = int if name == "top_k" else number
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="X", help="default: the server's"
        )
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of every request"
    )
    group.add_argument(
        "--request-timeout", type=number_above_0, default=3600.0, metavar="S", help="default: %(default)s"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help=f"of {', '.join(METRICS)}; default: %(default)s",
    )
    group.add_argument(
        "--metric-percentiles",
        type=numbers,
        default=[50.0, 90.0, 99.0],
        metavar="X,X",
        help="default: 50,90,99",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests that keep these limits: ttft:MS tpot:MS e2el:MS",
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="… with one entry per request")
    group.add_argument("--append-result", action="store_true", help="… or a line more in --result-filename")
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR", help="default: here")
    group.add_argument("--result-filename", metavar="NAME", help="default: from label, rate, model and date")
    group.add_argument("--label", help="the run's name in file names and pictures; default: the backend")
    group.add_argument("--metadata", nargs="*", metavar="KEY=VALUE", help="more fields of the result")
    group.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw latencies against load (needs matplotlib)"
    )
    group.add_argument(
        "--strict", action="store_true", help="exit with 1 when a request fails or a reply breaks a check"
    )


def _add_client(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="N",
        help="of prompts and arrivals; default: %(default)s",
    )
    group.add_argument(
        "--num-warmups",
        type=whole_number,
        default=0,
        metavar="N",
        help="requests before the run, not counted",
    )
    group.add_argument(
        "--client-processes",
        type=count,
        default=1,
        metavar="N",
        help="clients that share the load; one takes some 100,000 events/s",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument(
        "--measure-ceiling",
        action="store_true",
        help="do not load a server: tell how many events per second this client can take",
    )
