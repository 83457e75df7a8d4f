"""Every setting, in a handful of frozen dataclasses. The command line is derived from them (cli/arguments.py).

Imports nothing heavy. `EngineConfig.from_flat` builds the aggregate from flat names: the CLI's and those of `LLM(...)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from oneloop.device.detect import DeviceKind, resolve_device
from oneloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DtypeName = Literal["float32", "bfloat16", "float16"]
DtypeSetting = Literal["auto", DtypeName]
QuantizationName = Literal["fp8", "fp8-block", "compressed-tensors", "fbgemm_fp8", "awq", "gptq"]
DEFAULT_MODEL = "smollm2"
"""Name of the embedded chat model (SmolLM2-135M-Instruct), fetched once into the cache folder."""
NULL_MODEL = "null"
"""What the null executor serves where no model is named: no files, bytes are tokens."""


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS: Final = " KMGT"


def size_in_bytes(text: str) -> int:
    """ "512M", "2G", "1.5GiB" or plain bytes. Units are powers of 1024. ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 512M or 2G")
    return int(float(match[1]) * 1024 ** _UNITS.index(match[2].upper() or " "))


def size_as_text(num_bytes: int, *, round_up: bool = False) -> str:
    """As `size_in_bytes` reads it, to two digits: "16G". round_up: so that it is no less; else it is no more."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    hundredths = num_bytes * 100 >> 10 * power
    if round_up and (hundredths << 10 * power) < num_bytes * 100:
        hundredths += 1
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + _UNITS[power].strip()


def setting(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field with the metadata that the command line and the checks are made from.

    extra: minimum and maximum (of a number), flags (more names on the command line), environment (a variable that gives
    it where the command line does not), parse ("bytes": sizes like 512M, as text too), hidden (not in the help).
    """
    return field(default=default, metadata={"help": help_text, **extra})


