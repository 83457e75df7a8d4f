"""From the options of `oneloop bench serve` to what is to be done; all that can be wrong with them is found here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop_bench.commands.serve_options import SAMPLING
from oneloop_bench.commands.server_facts import ServedModel, served_model, wait_ready
from oneloop_bench.commands.values import as_usage_error, pairs
from oneloop_bench.commands.workloads import read_workload
from oneloop_bench.load.arrivals import RampUp
from oneloop_bench.load.connection import Endpoint
from oneloop_bench.load.metrics import Selection
from oneloop_bench.load.prompts import TOKEN_IDS, named_tokenizer, ordinary_range, prompt_source
from oneloop_bench.load.result import field_names
from oneloop_bench.load.workload import CHAT_PATH, COMPLETIONS_PATH, Asking

if TYPE_CHECKING:
    import argparse

    from oneloop_bench.load.workload import Session


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent where, and what is told of it; not yet how fast."""

    url: str
    asking: Asking
    sessions: list[Session]
    """Of every run: those of other loads have the same."""
    warm_ups: list[Session]
    selection: Selection
    ramp_up: RampUp | None
    self_timed: bool
    """Whether the sessions' timestamps say when."""
    about: dict[str, Any]
    """Fields of the result that say what was run."""


def read_plan(options: argparse.Namespace) -> Plan:
    """UsageError when the options cannot work; RuntimeError when the server does not tell its model."""
    url = options.base_url or f"http://{_bracketed(options.host)}:{options.port}"
    headers = pairs("--header", options.header)
    with as_usage_error():
        selection, ramp_up = _selection(options), _ramp_up(options)
        path, is_chat = _path(options)
        Endpoint.from_url(url).head("POST", path, headers)
        if "stream" in options.extra_body:
            raise ValueError("--extra-body: whether replies are streamed says --disable-stream")
        sessions, warm_ups = _sessions(options, is_chat, options.token_id_range or TOKEN_IDS)
        self_timed = _is_self_timed(options, sessions)
        metadata = _metadata(options, selection)
    if options.ready_check_timeout_sec > 0:
        wait_ready(url, headers, options.ready_check_timeout_sec, insecure=options.insecure)
    draws_ids = _as_ids(options, is_chat) and not options.tokenizer and options.token_id_range is None
    if options.model and not draws_ids:
        model = ServedModel(options.model)
    else:
        model = served_model(url, headers, options.model, insecure=options.insecure)
    if draws_ids and (ids := ordinary_range(model.vocab_size)) != TOKEN_IDS:
        with as_usage_error():
            sessions, warm_ups = _sessions(options, is_chat, ids)
    asking = _asking(options, model.name, path, is_chat, headers)
    about = {**_about(options, asking, ramp_up), **metadata}
    with as_usage_error():
        _check_text(about)
    return Plan(url, asking, sessions, warm_ups, selection, ramp_up, self_timed, about)


def _sessions(
    options: argparse.Namespace, is_chat: bool, token_ids: tuple[int, int]
) -> tuple[list[Session], list[Session]]:
    """The run's, and those of the warm-up, which are others. token_ids: the range to draw from. ValueError."""
    if not all(rate > 0 for rate in options.request_rate):
        raise ValueError("--request-rate must be above 0 (or inf)")
    workload = read_workload(options)
    tokenizer = named_tokenizer(options.tokenizer) if options.tokenizer else None
    source = prompt_source(tokenizer, as_ids=_as_ids(options, is_chat), token_ids=token_ids)
    found = []
    for seed, count in ((options.seed, options.num_prompts), (options.seed + 1, options.num_warmups)):
        found.append(workload.sessions(count, source, np.random.default_rng((seed, 0))) if count else [])
    for turn in (turn for session in found[0] for turn in session.turns):
        if not is_chat and not turn.prompt:
            raise ValueError('--dataset-path: "messages" are for chat: --backend openai-chat')
        if is_chat and turn.messages is None and isinstance(turn.prompt, list):
            raise ValueError("--dataset-path: token ids are for completions, chat takes text")
    return found[0], found[1]


