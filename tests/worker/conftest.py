"""A tiny model in a runner, and slabs written by hand: the worker alone, without scheduler."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from oneloop.config import EngineConfig
from oneloop.formats.model_spec import ModelSpec
from oneloop.models.base import Model
from oneloop.models.registry import build_model
from oneloop.worker.inputs import SlabViews, StepFlag
from oneloop.worker.memory.ledger import DeviceMemory
from oneloop.worker.memory.plan import plan_memory
from oneloop.worker.runner import ModelRunner
from oneloop_core import Core, CoreConfig

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 96
MAX_NUM_SEQS = 8
MAX_TOKENS = 64
VOCAB_SIZE = 97

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
    max_position=128,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    dtype="float32",
)


def random_model(dtype: torch.dtype) -> Model:
    """Seeded weights large enough that logits spread; the same for every dtype, but for rounding."""
    model = build_model(SPEC, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    for name, target in model.weight_targets().items():
        weights = torch.empty(target.shape)
        if "norm" in name:
            weights.uniform_(0.5, 1.5, generator=generator)
        else:
            weights.normal_(0.0, 0.3, generator=generator)
        target.copy_(weights)
    return model


def slab_buffer(num_bytes: int) -> memoryview:
    """Writable, aligned to 64 bytes, filled with garbage."""
    raw = bytearray(b"\x7f") * (num_bytes + 64)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(raw)) % 64
    return memoryview(raw)[start : start + num_bytes]


def make_core(**changes: Any) -> Core:
    """A core that fits the runner."""
    options: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_model_len": SPEC.max_position,
        "vocab_size": VOCAB_SIZE,
    }
    return Core(CoreConfig(**(options | changes)))


@dataclass
class Sampling:
    """An admitted slot's columns; the defaults are neutral."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    num_logprobs: int = -1
    min_tokens: int = 0
    num_prompt_tokens: int = 0
    seed: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    history: tuple[int, ...] = ()


@dataclass
class Step:
    """What a step holds, in Python's terms; `write` lays it out as the core would."""

    admitted: dict[int, Sampling] = field(default_factory=dict)
    forks: list[tuple[int, int, int]] = field(default_factory=list)
    """(source slot, target slot, blocks)."""
    deltas: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, index, block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, computed tokens, token ids); rows of one token first."""
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, token index in the step, output index)."""
    flags: int | None = None
    """None: every flag but RANDOM where no admitted slot is random."""


class Slab:
    """One slab with a writer for steps."""

    def __init__(self, **sizes: Any) -> None:
        layout = make_core(**sizes).layout
        self.buffer = slab_buffer(layout.num_bytes)
        self.views = SlabViews.over(self.buffer, layout)
        self._header = np.frombuffer(
            self.buffer, np.int64, 32, next(f.offset for f in layout.fields if f.name == "header")
        )
        self._names = layout.header

    def write(self, step: Step) -> SlabViews:
        """Lay the step out; counts and flags go into the header."""
        views = self.views
        singles = [len(tokens) == 1 for _, _, tokens in step.rows]
        assert singles == sorted(singles, reverse=True), "rows of one token come first"
        self._put(("row_slot", "row_num_computed"), [row[:2] for row in step.rows])
        lengths = [len(row[2]) for row in step.rows]
        self._put(("row_num_scheduled",), [(length,) for length in lengths])
        views.query_start[: len(lengths) + 1] = np.cumsum([0, *lengths])
        token_ids = [token for _, _, tokens in step.rows for token in tokens]
        views.token_ids[: len(token_ids)] = token_ids
        self._put(("sample_slot", "sample_token_index", "sample_output_index"), step.samples)
        self._put(("fork_src", "fork_dst", "fork_num_blocks"), step.forks)
        self._put(("delta_slot", "delta_index", "delta_block"), step.deltas)
        self._put(("cow_src", "cow_dst"), step.copies)
        counts = self._write_admitted(step.admitted)
        asked = [sampling.num_logprobs for sampling in step.admitted.values()]
        counts |= {
            "num_rows": len(step.rows),
            "num_tokens": len(token_ids),
            "num_samples": len(step.samples),
            "num_block_deltas": len(step.deltas),
            "num_cow": len(step.copies),
            "num_forks": len(step.forks),
            "num_single": sum(singles),
            "max_query_len": max(lengths, default=0),
            "max_seq_len": max((computed + len(tokens) for _, computed, tokens in step.rows), default=0),
            "max_logprobs": max(asked, default=-1),
            "flags": int(~StepFlag(0)) if step.flags is None else step.flags,
        }
        self._header[:] = 0
        for name, value in counts.items():
            self._header[self._names[name]] = value
        return views

    def set_header(self, name: str, value: int) -> None:
        """Overwrite one entry."""
        self._header[self._names[name]] = value

    def _put(self, names: tuple[str, ...], entries: list[tuple[int, ...]]) -> None:
        for column, name in enumerate(names):
            getattr(self.views, name)[: len(entries)] = [entry[column] for entry in entries]

    def _write_admitted(self, admitted: dict[int, Sampling]) -> dict[str, int]:
        views, count = self.views, len(admitted)
        views.admitted_slot[:count] = list(admitted)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "top_k",
            "num_logprobs",
            "min_tokens",
            "num_prompt_tokens",
            "seed",
        ):
            column = getattr(views, f"admitted_{name}")
            column[:count] = [getattr(sampling, name) for sampling in admitted.values()]
        bias = [tuple(sampling.bias) for sampling in admitted.values()]
        lists = {
            "bias": bias,
            "banned": [sampling.banned for sampling in admitted.values()],
            "history": [sampling.history for sampling in admitted.values()],
        }
        for name, per_slot in lists.items():
            starts = np.cumsum([0, *map(len, per_slot)])
            getattr(views, f"admitted_{name}_start")[: count + 1] = starts
            getattr(views, f"{name}_token")[: starts[-1]] = [token for tokens in per_slot for token in tokens]
        values = [value for sampling in admitted.values() for value in sampling.bias.values()]
        views.bias_value[: len(values)] = values
        return {"num_admitted": count} | {
            f"num_{name}": sum(map(len, per_slot)) for name, per_slot in lists.items()
        }


