"""A double of AsyncEngine that writes from a script: real RequestStreams, detokenizer, metrics; no scheduler, no model.

Tokens are bytes (ids 0-255), so every character beyond ASCII is cut; 256 and 257 are special, 258-263 are padding rows
of the "model". What it generates depends on prompt, seed and sequence alone: the same request gets the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from oneloop.config import EngineConfig, ModelConfig
from oneloop.engine.async_engine import Health
from oneloop.engine.grammars import GrammarMetrics
from oneloop.engine.metrics import EngineMetrics
from oneloop.engine.params import SamplingDefaults, SamplingParams
from oneloop.engine.stream import RequestStream
from oneloop.errors import EngineDeadError, OverloadedError, RequestError, ShuttingDownError
from oneloop.executor.base import ModelInfo
from oneloop.tokenize.conversation import ChatForm
from oneloop_core import StreamDecoder, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.engine.constraints import TokenConstraints

BEGIN, END = 256, 257
VOCAB_SIZE = 264
MAX_MODEL_LEN = 256
WORDS = ("one ", "two ", "three, ", "naïve ", "日本", "語 ", "🙂 ", "👩‍🚀 ", "(x) ", "\n", '"q" ', "Ωmega ")


class FakeTokenizer:
    """Bytes as tokens."""

    chat_template: Any = None
    bos_token_id = None
    eos_token_ids = (END,)

    def __init__(self, marks: Sequence[str] = (), template: str | None = None) -> None:
        """marks: more special tokens. template: source of the chat template."""
        self.marks = tuple(marks)
        names = ["<|begin|>", "<|end|>", *marks]
        pieces = [bytes([i]) for i in range(256)] + [name.encode() for name in names]
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.special_ids = frozenset(range(256, len(pieces)))
        if template is not None:
            self.chat_template = SimpleNamespace(source=template, tool_source=None)
        self.vocabulary = Vocabulary(pieces, sorted(self.special_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def token_id(self, token: str) -> int | None:
        return 258 + self.marks.index(token) if token in self.marks else None

    def token_str(self, token_id: int) -> str:
        return self._pieces[token_id].decode(errors="replace")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """A byte a token, but for the marks."""
        if not self.marks:
            return list(text.encode())
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text):
            mark = self.token_id(part)
            ids += list(part.encode()) if mark is None else [mark]
        return ids

    special_tokens: dict[str, str] = {}  # noqa: RUF012

    def id_vocabulary(self) -> Vocabulary:
        return Vocabulary([b"token_id:%d" % token for token in range(self.vocab_size)])


@dataclass
class FakeDelta:
    """As oneloop_core.Delta."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    prompt_logprobs: Any = None
    pooled: bytes | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    is_request_at_fault: bool = False


