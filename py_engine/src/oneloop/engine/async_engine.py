"""AsyncEngine: submit, stream, abort, drain. One model on one event loop; everything else hangs off it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from oneloop.config import EngineConfig
from oneloop.engine.assembly import Assembly, assemble
from oneloop.engine.constraints import NO_CONSTRAINTS
from oneloop.engine.debug_view import scheduler_view
from oneloop.engine.loop import StepLoop
from oneloop.engine.metrics import EngineMetrics
from oneloop.engine.outputs import OutputBuilder, RequestOutput
from oneloop.engine.params import SamplingParams, check_token_ids
from oneloop.engine.relay import Relay
from oneloop.engine.stream import RequestStream
from oneloop.engine.threads import in_daemon_thread
from oneloop.errors import (
    EngineClosedError,
    EngineDeadError,
    OneloopError,
    OverloadedError,
    RequestError,
    ShuttingDownError,
)
from oneloop.executor.select import create_executor
from oneloop.start_times import StartTimes
from oneloop.tokenize.conversation import ChatForm
from oneloop_core import RequestError as CoreRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from oneloop.engine.constraints import TokenConstraints
    from oneloop.engine.grammars import Grammars
    from oneloop.engine.intake import Accepted, Prompt
    from oneloop.engine.loop_times import LoopTimes
    from oneloop.engine.params import ResolvedParams, SamplingDefaults
    from oneloop.executor.base import Executor, LoadProgress, ModelInfo
    from oneloop.tokenize.conversation import Conversation
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Deltas, Stats, Vocabulary

log = logging.getLogger(__name__)

_CLIENTS_NAMES: Final = {"prompt_token_ids": "prompt", "beam_search": "use_beam_search"}
"""Of the core's arguments."""

