"""Every setting, in a handful of frozen dataclasses. The command line is derived from them (cli/arguments.py).

Imports nothing heavy. `EngineConfig.from_flat` builds the aggregate from flat names: the CLI's and those of `LLM(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from oneloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MODEL = "smollm2"
"""Name of the embedded chat model (SmolLM2-135M-Instruct), fetched once into the cache folder."""


def setting(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field with the metadata the command line is made from (help, choices, flags, hidden, parse)."""
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
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
        None, "context length in tokens; default: the model's own, as far as the KV cache holds it"
    )
    seed: int = setting(0, "seed of requests that bring none, and of dummy weights")
    generation_config: str = setting(
        "auto", "'auto': the model's generation_config.json gives sampling defaults; 'none'; or a folder"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = setting(16, "tokens per KV block")
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV cache, e.g. 512M or 2G; default: a quarter of the free memory, at most 4G",
        flags=("--kv-cache-memory",),
        parse="bytes",
    )
    num_gpu_blocks_override: int | None = setting(None, "number of KV blocks, whatever the memory (tests)")
    enable_prefix_caching: bool = setting(True, "reuse the KV of equal prompt prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_seqs: int = setting(256, "sequences that run at once")
    max_num_batched_tokens: int = setting(2048, "tokens one step computes at most")
    scheduling_policy: Literal["fcfs", "priority"] = setting("fcfs", "order of admission and preemption")
    max_num_queued_reqs: int = setting(
        4096, "waiting requests beyond which new ones get 503 with Retry-After"
    )
    step_timeout_s: float = setting(
        300.0, "seconds after which a step that does not complete ends the engine"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP endpoint."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on")
    api_key: str | None = setting(None, "key that clients must send; also ONELOOP_API_KEY")
    max_body_bytes: int = setting(16 << 20, "largest request body", parse="bytes")
    max_sequences_per_request: int = setting(128, "prompts x n that one request may ask for")
    write_timeout_s: float = setting(60.0, "a client that reads nothing for so long is cut off")
    shutdown_timeout: float = setting(5.0, "seconds that running requests get after SIGTERM")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs; the server adds ServerConfig."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Sort flat names into the groups. ConfigError for a name that no group has."""
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
