"""LLM: the engine for scripts and notebooks. Names as vLLM's users know them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tqdm import tqdm

from oneloop.engine.async_engine import AsyncEngine
from oneloop.engine.beam_search import beam_search_output
from oneloop.engine.embedding import embedding_output
from oneloop.engine.engine_thread import EngineThread
from oneloop.engine.params import SamplingParams
from oneloop.engine.pooling import pooling_params
from oneloop.engine.progress import LoadBars
from oneloop.errors import RequestError
from oneloop.tokenize.conversation import ChatForm
from oneloop.tokenize.messages import read_conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Self

    from oneloop.config import EngineConfig
    from oneloop.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from oneloop.engine.embedding import EmbeddingRequestOutput
    from oneloop.engine.intake import Prompt
    from oneloop.engine.outputs import RequestOutput
    from oneloop.engine.params import ResolvedParams
    from oneloop.engine.pooling import Pooling
    from oneloop.engine.stream import RequestStream
    from oneloop.executor.base import ModelInfo
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Stats

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: Prompt
    params: SamplingParams | None
    add_special_tokens: bool = True

    @property
    def num_sequences(self) -> int:
        """What it takes of the room; 1 where n is not even a number, which submit() refuses."""
        n = 1 if self.params is None else self.params.n
        return n if isinstance(n, int) else 1


class _Room:
    """Bounds the sequences under way, over all calls. One that is larger than the room gets in alone."""

    def __init__(self, num_sequences: int) -> None:
        self._limit = num_sequences
        self.num_inside = 0
        self._left = asyncio.Event()

    async def enter(self, num_sequences: int) -> None:
        """Wait until there is room, and take it."""
        while self.num_inside and self.num_inside + num_sequences > self._limit:
            self._left.clear()
            await self._left.wait()
        self.num_inside += num_sequences

    def leave(self, num_sequences: int) -> None:
        """Give it back."""
        self.num_inside -= num_sequences
        self._left.set()


class LLM:
    """A model in this process. Blocking; usable from several threads, and inside a running event loop.

    Also a context manager. Without `with`, `close()` or the end of the process frees it.
    """

    def __init__(self, model: str | None = None, *, use_tqdm: bool = True, **settings: Any) -> None:
        """Load a model.

        model: folder, GGUF file, hub id, or "smollm2" (embedded; the default). use_tqdm: show bars while loading, and
        in the methods that are not told otherwise. settings: any field of `oneloop.config`'s ModelConfig, CacheConfig,
        SchedulerConfig and WorkerConfig; sizes also as text ("2G"). Raises ConfigError or ModelError.
        """
        self._open(AsyncEngine.from_settings(model, **settings), use_tqdm)

    @classmethod
    def over(cls, engine: AsyncEngine, *, use_tqdm: bool = False) -> Self:
        """An LLM over an engine that was made by hand and not started (another executor, say). It is closed with it."""
        llm = cls.__new__(cls)
        llm._open(engine, use_tqdm)
        return llm

    def _open(self, engine: AsyncEngine, use_tqdm: bool) -> None:
        self._use_tqdm = use_tqdm
        with LoadBars() if use_tqdm else nullcontext() as bars:
            self._thread = EngineThread(engine, bars)
        config = engine.config
        # More than runs at once, so that the next step always finds something to admit; no more than the queue takes.
        self._room = _Room(min(2 * config.resolved.max_num_seqs, config.scheduler.max_num_queued_reqs))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in their order.

        prompts: one or several of: text, list of token ids, {"prompt": …}, {"prompt_token_ids": …}. sampling_params:
        one for all, or one each; None: get_default_sampling_params(), 16 new tokens for most models. use_tqdm: None
        means as the LLM was made. Raises RequestError when one is invalid (the others are then aborted).
        """
        several = _as_prompts(prompts)
        return self._run(
            [_Job(p, s) for p, s in zip(several, _spread(sampling_params, len(several)), strict=True)],
            use_tqdm,
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in their order: the hidden state behind the final norm of its last token, or the
        mean of all tokens'. prompts: as for generate().

        normalize: divide by its Euclidean length. Raises RequestError when a prompt is invalid (none is answered then).
        """
        params = pooling_params(pooling)

        one = partial(self._embed_one, params=params, normalize=normalize)
        return self._thread.run(_all_of(one, _as_prompts(prompts)))

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The params.beam_width most likely texts behind each prompt that beam search finds, best first.

        prompts: as for generate(). Raises RequestError when one is invalid, or needs more KV cache than there is.
        """
        sampling = params.as_sampling()

        async def one(prompt: Prompt) -> BeamSearchOutput:
            await self._room.enter(params.beam_width)
            try:
                stream = await self._thread.engine.submit(prompt, sampling, final_only=True)
                async with stream:
                    return await beam_search_output(stream, self._thread.engine.tokenizer)
            finally:
                self._room.leave(params.beam_width)

        return self._thread.run(_all_of(one, _as_prompts(prompts)))

    async def _embed_one(
        self, prompt: Prompt, *, params: ResolvedParams, normalize: bool
    ) -> EmbeddingRequestOutput:
        await self._room.enter(1)
        try:
            stream = await self._thread.engine.submit(prompt, params, final_only=True)
            async with stream:
                return await embedding_output(stream, normalize=normalize)
        finally:
            self._room.leave(1)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; a message is {"role": …, "content": …}. Else as generate()."""
        conversations = cast(
            "Sequence[Messages]", [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        params = _spread(sampling_params, len(conversations))

        form = ChatForm(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_arguments=chat_template_kwargs or {},
        )

        async def render() -> list[str]:
            return [
                await self._thread.engine.render_chat(read_conversation(conversation, tools), form)
                for conversation in conversations
            ]

        texts = self._thread.run(render())
        # The template writes the special tokens itself.
        return self._run([_Job(t, s, False) for t, s in zip(texts, params, strict=True)], use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._thread.engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        """The settings it was made with; `config.resolved` holds those that depend on the device."""
        return self._thread.engine.config

    @property
    def model_info(self) -> ModelInfo:
        """Sizes of the loaded model."""
        return self._thread.engine.model_info

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's generation_config over the usual defaults."""
        given = self._thread.engine.default_sampling.without_params()
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            repetition_penalty=given.repetition_penalty,
            max_tokens=given.max_tokens,
        )

    def stats(self) -> Stats:
        """The core's gauges and counters: blocks, queue, preemptions, prefix hits."""

        async def read() -> Stats:
            return self._thread.engine.stats()

        return self._thread.run(read())

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing is forgotten, while requests hold blocks."""

        async def reset() -> bool:
            return self._thread.engine.reset_prefix_cache()

        return self._thread.run(reset())

    def close(self) -> None:
        """Abort what runs and free the model. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, jobs: list[_Job], use_tqdm: bool | None) -> list[RequestOutput]:
        """The jobs' results in order; the calling thread only collects and draws the bar."""
        if use_tqdm is None:
            use_tqdm = self._use_tqdm
        done: SimpleQueue[tuple[int, RequestOutput] | None] = SimpleQueue()
        work = self._thread.spawn(self._run_jobs(jobs, done))
        work.add_done_callback(lambda _: done.put(None))
        results: list[RequestOutput | None] = [None] * len(jobs)
        num_tokens = 0
        try:
            with tqdm(total=len(jobs), desc="prompts", unit="prompt", disable=not use_tqdm) as bar:
                while (item := done.get()) is not None:
                    results[item[0]] = item[1]
                    num_tokens += sum(len(output.token_ids) for output in item[1].outputs)
                    seconds = bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{num_tokens / seconds if seconds else 0:.0f} tok/s", refresh=False)
                    bar.update()
            work.result()
        except BaseException:
            work.cancel()
            raise
        return cast("list[RequestOutput]", results)

    async def _run_jobs(self, jobs: list[_Job], done: SimpleQueue[tuple[int, RequestOutput] | None]) -> None:
        """Submit in order, as far as there is room; the first failure aborts the rest."""
        engine = self._thread.engine
        step_tokens = engine.config.resolved.step_tokens
        num_new_tokens = 0

        async def finish(index: int, stream: RequestStream) -> None:
            async with stream:
                output = engine.output_builder(stream)
                async for deltas in stream:
                    output.add(deltas)
                output.add_told_once(stream)
                done.put((index, output.snapshot(stream.num_cached_tokens)))

        try:
            async with asyncio.TaskGroup() as group:
                for index, job in enumerate(jobs):
                    num_sequences = job.num_sequences
                    await self._room.enter(num_sequences)
                    try:
                        stream = await engine.submit(
                            job.prompt,
                            job.params,
                            add_special_tokens=job.add_special_tokens,
                            final_only=True,
                        )
                    except BaseException:
                        self._room.leave(num_sequences)
                        raise
                    task = group.create_task(finish(index, stream))
                    # Not in finish(): a task that is cancelled before its first step runs none of its code.
                    task.add_done_callback(partial(self._settle, stream, num_sequences))
                    num_new_tokens += len(stream.prompt_token_ids)
                    if (
                        num_new_tokens >= step_tokens
                    ):  # enough for a full step: it starts while the rest is submitted
                        num_new_tokens = 0
                        await asyncio.sleep(0)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    def _settle(self, stream: RequestStream, num_sequences: int, _: asyncio.Task[None]) -> None:
        stream.abort()
        self._room.leave(num_sequences)


async def _all_of(one: Callable[[Prompt], Coroutine[Any, Any, T]], prompts: Sequence[Prompt]) -> list[T]:
    """`one` of each prompt, in their order. The first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, dictionary or a list of ids) or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [cast("Prompt", prompts)]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts", f"prompts must be a prompt or a list of them, got a {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], int):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """One SamplingParams for each of `count` prompts; None where none are given."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"{len(params)} sampling_params for {count} prompts")
    return params