State = Literal["loading", "ready", "draining", "dead", "stopped"]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are served now."""

    state: State
    reason: str | None = None
    """Why it is dead, in one line."""

    @property
    def ok(self) -> bool:
        """Ready, and steps complete within their limit."""
        return self.state == "ready"


class AsyncEngine:
    """Serves one model on the running event loop.

    All methods belong to the loop that ran `start()`. Also an async context manager: start … shutdown.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        start_times: StartTimes | None = None,
        loop_times: LoopTimes | None = None,
    ) -> None:
        """executor: where steps run; None means the device's own. tokenizer: None means the model's own.

        start_times: where the parts of the start are counted; None means from now on.
        loop_times: of the event loop that will run the engine; None where it does not count.
        """
        self.config = config
        self.start_times = start_times or StartTimes()
        self.metrics = EngineMetrics(loop_times)
        self.served_model_names: tuple[str, ...] = config.model.served_model_name or (config.model.model,)
        """At least one; the first is the one replies carry."""
        self._executor = create_executor(config, self.start_times) if executor is None else executor
        self._tokenizer = tokenizer
        self._state: State = "loading"
        self._reason: str | None = None
        self._assembly: Assembly | None = None
        self._step_loop: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._streams: dict[int, RequestStream] = {}
        self._relay = Relay(self.metrics, self._stalled)
        self._num_in_intake = 0
        self._without_streams = asyncio.Event()
        self._without_streams.set()
        self._dead = asyncio.Event()
        self._request_numbers = count(1)

    @classmethod
    def from_settings(cls, model: str | None = None, **settings: Any) -> Self:
        """An engine from flat settings (names as in `oneloop.config`, as the command line's), with its defaults."""
        return cls(EngineConfig.from_flat(settings if model is None else {"model": model, **settings}))

    # Life

    async def start(self, progress: LoadProgress | None = None) -> None:
        """Load model and tokenizer, then serve. Raises ModelError or ConfigError; the engine is then unusable."""
        self._assembly = await assemble(
            self.config, self._executor, self._tokenizer, progress, self.start_times
        )
        if self._state != "loading":
            await in_daemon_thread(self._executor.shutdown, "oneloop-shutdown")  # of what was made since then
            raise EngineClosedError("the engine was shut down while it was loading")
        self._step_loop = StepLoop(
            self._assembly.core,
            self._executor,
            self._assembly.slabs,
            deliver=self._deliver,
            is_expecting=lambda: self._num_in_intake > 0,
            metrics=self.metrics,
            step_timeout_s=self.config.scheduler.step_timeout_s,
        )
        self._task = asyncio.create_task(self._step_loop.run(), name="oneloop-step-loop")
        self._task.add_done_callback(self._loop_ended)
        self._state = "ready"

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, give running ones up to `drain_timeout` seconds, abort the rest, free everything.

        Idempotent; a second call during a drain ends the drain at once.
        """
        if self._state in ("loading", "ready"):
            self._state = "draining"
        if drain_timeout > 0 and self._state == "draining":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._without_streams.wait(), drain_timeout)
        for stream in list(self._streams.values()):
            stream.abort()
        if self._state != "dead":
            self._state = "stopped"
        if self._step_loop is not None and self._task is not None:
            self._step_loop.stop()
            await asyncio.wait([self._task])
        if self._assembly is not None:
            self._assembly.texts.close()
            if self._assembly.trace is not None:
                await in_daemon_thread(self._assembly.trace.close, "oneloop-trace-close")
        await in_daemon_thread(self._executor.shutdown, "oneloop-shutdown")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def health(self) -> Health:
        """Cheap and without side effects; false as soon as the loop died or a step is overdue."""
        return Health(self._state, self._reason)

    async def wait_dead(self) -> str:
        """Returns, with the reason, once the engine has died; a server then ends its process."""
        await self._dead.wait()
        return self._reason or "unknown"

    # What was loaded

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. EngineDeadError before start() is through."""
        return self._loaded().tokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        """Bytes and text of every token. EngineDeadError before start() is through."""
        return self._loaded().vocabulary

    @property
    def model_info(self) -> ModelInfo:
        """Sizes of the loaded model. EngineDeadError before start() is through."""
        return self._loaded().info

    @property
    def default_sampling(self) -> SamplingDefaults:
        """What requests get for fields they leave open. EngineDeadError before start() is through."""
        return self._loaded().defaults

    @property
    def grammars(self) -> Grammars:
        """The compiled grammars, and what became of those asked for. EngineDeadError before start() is through."""
        return self._loaded().intake.grammars

    def stats(self) -> Stats:
        """The core's gauges and counters. EngineDeadError before start() is through."""
        return self._loaded().core.stats()

    def scheduler_view(self) -> dict[str, Any]:
        """What runs, what waits and why, for a person to look at. EngineDeadError before start() is through."""
        return scheduler_view(self._loaded().core, self._streams)

    async def expert_counts(self) -> dict[int, list[int]] | None:
        """Layer with experts → the tokens that each was sent since the start; None where nothing is counted.

        EngineDeadError before start() is through.
        """
        self._loaded()
        return await in_daemon_thread(self._executor.expert_counts, "oneloop-experts")

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing is forgotten, while requests hold blocks.

        EngineDeadError before start() is through.
        """
        return self._loaded().core.reset_prefix_cache()

    # Requests

    @property
    def num_requests(self) -> int:
        """Those that are not answered yet: queued, running, or still being read."""
        return len(self._streams) + self._num_in_intake

    def check_accepting(self) -> None:
        """Raise what submit() would raise whatever the request: before anything is done for one that has no chance.

        OverloadedError (503, Retry-After) or EngineDeadError (503).
        """
        self._check_queue(self._accepting())

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | ResolvedParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        final_only: bool = False,
        constraints: TokenConstraints = NO_CONSTRAINTS,
    ) -> RequestStream:
        """Check, tokenise (in a thread) and queue one request.

        params: None means the model's defaults, at most 16 new tokens where its generation_config names no limit;
        resolved ones must have been resolved for this model.

        final_only: the stream gives one delta per sequence, at its end: for callers that show nothing before. It costs
        nothing per token, and the times of single tokens stay unknown.
        constraints: what else binds the tokens.
        Raises RequestError (400), OverloadedError (503, Retry-After) or EngineDeadError (503).
        """
        arrived = asyncio.get_running_loop().time()
        assembly = self._accepting()
        self._check_queue(assembly)
        self._num_in_intake += 1
        try:
            accepted = await assembly.intake.accept(
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                add_special_tokens=add_special_tokens,
                constraints=constraints,
            )
            began = perf_counter()
            stream = self._queue(assembly, accepted, request_id, arrived, final_only)
            self.metrics.loop.parts["queue"] += perf_counter() - began
            return stream
        except RequestError:
            self.metrics.rejected["invalid"] += 1
            raise
        finally:
            self._num_in_intake -= 1

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """An async iterator over everything generated so far; the last one has finished=True.

        Leaving the iteration, or cancelling the task, aborts the request. Raises as submit(), and GenerationError
        when the request failed under way.
        """
        stream = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        async with stream:
            output = self.output_builder(stream)
            async for deltas in stream:
                output.add(deltas)
                output.add_told_once(stream)
                yield output.snapshot(stream.num_cached_tokens)

    def output_builder(self, stream: RequestStream) -> OutputBuilder:
        """Adds the stream's deltas up to RequestOutputs."""
        return OutputBuilder(
            stream.request_id,
            stream.prompt,
            stream.prompt_token_ids,
            stream.num_sequences,
            self._loaded().token_text,
            is_ranked=stream.is_ranked,
        )

    def abort(self, request_id: str) -> bool:
        """End the live requests with this id. False when there is none. (A stream's own abort() costs less.)"""
        streams = [stream for stream in self._streams.values() if stream.request_id == request_id]
        for stream in streams:
            stream.abort()
        return bool(streams)

    def num_live(self, request_id: str) -> int:
        """How many live requests have this id."""
        return sum(stream.request_id == request_id for stream in self._streams.values())

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Give the live requests with this id another priority. False when there is none.

        RequestError where requests have no priorities.
        """
        if self.config.scheduler.scheduling_policy != "priority":
            raise RequestError(
                "priority", "priority needs a server started with --scheduling-policy priority"
            )
        core = self._loaded().core
        handles = [stream.handle for stream in self._streams.values() if stream.request_id == request_id]
        return any([core.set_priority(handle, priority) for handle in handles])  # noqa: C419  # all of them

    def end_thinking(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Let the live requests with this id go on with these tokens, which end their thinking.

        Tokens that are being sampled come before them. Nothing happens where the thinking has ended.

        False when there is no such request whose constraints say what ends its thinking. RequestError for ids that are
        none.
        """
        assembly = self._loaded()
        check_token_ids("token_ids", token_ids, assembly.info.vocab_size)
        streams = [stream for stream in self._streams.values() if stream.request_id == request_id]
        handles = [stream.handle for stream in streams if stream.ends_thinking]
        try:
            ended = [assembly.core.end_thinking(handle, token_ids) for handle in handles]
        except CoreRequestError as error:
            raise RequestError(error.field, error.message) from None
        return any(ended)

    # Text

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, computed off the loop."""
        return await self._loaded().texts.encode(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. RequestError naming the first id out of range."""
        return await self._loaded().texts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """encode(), and for each token the characters [start, end) of the text that it stands for."""
        return await self._loaded().texts.encode_with_offsets(text, add_special_tokens=add_special_tokens)

    async def render_chat(
        self, conversation: Conversation | Callable[[], Conversation], form: ChatForm | None = None
    ) -> str:
        """The prompt's text for a conversation, rendered off the loop. RequestError names the field at fault.

        conversation: or what makes it, also off the loop. form: None means a prompt for an answer. Encode the text with
        add_special_tokens=False: it has its own.
        """
        return await self._loaded().texts.render(conversation, form or ChatForm())

    async def id_vocabulary(self) -> Vocabulary:
        """A vocabulary of tokens' names: "token_id:5"."""
        return await self._loaded().texts.id_vocabulary()

    # Inside

    def _loaded(self) -> Assembly:
        if self._assembly is None:
            raise EngineDeadError("the engine is still loading the model")
        return self._assembly

    def _accepting(self) -> Assembly:
        assembly = self._loaded()
        match self._state:
            case "ready":
                return assembly
            case "draining":
                raise ShuttingDownError
            case "dead":
                raise EngineDeadError(f"the engine has stopped: {self._reason}")
            case _:
                raise EngineClosedError(f"the engine is {self._state}")

    def _check_queue(self, assembly: Assembly) -> None:
        """Bound what waits: requests in the core's queue and those still being tokenised."""
        limit = self.config.scheduler.max_num_queued_reqs
        if self._num_in_intake + assembly.core.stats().num_waiting >= limit:
            self.metrics.rejected["overloaded"] += 1
            raise OverloadedError(f"{limit} requests are waiting already; try again later")

    def _queue(
        self,
        assembly: Assembly,
        accepted: Accepted,
        request_id: str | None,
        arrived: float,
        final_only: bool,
    ) -> RequestStream:
        self._accepting()  # again: tokenising took a while
        params = accepted.params
        try:
            handle = assembly.submit(accepted, final_only=final_only)
        except CoreRequestError as error:
            field = _CLIENTS_NAMES.get(error.field, error.field)
            raise RequestError(field, error.message.replace(error.field, field, 1)) from None
        stream = RequestStream(
            handle=handle,
            request_id=request_id or f"request-{next(self._request_numbers)}",
            prompt=accepted.prompt,
            prompt_token_ids=accepted.prompt_token_ids,
            num_sequences=params.n,
            arrived=arrived,
            metrics=self.metrics,
            on_end=self._stream_ended,
            final_only=final_only,
            relay=self._relay,
            ends_thinking=accepted.constraints.knows_thinking,
            is_ranked=not params.logprob_token_ids,
            bound_by=params.bound_by,
        )
        self._streams[handle] = stream
        self._without_streams.clear()
        self.metrics.submitted(stream, params)
        assert self._step_loop is not None
        self._step_loop.wake()
        return stream

    def _deliver(self, deltas: Deltas) -> None:
        """The only loop over requests that need one: it runs after the next step was launched."""
        now = asyncio.get_running_loop().time()
        for delta in self._relay.deliver(deltas, now):
            stream = self._streams.get(delta.request)
            if stream is not None:
                stream.push(delta, now)

    def _stalled(self, handle: int) -> None:
        """The relay's socket of this request takes no more."""
        stream = self._streams.get(handle)
        if stream is not None:
            stream.stalled()

    def _stream_ended(self, stream: RequestStream) -> None:
        """Its last sequence ended. Where the core does not know that yet, it is an abort: free the blocks now."""
        del self._streams[stream.handle]
        if not self._streams:
            self._without_streams.set()
        if stream.finish_reason == "abort" and self._state != "dead" and self._assembly is not None:
            if self._assembly.core.abort(stream.handle):
                self._assembly.core.drain()
            if self._step_loop is not None:
                self._step_loop.wake()

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """The step loop is over: by stop(), or because something broke; then every request ends with one error."""
        error = EngineDeadError("the step loop was cancelled") if task.cancelled() else task.exception()
        if error is None or self._state == "stopped":
            return
        self._state = "dead"
        self._reason = (
            str(error) if isinstance(error, OneloopError) else f"internal error ({type(error).__name__})"
        )
        log.critical("the engine has died: %s", self._reason, exc_info=error)
        for stream in list(self._streams.values()):
            stream.end("error", f"the engine has stopped: {self._reason}")
        self._dead.set()
