"""Compiled grammars: made off the loop, each once, and kept while there is room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.engine.histogram import Histogram
from oneloop.engine.threads import in_daemon_thread
from oneloop.errors import OverloadedError, RequestError
from oneloop_core import GrammarBusyError, GrammarCompiler, GrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.engine.structured import GrammarSpec
    from oneloop_core import Grammar, Vocabulary

MAX_ENTRIES = 256
MAX_BYTES = 8 << 20
"""Of the sources of all grammars that are kept."""
NUM_THREADS = 2
"""Compiling at a time; each compilation ends within 2 s."""
MAX_WAITING = 64
"""Different grammars that are being compiled or wait for it; more are refused (503)."""
COMPILE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class GrammarMetrics:
    """What became of the grammars that were asked for."""

    def __init__(self) -> None:
        results = ("hit", "miss", "joined", "refused", "busy", "failed")
        self.requests: dict[str, int] = dict.fromkeys(results, 0)
        """hit: kept from before; joined: the same was being compiled. Of the misses: refused, what was no grammar;
        failed, what was not compiled for another reason. busy: what there was no room for, a miss or not even that."""
        self.compile_seconds = Histogram(COMPILE_S)
        self.num_entries = 0
        self.num_bytes = 0


class Grammars:
    """The compiled grammars of one vocabulary. All methods belong to the event loop."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        eos_token_ids: Sequence[int],
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """eos_token_ids: what may follow where a grammar may end."""
        self._vocabulary = vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self.metrics = GrammarMetrics()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._under_way: dict[GrammarSpec, asyncio.Task[Grammar]] = {}
        self._compiler: asyncio.Task[GrammarCompiler] | None = None
        self._threads = asyncio.Semaphore(NUM_THREADS)

    async def get(self, spec: GrammarSpec) -> Grammar:
        """The compiled grammar. RequestError (400) naming the spec's field; OverloadedError (503)."""
        kept = self._kept.get(spec)
        if kept is not None:
            self.metrics.requests["hit"] += 1
            self._kept.move_to_end(spec)
            return kept
        task = self._under_way.get(spec)
        if task is None:
            if len(self._under_way) >= MAX_WAITING:
                self.metrics.requests["busy"] += 1
                raise OverloadedError(f"{MAX_WAITING} grammars are being compiled already; try again later")
            self.metrics.requests["miss"] += 1
            task = asyncio.create_task(self._compile(spec), name="oneloop-grammar")
            self._under_way[spec] = task
            task.add_done_callback(partial(self._compiled, spec))
        else:
            self.metrics.requests["joined"] += 1
        try:
            # Whoever else waits for it is not to be cancelled with this request.
            return await asyncio.shield(task)
        except GrammarError as error:
            raise RequestError(spec.field, f"{spec.field}: {error}") from None
        except GrammarBusyError as error:
            raise OverloadedError(str(error)) from None

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        async with self._threads:
            compiler = await self._made_compiler()
            began = perf_counter()
            try:
                return await in_daemon_thread(partial(_compile, compiler, spec), "oneloop-grammars")
            finally:
                self.metrics.compile_seconds.observe(perf_counter() - began)

    async def _made_compiler(self) -> GrammarCompiler:
        """Made at the first use: it takes memory and some 100 ms, and many servers are never asked for a grammar."""
        if self._compiler is None:
            make = partial(GrammarCompiler, self._vocabulary, self._eos_token_ids)
            self._compiler = asyncio.create_task(in_daemon_thread(make, "oneloop-grammars"))
        return await asyncio.shield(self._compiler)

    def _compiled(self, spec: GrammarSpec, task: asyncio.Task[Grammar]) -> None:
        del self._under_way[spec]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.metrics.requests[_result(error)] += 1
            return
        size = _size(spec)
        self._kept[spec] = task.result()
        self.metrics.num_bytes += size
        while len(self._kept) > self._max_entries or self.metrics.num_bytes > self._max_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self.metrics.num_bytes -= _size(oldest)
        self.metrics.num_entries = len(self._kept)


def _result(error: BaseException) -> str:
    """What became of a grammar that was not compiled."""
    match error:
        case GrammarError():
            return "refused"
        case GrammarBusyError():
            return "busy"
        case _:
            return "failed"


def _compile(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
    return compiler.compile(
        spec.kind,
        spec.source,
        compact=spec.compact,
        whitespace_pattern=spec.whitespace_pattern,
        closed_objects=spec.closed_objects,
    )


def _size(spec: GrammarSpec) -> int:
    """About the bytes of what is kept of a grammar's source."""
    texts = (spec.source,) if isinstance(spec.source, str) else spec.source
    return sum(map(len, texts)) + len(spec.whitespace_pattern or "")
