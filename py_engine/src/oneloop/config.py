"""Every setting, in a handful of frozen dataclasses. The command line is derived from them (cli/arguments.py).

Imports nothing heavy. `EngineConfig.from_flat` builds the aggregate from flat names: the CLI's and those of `LLM(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from oneloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MODEL = "smollm2"
"""Name of the embedded chat model (SmolLM2-135M-Instruct), fetched once into the cache folder."""


def setting(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field with the metadata that the command line and the checks are made from.

    extra: minimum and maximum (of a number), flags (more names on the command line), parse ("bytes": sizes like 512M).
    """
    return field(default=default, metadata={"help": help_text, **extra})


class _Settings:
    """Checks every field of a group of settings against its type and its range."""

    __slots__ = ()

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if not _fits(value, hints[item.name]):
                raise ConfigError(item.name, f"must be {describe(hints[item.name])}, got {value!r}")
            minimum = item.metadata.get("minimum")
            if minimum is not None and value is not None and value < minimum:
                raise ConfigError(item.name, f"must be at least {minimum}, got {value}")
            maximum = item.metadata.get("maximum")
            if maximum is not None and value is not None and value > maximum:
                raise ConfigError(item.name, f"must be at most {maximum}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Settings):
    """Which model, and how its weights are read."""

    model: str = setting(DEFAULT_MODEL, "folder, GGUF file, hub id, or 'smollm2' (embedded)")
    served_model_name: tuple[str, ...] = setting((), "names clients may use; default: the model argument")
    tokenizer: str | None = setting(None, "folder or file of the tokenizer; default: the model's own")
    chat_template: str | None = setting(None, "file with a Jinja chat template; default: the model's own")
    revision: str | None = setting(None, "branch, tag or commit of a hub model, for all its files")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = setting(
        "auto", "how weights are read; dummy: random"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "type of weights and KV; auto: float32 on a CPU"
    )
    max_model_len: int | None = setting(
        None, "context length in tokens; default: the model's own, as far as the KV cache holds it", minimum=2
    )
    seed: int = setting(0, "seed of requests that bring none, and of dummy weights", minimum=0)
    generation_config: str = setting(
        "auto", "'auto': the model's generation_config.json gives sampling defaults; 'none'; or a folder"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(_Settings):
    """The KV cache."""

    block_size: int = setting(16, "tokens per KV block", minimum=1)
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV cache, e.g. 512M or 2G; default: a quarter of the free memory, at most 4G",
        flags=("--kv-cache-memory",),
        parse="bytes",
        minimum=1,
    )
    num_gpu_blocks_override: int | None = setting(
        None, "number of KV blocks, whatever the memory (tests)", minimum=1
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV of equal prompt prefixes")


_CPU_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(_Settings):
    """What a step may hold."""

    max_num_seqs: int = setting(256, "sequences that run at once", minimum=1)
    max_num_batched_tokens: int | None = setting(
        None, "tokens one step computes at most; default: 512, or max_num_seqs if that is more", minimum=1
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting("fcfs", "order of admission and preemption")
    max_num_queued_reqs: int = setting(
        4096, "waiting sequences beyond which new requests get 503 with Retry-After", minimum=1
    )
    step_timeout_s: float = setting(
        300.0, "seconds after which a step that does not complete ends the engine", minimum=0.001
    )

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.step_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.step_tokens} is less than max_num_seqs = {self.max_num_seqs}, and every running "
                "sequence gets at least one token a step; raise it or lower max_num_seqs",
            )

    @property
    def step_tokens(self) -> int:
        """max_num_batched_tokens, its default filled in: about half a second of prefill of a small model on a CPU."""
        return self.max_num_batched_tokens or max(_CPU_STEP_TOKENS, self.max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(_Settings):
    """The HTTP endpoint."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    api_key: str | None = setting(None, "key that clients must send; also ONELOOP_API_KEY")
    max_body_bytes: int = setting(16 << 20, "largest request body", parse="bytes", minimum=1)
    max_sequences_per_request: int = setting(128, "prompts x n that one request may ask for", minimum=1)
    write_timeout_s: float = setting(
        60.0, "a client that reads nothing for so long is cut off", minimum=0.001
    )
    shutdown_timeout: float = setting(5.0, "seconds that running requests get after SIGTERM", minimum=0)

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError(
                "api_key", "is empty, which no client could send; give a key, or unset ONELOOP_API_KEY"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs; the server adds ServerConfig."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Sort flat names into the groups. ConfigError for a name that no group has, and for bad values."""
        groups: dict[str, dict[str, Any]] = {"model": {}, "cache": {}, "scheduler": {}}
        homes = {f.name: group for group, kind in _GROUPS.items() for f in fields(kind)}
        for name, value in values.items():
            if name not in homes:
                raise ConfigError(name, "no such setting; `oneloop serve --help` lists them")
            groups[homes[name]][name] = value
        return cls(
            model=ModelConfig(**groups["model"]),
            cache=CacheConfig(**groups["cache"]),
            scheduler=SchedulerConfig(**groups["scheduler"]),
        )


_GROUPS: dict[str, Any] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}


def type_hints(kind: Any) -> dict[str, Any]:
    """Evaluated annotations of a settings class."""
    return get_type_hints(kind)


def describe(hint: Any) -> str:
    """A setting's type in words: "an integer", "one of auto, float32"."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is UnionType:
        return describe(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return "a tuple of strings"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is float:
        return type(value) in (int, float) and value == value  # NaN is no setting
    if hint in (NoneType, None):
        return value is None
    return type(value) is hint
