"""NullExecutor: no model, no torch. Pseudo-random tokens after a set time, so that what is measured is the host.

`--executor null`. Tokens depend on (seed, position) of their sequence alone, so that batching changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from oneloop.config import NULL_MODEL
from oneloop.errors import ConfigError
from oneloop.executor.base import Completion, ModelFiles, ModelInfo
from oneloop.executor.completion import CompletionQueue
from oneloop.formats.generation import GenerationDefaults
from oneloop.loader.progress import no_progress
from oneloop.loader.resolve import resolve_model
from oneloop.tokenize.bytes import VOCAB_SIZE
from oneloop.worker.inputs import LOGPROB_COLUMNS, SlabViews, aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from oneloop.config import EngineConfig
    from oneloop.executor.base import LoadProgress
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.start_times import StartTimes
    from oneloop.worker.inputs import Floats, Ints, StepHeader
    from oneloop_core import SlabLayout

Draw: TypeAlias = "Callable[[npt.NDArray[np.uint64], Ints], npt.NDArray[Any]]"
"""(seed, position among the outputs) of each sample → its token."""

POOL_TOKENS: Final = 1 << 20
"""What the KV cache holds if nothing else was asked for: as beside an 8B model on a card of 141 GB."""
BYTES_MAX_LEN: Final = 8192
"""Context length where tokens are bytes."""
_NUM_TRIES: Final = 8
"""Tokens drawn before those that a mask allows are counted."""
_COUNTED_AT_ONCE: Final = 16
"""Masks: what they are made into stays in the processor's cache."""
_PRINTABLE: Final = (0x20, 0x7F)
"""Bytes that are a character each: every token gives text at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a step, and how many more for each of its tokens and rows. They cost no CPU time."""

    step_s: float = 0.0
    token_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, header: StepHeader) -> float:
        """Of the step with this header."""
        return self.step_s + self.token_s * header.num_tokens + self.row_s * header.num_rows


def random_tokens(first: int, end: int) -> Draw:
    """Tokens in [first, end), by the upper half of SplitMix64's output at a place that seed and position give."""
    span = np.uint64(end - first)

    def draw(seeds: npt.NDArray[np.uint64], positions: Ints) -> npt.NDArray[Any]:
        return _scaled(_noise(seeds, positions), span) + np.uint64(first)

    return draw


def _noise(seeds: npt.NDArray[np.uint64], positions: Ints) -> npt.NDArray[np.uint64]:
    """32 random bits each."""
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    noise: npt.NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) >> np.uint64(32)
    return noise


