"""Engines over the null executor (`running_null_engine`) and over a fake one (`running_engine`), and their books.

The fake executor has a real slab, a real KV in blocks and a toy model whose next token depends on every token before
it, read back through the block table: a wrong block, a wrong position, a lost copy or a wrong placeholder changes the
text. The null executor's tokens depend on seed and position alone and would not show it. So the fake one runs tests of
what is generated; and those of steps that are held back, fail, take long or are looked at, which the null executor has
none of. Everything else goes over the null executor.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import zlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.executor.base import Completion, ModelFiles, ModelInfo
from oneloop.executor.completion import CompletionQueue
from oneloop.formats.generation import GenerationDefaults
from oneloop_core import Vocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from oneloop_core import SlabLayout

EOS = 256
BOS = 257
VOCAB_SIZE = 260
BLOCK_SIZE = 4
_DTYPES = {"i32": np.int32, "i64": np.int64, "f32": np.float32}


def next_letter(tokens: Sequence[int], seed: int, output_index: int) -> int:
    """The toy model: a letter that depends on all tokens (and, where it samples, on the row's seed)."""
    data = np.asarray(tokens, dtype=np.int32).tobytes() + b"%d,%d" % (seed, output_index if seed else 0)
    return 97 + zlib.crc32(data) % 26


def greedy_text(prompt: str, num_tokens: int) -> str:
    """What the toy model continues a prompt with."""
    tokens = list(prompt.encode())
    for index in range(num_tokens):
        tokens.append(next_letter(tokens, 0, index))
    return bytes(tokens[len(prompt.encode()) :]).decode()


class ByteTokenizer:
    """Tokens are bytes. A double of oneloop.tokenize.Tokenizer."""

    bos_token_id: int | None = None
    eos_token_ids = (EOS,)

    def __init__(self) -> None:
        pieces = [bytes([value]) for value in range(256)] + [b"<eos>", b"<bos>", b"", b""]
        self.vocabulary = Vocabulary(pieces, [EOS, BOS])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def token_id(self, token: str) -> int | None:
        return None

    @property
    def chat_template(self) -> ByteTokenizer:
        return self

    def render(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


@dataclass
class StepRecord:
    """What one step held."""

    num_tokens: int
    slots: list[int]
    started: float
    ended: float = 0.0


@dataclass
class FakeExecutor:
    """Runs steps in one thread, in order."""

    num_blocks: int = 256
    max_model_len: int = 512
    quick_step_tokens: int | None = None
    delay_s: float = 0.0
    choose: Callable[[Sequence[int], int, int], int] = next_letter
    fail_on: Callable[[int], bool] = lambda _step: False
    """Step number (0, 1, …) → whether it fails."""
    fail_start: Exception | None = None
    to_prepare: int = 0
    """Pieces of idle work that are left."""
    prepare_s: float = 0.001
    """How long each takes."""
    prepared: list[float] = field(default_factory=list)
    """When each was begun, by time.monotonic()."""
    steps: list[StepRecord] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What was wrong with the slabs; `running_engine` asserts that there was nothing."""
    max_waiting: int = 0
    """Most steps that were submitted and not completed at once."""

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._work: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._completions = CompletionQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._waiting = 0
        self._lock = threading.Lock()
        self.is_shut_down = False

    def locate(self, progress: Any = None) -> ModelFiles:
        return ModelFiles(Path("fake"), GenerationDefaults())

    def start(self, progress: Any = None) -> ModelInfo:
        if self.fail_start is not None:
            raise self.fail_start
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            quick_step_tokens=self.quick_step_tokens,
        )

    def attach(self, layout: SlabLayout, num_slabs: int, *, max_num_seqs: int) -> Sequence[memoryview]:
        self._views, slabs = [], []
        for _ in range(num_slabs):
            room = np.zeros(layout.num_bytes + 64, dtype=np.uint8)
            start = -room.ctypes.data % 64
            slab = room[start : start + layout.num_bytes]
            slabs.append(memoryview(slab))
            self._views.append({f.name: _view(slab, f.dtype, f.offset, f.length) for f in layout.fields})
        self._header = layout.header
        self._kv = np.full((self.num_blocks, BLOCK_SIZE), -7, dtype=np.int32)
        self._tables = np.full((max_num_seqs, self.num_blocks), -1, dtype=np.int64)
        self._last = np.full(max_num_seqs, -7, dtype=np.int32)
        self._rows: dict[int, dict[str, Any]] = {}
        self._thread.start()
        return slabs

    def submit(self, slab_index: int) -> None:
        with self._lock:
            self._waiting += 1
            self.max_waiting = max(self.max_waiting, self._waiting)
        self._work.put(slab_index)

    def sample(self, slab_index: int) -> None:
        self.faults.append(f"slab {slab_index}: the toy model knows no masks")

    def prepare_in_idle(self) -> bool:
        if self._waiting:
            self.faults.append("asked to prepare while a step was in flight")
        if not self.to_prepare:
            return False
        self.prepared.append(time.monotonic())
        self.to_prepare -= 1
        ends = time.perf_counter() + self.prepare_s
        while time.perf_counter() < ends:
            """As a capture does, it keeps the processor busy."""
        return True

    def completion_fd(self) -> int:
        return self._completions.fileno()

    def completions(self) -> list[Completion]:
        return self._completions.take()

    def shutdown(self) -> None:
        if self.is_shut_down:
            return
        self.is_shut_down = True
        self.gate.set()
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join(5)
        self._completions.close()

    def _run(self) -> None:
        while (slab_index := self._work.get()) is not None:
            view = self._views[slab_index]
            count = {name: int(view["header"][place]) for name, place in self._header.items()}
            slots = view["row_slot"][: count["num_rows"]].tolist()
            record = StepRecord(count["num_tokens"], slots, time.monotonic())
            self.steps.append(record)
            number = len(self.steps) - 1
            self.gate.wait()
            time.sleep(self.delay_s)
            error = None
            try:
                self._apply(view, count)
                if self.fail_on(number):
                    error = "the step failed"
                else:
                    self._compute(view, count)
            except Exception as fault:
                error = f"step {number}: {fault!r}"
                self.faults.append(error)
            record.ended = time.monotonic()
            with self._lock:
                self._waiting -= 1
            self._completions.put(Completion(slab_index, error))

    def _apply(self, v: dict[str, np.ndarray], count: dict[str, int]) -> None:
        """The step's changes to the tables. As in the real runner they are made whatever becomes of the rest."""
        for i in range(count["num_admitted"]):
            slot = int(v["admitted_slot"][i])
            greedy = v["admitted_temperature"][i] == 0
            self._tables[slot] = -1
            self._rows[slot] = {
                "seed": 0 if greedy else int(v["admitted_seed"][i]) | 1,
                "num_logprobs": int(v["admitted_num_logprobs"][i]),
            }
        for i in range(count["num_block_deltas"]):
            self._tables[v["delta_slot"][i], v["delta_index"][i]] = v["delta_block"][i]
        for i in range(count["num_forks"]):
            src, dst, blocks = (int(v[name][i]) for name in ("fork_src", "fork_dst", "fork_num_blocks"))
            self._tables[dst, :blocks] = self._tables[src, :blocks]

    def _compute(self, v: dict[str, np.ndarray], count: dict[str, int]) -> None:
        """Copies, KV, samples, in the order docs/architecture.md gives."""
        for i in range(count["num_cow"]):
            self._kv[v["cow_dst"][i]] = self._kv[v["cow_src"][i]]
        token_slot, token_position = self._write_kv(v, count)
        for i in range(count["num_samples"]):
            self._sample(v, i, token_slot, token_position)

    def _write_kv(self, v: dict[str, np.ndarray], count: dict[str, int]) -> tuple[list[int], list[int]]:
        slots: list[int] = []
        positions: list[int] = []
        for row in range(count["num_rows"]):
            slot, first = int(v["row_slot"][row]), int(v["row_num_computed"][row])
            start, end = int(v["query_start"][row]), int(v["query_start"][row + 1])
            assert end - start == v["row_num_scheduled"][row]
            for place in range(start, end):
                token = int(v["token_ids"][place])
                position = first + place - start
                block = int(self._tables[slot, position // BLOCK_SIZE])
                assert block >= 0, "a scheduled position has no block"
                self._kv[block, position % BLOCK_SIZE] = self._last[slot] if token < 0 else token
                slots.append(slot)
                positions.append(position)
        return slots, positions

    def _sample(
        self, v: dict[str, np.ndarray], i: int, token_slot: list[int], token_position: list[int]
    ) -> None:
        slot = int(v["sample_slot"][i])
        place = int(v["sample_token_index"][i])
        length = token_position[place] + 1
        blocks = self._tables[token_slot[place], : -(-length // BLOCK_SIZE)]
        history = self._kv[blocks].reshape(-1)[:length].tolist()
        row = self._rows[slot]
        token = self.choose(history, row["seed"], int(v["sample_output_index"][i]))
        v["output_token"][i] = self._last[slot] = token
        if row["num_logprobs"] >= 0:
            v["output_rank"][i] = 1
            v["output_logprob_token"].reshape(-1, 21)[i] = [token, *range(token, token + 20)]
            v["output_logprob"].reshape(-1, 21)[i] = -0.5


def _view(slab: np.ndarray, dtype: str, offset: int, length: int) -> np.ndarray:
    kind = np.dtype(_DTYPES[dtype])
    return slab[offset : offset + length * kind.itemsize].view(kind)


@asynccontextmanager
async def running_engine(executor: FakeExecutor | None = None, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine over a fake executor; at the end it is shut down and its core's books are checked."""
    executor = executor or FakeExecutor()
    config = EngineConfig.from_flat(
        {"model": "fake", "max_num_seqs": 8, "max_num_batched_tokens": 64, **settings}
    )
    async with _running(AsyncEngine(config, executor=executor, tokenizer=ByteTokenizer())) as engine:
        yield engine
        assert executor.faults == []


@asynccontextmanager
async def running_null_engine(step_ms: float = 0.0, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """The same over the null executor, whose tokenizer is the product's for bytes. Sizes are those of FakeExecutor."""
    sizes = {"num_gpu_blocks_override": 256, "block_size": BLOCK_SIZE, "max_model_len": 512}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    given = {"executor": "null", "null_step_ms": step_ms, **sizes, **limits, **settings}
    async with _running(AsyncEngine(EngineConfig.from_flat(given))) as engine:
        yield engine


@asynccontextmanager
async def _running(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    await engine.start()
    try:
        yield engine
        if engine.health().state == "ready":
            await settled(engine)
            check_books(engine)
    finally:
        await engine.shutdown()


async def settled(engine: AsyncEngine) -> None:
    """Until no step is in flight and no stream is open."""
    async with asyncio.timeout(10):
        while engine.stats().num_steps_in_flight or engine.stats().num_running or engine.stats().num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def check_books(engine: AsyncEngine) -> None:
    """Nothing runs: every block is free or cached, every submitted sequence has ended, the core's own audit holds."""
    engine._loaded().core.audit()
    stats = engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks
    ended = stats.num_finished_stop + stats.num_finished_length + stats.num_aborted + stats.num_errored
    assert ended == stats.num_submitted


@dataclass(frozen=True)
class Kit:
    """The above, for tests (test modules cannot import each other)."""

    FakeExecutor = FakeExecutor
    ByteTokenizer = ByteTokenizer
    running_engine = staticmethod(running_engine)
    running_null_engine = staticmethod(running_null_engine)
    settled = staticmethod(settled)
    check_books = staticmethod(check_books)
    greedy_text = staticmethod(greedy_text)
    EOS = EOS
    BOS = BOS
    VOCAB_SIZE = VOCAB_SIZE


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