def _is_self_timed(options: argparse.Namespace, sessions: list[Session]) -> bool:
    """By the timestamps, where the workload has some and nothing else says when. ValueError."""
    has_times = all(session.timestamp is not None for session in sessions)
    is_paced = options.request_rate != [float("inf")] or options.ramp_up_strategy is not None
    wanted: bool = options.self_timed if options.self_timed is not None else has_times and not is_paced
    if wanted and not has_times:
        raise ValueError("--self-timed: this workload has no timestamps")
    if wanted and is_paced:
        raise ValueError(
            "--self-timed: the timestamps say when; leave --request-rate and --ramp-up-strategy out"
        )
    return wanted


def _about(options: argparse.Namespace, asking: Asking, ramp_up: RampUp | None) -> dict[str, Any]:
    backend = options.backend or ("openai-chat" if asking.is_chat else "openai")
    about = {
        "endpoint_type": backend,
        "backend": backend,
        "label": options.label or backend,
        "model_id": asking.model,
        "tokenizer_id": options.tokenizer,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        "burstiness": options.burstiness,
    }
    if ramp_up is not None:
        about |= {
            "ramp_up_strategy": ramp_up.strategy,
            "ramp_up_start_rps": ramp_up.start_rps,
            "ramp_up_end_rps": ramp_up.end_rps,
        }
    return about


def _metadata(options: argparse.Namespace, selection: Selection) -> dict[str, str]:
    """Fields of the user's own. ValueError for the name of a field that results have."""
    found = pairs("--metadata", options.metadata)
    for name in found:
        if name in field_names(selection) or name.endswith("_ms"):
            raise ValueError(f"--metadata: {name} is a field that results have; choose another name")
    return found


def _check_text(about: dict[str, Any]) -> None:
    """ValueError where a result could not be written at the end: an option holds bytes that are no UTF-8."""
    for name, value in about.items():
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name}: {value!r} is not UTF-8") from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _path(options: argparse.Namespace) -> tuple[str, bool]:
    """(path of the endpoint, whether it is chat's)."""
    path = options.endpoint or (CHAT_PATH if options.backend == "openai-chat" else COMPLETIONS_PATH)
    path = path if path.startswith("/") else f"/{path}"
    is_chat = path.endswith("/chat/completions")
    if options.backend is not None and is_chat != (options.backend == "openai-chat"):
        raise ValueError(f"--backend {options.backend} does not go with --endpoint {path}")
    return path, is_chat


def _as_ids(options: argparse.Namespace, is_chat: bool) -> bool:
    """Whether prompts are sent as token ids."""
    if options.prompt_form is not None:
        if options.prompt_form == "ids" and is_chat:
            raise ValueError("--prompt-form ids: chat takes text only")
        return bool(options.prompt_form == "ids")
    return not is_chat and options.tokenizer is None and options.dataset_name != "multi_turn"


def _asking(
    options: argparse.Namespace, model: str, path: str, is_chat: bool, headers: dict[str, str]
) -> Asking:
    given = vars(options)
    sampling = {name: given[name] for name in SAMPLING if given[name] is not None}
    ignore_eos = options.ignore_eos if options.ignore_eos is not None else options.dataset_name != "custom"
    return Asking(
        model=model,
        path=path,
        is_chat=is_chat,
        streams=not options.disable_stream,
        ignore_eos=ignore_eos,
        extra_body={**sampling, **options.extra_body},
        headers=headers,
        timeout_s=options.request_timeout,
    )


def _selection(options: argparse.Namespace) -> Selection:
    try:
        limits = {name: float(value) for name, value in pairs("--goodput", options.goodput, ":").items()}
    except ValueError as error:
        raise ValueError(f"--goodput: {error}") from None
    names = tuple(name.strip() for name in options.percentile_metrics.split(",") if name.strip())
    return Selection(names, tuple(options.metric_percentiles), limits)


def _ramp_up(options: argparse.Namespace) -> RampUp | None:
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need a --ramp-up-strategy")
        return None
    if options.request_rate != [float("inf")]:
        raise ValueError("--ramp-up-strategy says the rate; leave --request-rate out")
    if start is None or end is None:
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    return RampUp(options.ramp_up_strategy, start, end)