def _scaled(noise: npt.NDArray[np.uint64], span: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[Any]:
    """Integers below span, of noise."""
    scaled: npt.NDArray[Any] = noise * span >> np.uint64(32)
    return scaled


def tokens_of_text(ids: Sequence[int]) -> Draw:
    """The tokens of a text, over and over; each seed begins at a place of its own."""
    text: npt.NDArray[Any] = np.array(ids, np.int32)
    length = np.uint64(len(text))

    def draw(seeds: npt.NDArray[np.uint64], positions: Ints) -> npt.NDArray[Any]:
        tokens: npt.NDArray[Any] = text[(seeds % length + positions.astype(np.uint64)) % length]
        return tokens

    return draw


class NullSampler:
    """What a device keeps for sampling: the seed of each slot. Steps come in the order of their schedule."""

    def __init__(self, max_num_seqs: int, draw: Draw) -> None:
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._draw = draw

    def sample(self, views: SlabViews) -> StepHeader:
        """Fill the output part of a step's slab, as its masks allow; returns its header."""
        header = views.header()
        if header.num_admitted:
            admitted = views.admitted_seed[: header.num_admitted]
            self._seeds[views.admitted_slot[: header.num_admitted]] = admitted.view(np.uint64)
        count = header.num_samples
        seeds = self._seeds[views.sample_slot[:count]]
        views.output_token[:count] = self._draw(seeds, views.sample_output_index[:count])
        if header.num_masked:
            self._obey(views, seeds)
        if header.max_logprobs >= 0:
            _fill_logprobs(views, count)
        if header.num_scores:
            _fill_scores(views, header.num_scores)
        if header.num_picks:
            views.pick_logprob[: header.num_picks] = pick_logprobs(views.pick_token[: header.num_picks])
        return header

    @staticmethod
    def _obey(views: SlabViews, seeds: npt.NDArray[np.uint64]) -> None:
        """Draw again, each allowed token as likely as any other, where a mask does not allow the one drawn."""
        rows, masks = views.sample_mask_row[: len(seeds)], views.mask_word
        samples = np.flatnonzero(rows >= 0)
        samples = samples[~_allows(masks, rows[samples], views.output_token[samples])]
        if not len(samples):
            return
        # Other places in the stream than the token's own, which says that the mask does not allow it.
        keys = ~seeds[samples, None] + np.arange(_NUM_TRIES, dtype=np.uint64)
        noise = _noise(keys, views.sample_output_index[samples, None])
        tried = _scaled(noise, np.uint64(32 * masks.shape[1])).astype(np.int32)
        allowed = _allows(masks, rows[samples, None], tried)
        views.output_token[samples] = tried[np.arange(len(samples)), allowed.argmax(1)]
        (rare,) = np.nonzero(~allowed.any(1))
        for start in range(0, len(rare), _COUNTED_AT_ONCE):
            part = rare[start : start + _COUNTED_AT_ONCE]
            views.output_token[samples[part]] = _choose(masks[rows[samples[part]]], noise[part, 0])


def _allows(masks: npt.NDArray[np.uint32], rows: Ints, tokens: Ints) -> npt.NDArray[np.bool_]:
    """Whether the masks of these rows have the tokens' bits."""
    words = masks[rows, tokens // 32] >> (tokens % 32).astype(np.uint32)
    allowed: npt.NDArray[np.bool_] = words & 1 != 0
    return allowed


def _choose(masks: npt.NDArray[np.uint32], noise: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """A token of each mask, by counting."""
    (used,) = np.nonzero(masks.any(0))  # often few
    masks = masks[:, used]
    up_to = np.cumsum(np.bitwise_count(masks), axis=1, dtype=np.int32)
    nth = _scaled(noise, up_to[:, -1].astype(np.uint64)).astype(np.int32)
    word = (up_to <= nth[:, None]).argmin(1)  # the first beyond
    lines = np.arange(len(masks))
    before = np.where(word > 0, up_to[lines, word - 1], 0)
    bits = np.unpackbits(masks[lines, word].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    bit = (np.cumsum(bits, axis=1) <= (nth - before)[:, None]).sum(1)
    tokens: npt.NDArray[Any] = used[word] * 32 + bit
    return tokens


def _fill_logprobs(views: SlabViews, count: int) -> None:
    """The sampled token is the likeliest; its neighbours follow, each half a nat less likely."""
    ranks = np.maximum(np.arange(LOGPROB_COLUMNS) - 1, 0)
    tokens = views.output_token[:count, None]
    views.output_rank[:count] = 1
    views.output_logprob_token[:count] = np.where(tokens >= LOGPROB_COLUMNS, tokens - ranks, tokens + ranks)
    views.output_logprob[:count] = -0.5 * (ranks + 1)


def pick_logprobs(tokens: Ints) -> Floats:
    """What is told of tokens that a request names: another number for each of 64."""
    return (-0.25 * (1 + tokens % 64)).astype(np.float32)


def _fill_scores(views: SlabViews, count: int) -> None:
    """As for samples: a prompt's token is the likeliest."""
    ranks = np.maximum(np.arange(LOGPROB_COLUMNS) - 1, 0)
    tokens = views.score_token[:count, None]
    views.score_rank[:count] = 1
    views.score_logprob_token[:count] = np.where(tokens >= LOGPROB_COLUMNS, tokens - ranks, tokens + ranks)
    views.score_logprob[:count] = -0.5 * (ranks + 1)


class NullExecutor:
    """Implements `base.Executor`. Steps are told one per turn of the loop, in order, as a device's steps come in."""

    def __init__(
        self,
        config: EngineConfig,
        start_times: StartTimes | None = None,
        *,
        info: ModelInfo | None = None,
        draw: Draw | None = None,
        pace: Pace | None = None,
    ) -> None:
        """start_times: nothing of this start is worth counting. info: what start() says, None: what the model's header
        and the settings come to. draw: None: random tokens. pace: None: steps of null_step_ms.
        """
        self._config = config
        self._info = info
        self._draw = draw
        self._pace = pace or Pace(step_s=config.worker.null_step_ms / 1e3)
        self._spec: ModelSpec | None = None
        self._views: list[SlabViews] = []
        self._sampler: NullSampler | None = None
        self._completions = CompletionQueue(one_at_a_time=True)
        self._last_end = 0.0

    def locate(self, progress: LoadProgress | None = None) -> ModelFiles:
        """As base.Executor. Of a model only the header is read, for its tokenizer and sizes."""
        model = self._config.model
        if model.model == NULL_MODEL:
            return ModelFiles(None, GenerationDefaults())
        source = resolve_model(
            model.model, revision=model.revision, load_format="dummy", progress=progress or no_progress
        )
        self._spec = source.spec
        return ModelFiles(source.path, source.generation, source.gguf)

    def start(self, progress: LoadProgress | None = None) -> ModelInfo:
        """As base.Executor. ConfigError when the context is longer than the pool."""
        info = self._info or self._sizes()
        if self._draw is None:
            self._draw = random_tokens(*(_PRINTABLE if self._spec is None else (0, info.vocab_size)))
        self._info = info
        return info

    def _sizes(self) -> ModelInfo:
        block_size = self._config.resolved.block_size
        num_blocks = self._config.cache.num_gpu_blocks_override or max(POOL_TOKENS // block_size, 1)
        longest = num_blocks * block_size
        asked = self._config.model.max_model_len
        if isinstance(asked, int) and asked > longest:
            raise ConfigError(
                "max_model_len",
                f"{asked} tokens do not fit the KV cache of {longest}; raise num_gpu_blocks_override",
            )
        own = BYTES_MAX_LEN if self._spec is None else self._spec.max_position
        return ModelInfo(
            vocab_size=VOCAB_SIZE if self._spec is None else self._spec.vocab_size,
            max_model_len=asked if isinstance(asked, int) else min(own, longest),
            num_blocks=num_blocks,
            block_size=block_size,
        )

    def attach(self, layout: SlabLayout, num_slabs: int, *, max_num_seqs: int) -> Sequence[memoryview]:
        """As base.Executor."""
        assert self._draw is not None, "start() comes first"
        buffers = [aligned_buffer(layout.num_bytes) for _ in range(num_slabs)]
        self._views = [SlabViews.over(buffer, layout) for buffer in buffers]
        self._sampler = NullSampler(max_num_seqs, self._draw)
        return buffers

    def submit(self, slab_index: int) -> None:
        """Sample, and complete when the step's time is over, which begins when the one before has ended."""
        header = self._views[slab_index].header()
        takes_s = self._pace.seconds(header)
        if takes_s:
            self._last_end = max(self._last_end, asyncio.get_running_loop().time()) + takes_s
        if not header.num_masked:
            self.sample(slab_index)

    def sample(self, slab_index: int) -> None:
        """As base.Executor. A step whose masks come late ends then, and the next begins then."""
        assert self._sampler is not None, "attach() comes first"
        self._sampler.sample(self._views[slab_index])
        completion = Completion(slab_index, None)
        if not self._last_end:
            self._completions.put(completion)
            return
        loop = asyncio.get_running_loop()
        self._last_end = max(self._last_end, loop.time())
        loop.call_at(self._last_end, self._completions.put, completion)

    def prepare_in_idle(self) -> bool:
        """As base.Executor: there is nothing to prepare."""
        return False

    def completion_fd(self) -> int:
        """As base.Executor."""
        return self._completions.fileno()

    def completions(self) -> list[Completion]:
        """The oldest step that was not told."""
        return self._completions.take()

    def expert_counts(self) -> dict[int, list[int]] | None:
        """As base.Executor: there are none."""
        return None

    def shutdown(self) -> None:
        """As base.Executor. A step whose time is not over is never told."""
        self._completions.close()
        self._views = []
