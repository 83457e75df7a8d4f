"""What would make a model fit: settings that are named have been tried, by the same arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oneloop.config import size_as_text, size_in_bytes
from oneloop.worker.memory.ledger import DeviceMemory
from oneloop.worker.memory.sizes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oneloop.config import DtypeName, EngineConfig
    from oneloop.worker.memory.ledger import MemoryLedger

_SMALL_SEQS: Final = 16
_SMALL_STEP: Final = 512
"""A small step; smaller ones save little more. By the plan of an 8B model on a GPU, against 256 sequences and 8,192
tokens: this frees 1,490 MiB, one sequence and 32 tokens 180 more."""
_UTILIZATIONS: Final = (0.92, 0.95, 0.98)
_FREEABLE: Final = 0.9
"""Part of the memory that may be free on a machine, or a card, on which nothing else runs. A cautious one: of an idle
H200 NVML calls 0.996 free, of a machine of 24 GB on which only small programs run Linux 0.96."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a plan depends on, beside the model."""

    dtype: DtypeName
    config: EngineConfig
    memory: DeviceMemory

    def with_settings(self, group: str, **values: Any) -> Case:
        """Another one with these settings. group: EngineConfig's name of theirs."""
        settings = replace(getattr(self.config, group), **values)
        return replace(self, config=replace(self.config, **{group: settings}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is known about a misfit."""

    per_block: int
    """Bytes."""
    longest: int | None = None
    """Tokens of context that would fit the cache, where the context is all that does not fit."""
    least_blocks: int | None = None
    """Blocks that the cache would need…"""
    most_blocks: int | None = None
    """…or that there is memory for, where so many were asked that there is not."""


class MisfitError(Exception):
    """A case that cannot be. The fact in words, without the remedy; the ledger as far as it was planned."""

    def __init__(self, field: str, fact: str, problem: Problem, ledger: MemoryLedger) -> None:
        super().__init__(fact)
        self.field = field
        self.fact = fact
        self.problem = problem
        self.ledger = ledger


Remedy: TypeAlias = "tuple[str, Case]"
"""What to set, in words, and the case that it leads to."""


def remedies(problem: Problem, case: Case, fits: Callable[[Case], bool]) -> str:
    """Everything that helps, in words, each by itself. fits: whether a case can be."""
    found: list[str] = []
    for alternatives in _candidates(problem, case):
        words = next((words for words, other in alternatives if fits(other)), None)
        if words is None and problem.longest is None and case.config.model.max_model_len != "auto":
            words = next((words for words, other in alternatives if fits(_with_auto(other))), None)
            words = None if words is None else f"{words} with --max-model-len auto"
        if words is not None:
            found.append(words)
    if not found:
        device = "GPU" if case.config.resolved.device == "cuda" else "machine"
        return f"no setting makes room: it takes a smaller model, or a {device} with more memory"
    return "what helps: " + ", or ".join(found)


def _with_auto(case: Case) -> Case:
    return case.with_settings("model", max_model_len="auto")


def _candidates(problem: Problem, case: Case) -> Iterator[list[Remedy]]:
    """The simplest first; of alternatives the first that does is enough."""
    if problem.longest is not None:
        yield [(f"--max-model-len auto (or {problem.longest} at most)", _with_auto(case))]
    if ITEM_BYTES[case.dtype] > 2:
        yield [("--dtype bfloat16", replace(case, dtype="bfloat16"))]
    yield _other_caches(problem, case)
    if problem.longest is None and problem.least_blocks is None:
        yield _smaller_steps(case)
    yield _higher_utilizations(case)
    yield _freed_memory(case)


def _other_caches(problem: Problem, case: Case) -> list[Remedy]:
    """A cache of a size that would do."""
    num_blocks = problem.most_blocks if problem.least_blocks is None else problem.least_blocks
    if num_blocks is None or num_blocks < 1:
        return []
    if case.config.cache.num_gpu_blocks_override is not None:
        words = f"--num-gpu-blocks-override {num_blocks}"
        return [(words, case.with_settings("cache", num_gpu_blocks_override=num_blocks))]
    size = size_as_text(num_blocks * problem.per_block, round_up=problem.least_blocks is not None)
    other = case.with_settings("cache", kv_cache_memory_bytes=size_in_bytes(size))
    return [(f"--kv-cache-memory {size}", other)]


def _smaller_steps(case: Case) -> list[Remedy]:
    resolved = case.config.resolved
    num_seqs, step_tokens = min(resolved.max_num_seqs, _SMALL_SEQS), min(resolved.step_tokens, _SMALL_STEP)
    if (num_seqs, step_tokens) == (resolved.max_num_seqs, resolved.step_tokens):
        return []
    words = f"--max-num-seqs {num_seqs} --max-num-batched-tokens {step_tokens}"
    other = case.with_settings("scheduler", max_num_seqs=num_seqs, max_num_batched_tokens=step_tokens)
    return [(words, other)]


def _higher_utilizations(case: Case) -> list[Remedy]:
    cache = case.config.cache
    if case.config.resolved.device != "cuda" or cache.kv_cache_memory_bytes is not None:
        return []
    return [
        (f"--gpu-memory-utilization {share}", case.with_settings("cache", gpu_memory_utilization=share))
        for share in _UTILIZATIONS
        if share > cache.gpu_memory_utilization
    ]


def _freed_memory(case: Case) -> list[Remedy]:
    memory, freeable = case.memory, int(_FREEABLE * case.memory.total)
    if memory.free >= freeable:
        return []
    taken = size_as_text(memory.total - memory.free)
    other = replace(case, memory=DeviceMemory(total=memory.total, free=freeable))
    return [(f"freeing memory that others use ({taken} is taken)", other)]