class Writer:
    """One sequence being written."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: Any,
        limit: int,
        tokenizer: FakeTokenizer,
        script: str | None,
    ) -> None:
        self.index = index
        self.params = params
        self.limit = limit
        self.num_tokens = 0
        self.source = random.Random(repr((tuple(prompt), params.seed, index if params.temperature else 0)))
        text = "".join(self.source.choice(WORDS) for _ in range(self.source.randint(3, 40)))
        self.tokens = [*tokenizer.encode(text if script is None else script), END]
        self.decoder = StreamDecoder(
            tokenizer.vocabulary,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_ids=params.shown_special_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def step(self) -> FakeDelta:
        token = self.tokens[self.num_tokens % len(self.tokens)]
        if token == END and (self.params.ignore_eos or self.num_tokens < self.params.min_tokens):
            token = ord("~")
        self.num_tokens += 1
        ends = token == END or (
            token in self.params.stop_token_ids and self.num_tokens > self.params.min_tokens
        )
        text = "" if ends and not self.params.include_stop_str_in_output else self.decoder.push(token)
        delta = FakeDelta(self.index, text, [token], logprobs=self._logprobs(token))
        if self.decoder.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self.decoder.matched
        elif token == END:
            delta.finish_reason = "stop"
        elif token in self.params.stop_token_ids and self.num_tokens > self.params.min_tokens:
            delta.finish_reason, delta.stop_reason = "stop", token
        elif self.num_tokens >= self.limit:
            delta.finish_reason = "length"
        if delta.finish_reason is not None:
            delta.text += self.decoder.flush()
        return delta

    def _logprobs(self, token: int) -> Any:
        if self.params.logprobs is None:
            return None
        if self.params.logprob_token_ids:
            named = [(other, -2.0 - place) for place, other in enumerate(self.params.logprob_token_ids)]
            return [(1, [(token, -0.25), *named])]
        seed = int.from_bytes(hashlib.sha256(f"{token} {self.num_tokens}".encode()).digest()[:4], "big")
        others = [(seed + i) % 258 for i in range(1, self.params.logprobs)]
        top = sorted(
            [(token, -0.25), *((other, -1.0 - i) for i, other in enumerate(others))], key=lambda t: -t[1]
        )
        return [(1, [(token, -0.25), *top[: self.params.logprobs]])]


class FakeEngine:
    """AsyncEngine's face."""

    def __init__(
        self,
        *,
        tokenizer: FakeTokenizer | None = None,
        script: str | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        """script: what it writes, instead of something random."""
        self.config = EngineConfig(model=ModelConfig())
        self.served_model_names = ("fake", "alias")
        self.metrics = EngineMetrics()
        self.grammars = SimpleNamespace(metrics=GrammarMetrics())
        self.tokenizer = tokenizer or FakeTokenizer()
        self.script = script
        self.generation_prompt = "[assistant]"
        self.model_info = ModelInfo(VOCAB_SIZE, max_model_len, 64, 16)
        self.default_sampling = SamplingDefaults()
        self.state = "ready"
        self.fail_after: int | None = None
        """Every sequence breaks at that many tokens."""
        self.overloaded = False
        self.step_s = 0.0
        self.in_step = False
        """Whether a step waits until the last one was taken, so that nothing is ever merged."""
        self.live: dict[int, RequestStream] = {}
        self.prompts: list[list[int]] = []
        """What it was asked."""
        self.constraints: list[TokenConstraints | None] = []
        self.num_steps = 0
        self.generated = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_ended = asyncio.Event()

    def health(self) -> Health:
        return Health(self.state, "told to" if self.state == "dead" else None)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_running=len(self.live), num_waiting=0, num_preemptions=0, num_steps=self.num_steps,
            num_total_blocks=64, num_free_blocks=64 - len(self.live), num_cached_blocks=0,
            num_used_blocks=len(self.live), num_prefix_hit_tokens=0, num_prefix_query_tokens=0,
            num_prompt_tokens=sum(map(len, self.prompts)),
            num_generation_tokens=self.generated,
        )  # fmt: skip

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        await asyncio.sleep(0)
        return ([BEGIN] if add_special_tokens else []) + self.tokenizer.encode(text)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        await asyncio.sleep(0)
        for token in token_ids:
            if token >= self.tokenizer.vocab_size:
                raise RequestError("tokens", f"token id {token} is out of range")
        return self.tokenizer.vocabulary.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    async def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        ids = await self.encode(text, add_special_tokens=add_special_tokens)
        places = [(at, at + 1) for at, char in enumerate(text) for _ in char.encode()]
        return ids, [(0, 0)] * (len(ids) - len(places)) + places

    async def id_vocabulary(self) -> Vocabulary:
        await asyncio.sleep(0)
        return self.tokenizer.id_vocabulary()

    async def render_chat(self, conversation: Any, form: ChatForm) -> str:
        await asyncio.sleep(0)
        found = conversation() if callable(conversation) else conversation
        text = "".join(f"[{message.role}]{message.text}" for message in found.messages)
        if found.tools:
            text += repr([tool.name for tool in found.tools])
        if form.template_arguments:
            text += repr(dict(form.template_arguments))
        return text + (self.generation_prompt if form.add_generation_prompt else "")

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        constraints: TokenConstraints | None = None,
    ) -> RequestStream:
        self.check_accepting()
        resolved = (params or SamplingParams()).resolve(
            self.default_sampling, vocab_size=VOCAB_SIZE, max_sequences=self.config.resolved.max_num_seqs
        )
        resolved = resolved.behind(len(prompt), self.model_info.max_model_len)
        room = self.model_info.max_model_len - len(prompt)
        handle = len(self.prompts) + 1
        stream = RequestStream(
            handle=handle, request_id=request_id or f"r{handle}", prompt=None, prompt_token_ids=prompt,
            num_sequences=resolved.n, arrived=asyncio.get_running_loop().time(), metrics=self.metrics,
            on_end=self._ended,
        )  # fmt: skip
        self.prompts.append(prompt)
        self.constraints.append(constraints)
        self.metrics.submitted(stream, resolved)
        self.live[handle] = stream
        if resolved.pooling is not None:
            vector = struct.pack(
                f"{self.model_info.hidden_size}f", *range(1, 1 + self.model_info.hidden_size)
            )
            stream.push(FakeDelta(0, "", [], "length", queue_s=0.001, pooled=vector), 0.0)
            return stream
        limit = room if resolved.max_tokens is None else resolved.max_tokens
        sequences = [
            Writer(index, prompt, resolved, limit, self.tokenizer, self.script) for index in range(resolved.n)
        ]
        task = asyncio.create_task(self._write(stream, sequences))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def num_live(self, request_id: str) -> int:
        return sum(stream.request_id == request_id for stream in self.live.values())

    def abort(self, request_id: str) -> bool:
        streams = [stream for stream in self.live.values() if stream.request_id == request_id]
        for stream in streams:
            stream.abort()
        return bool(streams)

    def check_accepting(self) -> None:
        if self.overloaded:
            raise OverloadedError("too many requests are waiting", retry_after_s=3)
        if self.state == "draining":
            raise ShuttingDownError
        if self.state != "ready":
            raise EngineDeadError("the engine has stopped")

    def _ended(self, stream: RequestStream) -> None:
        del self.live[stream.handle]
        if not self.live:
            self._all_ended.set()

    async def _write(self, stream: RequestStream, sequences: list[Writer]) -> None:
        loop, first = asyncio.get_running_loop(), True
        while sequences and not stream.finished:
            await asyncio.sleep(self.step_s)
            while self.in_step and self._unread(stream):  # noqa: ASYNC110
                await asyncio.sleep(0)
            self.num_steps += 1
            for sequence in list(sequences):
                delta = sequence.step()
                self.generated += 1
                if first:
                    delta.queue_s, delta.num_cached_tokens, first = (
                        0.001,
                        len(stream.prompt_token_ids) // 2,
                        False,
                    )
                if self.fail_after is not None and sequence.num_tokens > self.fail_after:
                    delta.text, delta.token_ids, delta.finish_reason = "", [], "error"
                    delta.error, delta.logprobs = "the step failed", None
                if delta.finish_reason is not None:
                    sequences.remove(sequence)
                stream.push(delta, loop.time())

    @staticmethod
    def _unread(stream: RequestStream) -> bool:
        """Whether a reader that takes step by step has not taken the last one."""
        return bool(stream._pending) and not stream._wakes_at_end and not stream.finished

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        self.state = "draining"
        self._all_ended.clear()
        if self.live:
            try:
                async with asyncio.timeout(drain_timeout):
                    await self._all_ended.wait()
            except TimeoutError:
                pass
        for stream in list(self.live.values()):
            stream.abort()
        self.state = "stopped"
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