@dataclass
class Worker:
    """A runner and one slab."""

    model: Model
    runner: ModelRunner
    slab: Slab
    settings: dict[str, Any]
    """See make_worker."""

    def run(self, step: Step) -> list[int]:
        """Execute the step; the sampled tokens."""
        views = self.slab.write(step)
        self.runner.execute(views)
        return views.output_token[: len(step.samples)].tolist()

    def prompt_step(self, slot: int, tokens: list[int], blocks: list[int], **sampling: Any) -> Step:
        """Admit a slot, compute its whole prompt and sample."""
        return Step(
            admitted={slot: Sampling(**sampling)},
            deltas=[(slot, index, block) for index, block in enumerate(blocks)],
            rows=[(slot, 0, tokens)],
            samples=[(slot, len(tokens) - 1, 0)],
        )

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """Greedy tokens by a fresh runner that computes the whole text anew for each."""
        text = list(tokens)
        for _ in range(count):
            fresh = make_worker(**self.settings)
            text += fresh.run(fresh.prompt_step(0, text, list(range(-(-len(text) // BLOCK_SIZE)))))
        return text[len(tokens) :]


def make_worker(dtype: torch.dtype = torch.float32, **settings: Any) -> Worker:
    """A runner over the tiny model; its cache is NaN until written."""
    flat = {
        "num_gpu_blocks_override": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
    }
    config = EngineConfig.from_flat(flat | settings)
    model = random_model(dtype)
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    plan = plan_memory(model.spec, name, config, DeviceMemory(total=1 << 30, free=1 << 30))
    runner = ModelRunner(model, plan, max_num_seqs=MAX_NUM_SEQS)
    runner.kv.storage.fill_(float("nan"))
    return Worker(model, runner, Slab(), settings)


@pytest.fixture
def worker() -> Worker:
    """See make_worker."""
    return make_worker()


@pytest.fixture
def worker_factory() -> Callable[..., Worker]:
    """See make_worker."""
    return make_worker


@pytest.fixture
def make_step() -> type[Step]:
    """The Step class."""
    return Step


@pytest.fixture
def make_sampling() -> type[Sampling]:
    """The Sampling class."""
    return Sampling


@pytest.fixture
def make_slab() -> Callable[..., Slab]:
    """See Slab; sizes as make_core takes them."""
    return Slab


@pytest.fixture
def core_factory() -> Callable[..., Core]:
    """See make_core."""
    return make_core


@pytest.fixture
def buffer_factory() -> Callable[[int], memoryview]:
    """See slab_buffer."""
    return slab_buffer


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., ModelSpec]:
    """Factory: changes → the tiny spec with them."""
    return lambda **changes: replace(SPEC, **changes)


@pytest.fixture(scope="module")
def sides() -> Iterator[ModuleType]:
    """test_gpu_runner.py, for files beside it that drive its sides (the tests' folders are no packages)."""
    path = Path(__file__).with_name("test_gpu_runner.py")
    spec = importlib.util.spec_from_file_location("gpu_runner_sides", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