class _Settings:
    """Checks every field of a group of settings against its type and its range."""

    __slots__ = ()

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if item.metadata.get("parse") == "bytes" and isinstance(value, str):
                value = _size(item.name, value)
                object.__setattr__(self, item.name, value)
            if not _fits(value, hints[item.name]):
                size = ' or a size like "2G"' if item.metadata.get("parse") == "bytes" else ""
                raise ConfigError(item.name, f"must be {describe(hints[item.name])}{size}, got {value!r}")
            if not isinstance(value, int | float):
                continue
            minimum, maximum = item.metadata.get("minimum"), item.metadata.get("maximum")
            if minimum is not None and value < minimum:
                raise ConfigError(item.name, f"must be at least {minimum}, got {value}")
            if maximum is not None and value > maximum:
                raise ConfigError(item.name, f"must be at most {maximum}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Settings):
    """Which model, and how its weights are read."""

    model: str = setting(DEFAULT_MODEL, "folder, GGUF file, hub id, or 'smollm2' (embedded)")
    served_model_name: tuple[str, ...] = setting((), "names clients may use; default: the model argument")
    tokenizer: str | None = setting(None, "folder or file of the tokenizer; default: the model's own")
    chat_template: str | None = setting(None, "file with a Jinja chat template; default: the model's own")
    renderer: Literal["auto", "hf", "mistral", "harmony"] = setting(
        "auto",
        "how conversations become prompts; hf: by the chat template as it is; mistral, harmony: as those models read "
        "them; auto: what the tokenizer shows, hf where --chat-template gives one",
        flags=("--tokenizer-mode",),
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model, for all its files")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = setting(
        "auto", "how weights are read; dummy: random"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "type of weights and KV; auto: float32 on a CPU, on a GPU the checkpoint's 16-bit type, else bfloat16",
    )
    quantization: Literal["fp8", "fp8-block", "compressed-tensors", "fbgemm_fp8", "awq", "gptq"] | None = (
        setting(
            None,
            "fp8 makes 8-bit floats of the weights while loading, with a scale per row, fp8-block per 128 x 128; "
            "quantised checkpoints say how they are, and must agree where it is given",
        )
    )
    max_model_len: int | Literal["auto"] | None = setting(
        None,
        "context length in tokens; auto: the longest that the KV cache holds; default: the model's own",
        minimum=2,
    )
    seed: int = setting(0, "seed of requests that bring none, and of dummy weights", minimum=0)
    generation_config: str = setting(
        "auto", "'auto': the model's generation_config.json gives sampling defaults; 'none'; or a folder"
    )

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if not self.model:
            raise ConfigError("model", f"is empty; give a folder, a GGUF file, a hub id or {DEFAULT_MODEL}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(_Settings):
    """The KV cache."""

    block_size: int | None = setting(None, "tokens per KV block; default: 16", minimum=1)
    gpu_memory_utilization: float = setting(
        0.9, "part of a GPU's memory that the engine may take, all in all", minimum=0.01, maximum=1.0
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV cache, e.g. 512M or 2G; default: on a GPU what gpu_memory_utilization leaves, on a CPU a "
        "quarter of the free memory, at most 4G",
        flags=("--kv-cache-memory",),
        parse="bytes",
        minimum=1,
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = setting(
        "auto",
        "type that keys and values are kept in; auto: the model's; fp8, fp8_e4m3: in 8 bits, twice as many tokens "
        "of a 16-bit model at some loss of quality",
    )
    num_gpu_blocks_override: int | None = setting(
        None, "number of KV blocks, whatever the memory (tests)", minimum=1
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV of equal prompt prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(_Settings):
    """What a step may hold."""

    max_num_seqs: int | None = setting(
        None, "sequences that run at once; default: 512 on a GPU, 256 on a CPU", minimum=1
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "tokens one step computes at most; default: 2048 on a GPU, 512 on a CPU, or max_num_seqs if that is more",
        minimum=1,
    )
    mixed_step_tokens: int | None = setting(
        None,
        "tokens that a step computes at most while streams are running, so that prompts do not hold them up; half of "
        "it is for prompts however many run; default: about 50 ms of a known GPU's work, else as any step",
        minimum=1,
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting("fcfs", "order of admission and preemption")
    max_num_queued_reqs: int = setting(
        4096, "waiting sequences beyond which new requests get 503 with Retry-After", minimum=1
    )
    record_trace: str | None = setting(
        None,
        "file for a schedule trace, to be run again with `oneloop replay`; it holds no text; an older one is replaced",
    )
    step_timeout_s: float = setting(
        300.0, "seconds after which a step that does not complete ends the engine", minimum=0.001
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(_Settings):
    """Where steps run, and how."""

    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "where the model runs; auto: a GPU where there is one"
    )
    enforce_eager: bool = setting(False, "launch every kernel by itself instead of replaying CUDA graphs")
    deterministic: bool = setting(
        False,
        "a request gets the same tokens whatever runs beside it, however its prompt is cut or cached (GPU)",
    )
    deterministic_requests: bool = setting(
        False,
        "allow requests with deterministic: true, and get ready for them; steps that hold one are computed so (GPU)",
    )
    expert_statistics: bool = setting(
        False, "count the tokens that each expert of a mixture gets, for /debug/experts"
    )
    executor: Literal["auto", "null"] = setting(
        "auto", "what runs the steps; null: pseudo-random tokens, no model", hidden=True
    )
    null_step_ms: float = setting(
        0.0, "what a step of the null executor takes", minimum=0, maximum=20, hidden=True
    )

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.null_step_ms and self.executor != "null":
            raise ConfigError("null_step_ms", "is the null executor's; add --executor null")

    @property
    def orders(self) -> tuple[bool, ...]:
        """Of sums, that steps may have; True: the fixed one (oneloop_kernels.order). Most steps have the first."""
        if self.deterministic:
            return (True,)
        return (False, True) if self.deterministic_requests else (False,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(_Settings):
    """The HTTP endpoint."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    api_key: str | None = setting(
        None, "key that clients must send; also ONELOOP_API_KEY", environment="ONELOOP_API_KEY"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "what is logged to stderr, at least; also ONELOOP_LOG_LEVEL", environment="ONELOOP_LOG_LEVEL"
    )
    max_body_bytes: int = setting(16 << 20, "largest request body", parse="bytes", minimum=1)
    max_sequences_per_request: int = setting(128, "prompts x n that one request may ask for", minimum=1)
    write_timeout_s: float = setting(
        60.0, "a client that reads nothing for so long is cut off", minimum=0.001
    )
    enable_debug_endpoints: bool = setting(
        False,
        "serve /debug/scheduler (live view: JSON, or a page for browsers), /debug/experts and /debug/stacks",
    )
    response_store_entries: int = setting(
        1024, "responses kept to be asked for again and gone on from; 0: none", minimum=0
    )
    response_store_bytes: int = setting(256 << 20, "memory for stored responses", parse="bytes", minimum=1)
    response_store_ttl_s: float = setting(
        3600.0, "seconds for which a stored response is kept", minimum=0.001
    )
    keep_billing_header: bool = setting(
        False,
        "leave the changing billing line of Claude Code in system prompts, though it spoils prefix hits",
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "serve /tokenizer_info: the tokenizer's settings and the chat template"
    )
    trust_request_chat_template: bool = setting(
        False, "let requests bring a chat_template of their own; it runs in the sandbox, within limits"
    )
    strict_fields: bool = setting(
        False, "answer 400 to fields that have no effect, instead of naming them in X-Oneloop-Ignored"
    )
    enable_force_include_usage: bool = setting(
        False, "end every stream with its usage, as stream_options.include_usage asks for"
    )
    tool_call_parser: str = setting(
        "auto", "format of the model's tool calls, none for no tools; auto: by the chat template"
    )
    reasoning_parser: str = setting(
        "auto", "format of the model's thinking, none to leave it in the text; auto: by the chat template"
    )
    enable_auto_tool_choice: bool = setting(
        True,
        "let the model choose among a request's tools, where the format of its calls is known",
    )
    shutdown_timeout: float = setting(5.0, "seconds that running requests get after SIGTERM", minimum=0)

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError(
                "api_key", "is empty, which no client could send; give a key, or unset ONELOOP_API_KEY"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The settings whose defaults depend on the device, as they hold."""

    device: DeviceKind
    max_num_seqs: int
    step_tokens: int
    """max_num_batched_tokens."""
    block_size: int


_DEFAULTS: Final[Mapping[DeviceKind, Resolved]] = {
    # 2,048 tokens: enough to fill the matrix units, few enough for steady streams beside (45 ms of an 8B model)
    "cuda": Resolved(device="cuda", max_num_seqs=512, step_tokens=2048, block_size=16),
    # 512 tokens: about half a second of prefill of a small model
    "cpu": Resolved(device="cpu", max_num_seqs=256, step_tokens=512, block_size=16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs; the server adds ServerConfig."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    resolved: Resolved = field(init=False)
    """Made once, here: everything that needs a device-dependent setting reads it from this."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolved", resolve(self, resolve_device(self.worker.device)))

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Sort flat names into the groups. ConfigError for a name that no group has, and for bad values.

        The null executor serves no model unless one is named.
        """
        if values.get("executor") == "null":
            values = {"model": NULL_MODEL, **values}
        groups: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        homes = {f.name: group for group, kind in _GROUPS.items() for f in fields(kind)}
        for name, value in values.items():
            if name not in homes:
                raise ConfigError(name, f"no such setting; {_advice(name, homes)}")
            groups[homes[name]][name] = value
        return cls(**{group: kind(**groups[group]) for group, kind in _GROUPS.items()})


def _advice(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "`oneloop serve --help` lists them, with dashes"


_GROUPS: Final[Mapping[str, Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}


def resolve(config: EngineConfig, device: DeviceKind) -> Resolved:
    """What the settings come to on a device. ConfigError where a step has no room for every running sequence."""
    defaults, scheduler = _DEFAULTS[device], config.scheduler
    if True in config.worker.orders and device == "cpu" and config.worker.executor != "null":
        raise ConfigError(
            "deterministic" if config.worker.deterministic else "deterministic_requests",
            "is for GPUs: on a CPU sums depend on how many rows there are; leave it, or take a GPU",
        )
    max_num_seqs = scheduler.max_num_seqs or defaults.max_num_seqs
    step_tokens = scheduler.max_num_batched_tokens or max(defaults.step_tokens, max_num_seqs)
    if step_tokens < max_num_seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{step_tokens} is less than max_num_seqs = {max_num_seqs}, and every running "
            "sequence gets at least one token a step; raise it or lower max_num_seqs",
        )
    return Resolved(
        device=device,
        max_num_seqs=max_num_seqs,
        step_tokens=step_tokens,
        block_size=config.cache.block_size or defaults.block_size,
    )


def mixed_step_tokens(config: EngineConfig, quick_step_tokens: int | None) -> int:
    """Tokens of a step beside running streams: as set, or those that the device computes quickly; those of any step
    at most.

    quick_step_tokens: as ModelInfo's.
    """
    most = config.resolved.step_tokens
    return min(config.scheduler.mixed_step_tokens or quick_step_tokens or most, most)


def resolve_dtype(
    setting: DtypeSetting, device: DeviceKind, checkpoint: DtypeName, *, gguf: bool
) -> DtypeName:
    """The type of weights and KV. checkpoint: what the model file declares; gguf: whether it is one of those.

    auto: on a CPU float32, whose matrix products are the fastest there; on a GPU the checkpoint's own if it has 16
    bits, else bfloat16; bfloat16 for GGUF files too, whose matrices are mostly quantised.
    """
    if setting != "auto":
        return setting
    if device == "cpu":
        return "float32"
    return "bfloat16" if gguf or checkpoint == "float32" else checkpoint


def type_hints(kind: Any) -> dict[str, Any]:
    """Evaluated annotations of a settings class."""
    return get_type_hints(kind)


def choices(hint: Any) -> tuple[Any, ...]:
    """The parts of a union, without None; of anything else, itself."""
    if get_origin(hint) in (UnionType, Union):
        return tuple(choice for choice in get_args(hint) if choice is not NoneType)
    return (hint,)


def describe(hint: Any) -> str:
    """A setting's type in words: "an integer", "one of auto, float32", "an integer or auto"."""
    return " or ".join(_describe_one(choice, alone=len(choices(hint)) == 1) for choice in choices(hint))


def _describe_one(hint: Any, *, alone: bool) -> str:
    if get_origin(hint) is Literal:
        return ("one of " if alone else "") + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "a tuple of strings"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _size(name: str, text: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise ConfigError(name, str(error)) from None


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (UnionType, Union):
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is float:
        return type(value) in (int, float) and value == value  # NaN is no setting
    if hint in (NoneType, None):
        return value is None
    return type(value) is hint
