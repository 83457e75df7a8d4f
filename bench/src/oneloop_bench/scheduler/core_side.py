"""Our side: the Rust core through its Python API, called as the engine's loop calls it."""

from __future__ import annotations

import socket
from time import perf_counter, thread_time_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop.engine.metrics import SHORT_S
from oneloop_bench.scheduler.workload import VALUES_PER_ROW, Mix, Steps, place
from oneloop_bench.slab import Slab
from oneloop_core import Core, CoreConfig, StreamRelay

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from oneloop_core import Deltas, SlabLayout, Vocabulary

SOCKET_BUFFER_BYTES = 1 << 20
EVENT = (b'data: {"choices":[{"index":0,"delta":{"content":', b"}}]}\n\n")
"""What stands around a text. Encoding and sending are not measured here."""


class CoreSide:
    """Without a vocabulary tokens come out as ids, as they do of vLLM's scheduler; with one also as text.

    streams: the text is also handed to the relay that sends it to the streams, which then sends it.
    """

    def __init__(self, vocabulary: Vocabulary | None = None, *, streams: bool = False) -> None:
        self._vocabulary = vocabulary
        self._streams = Streams() if streams else None
        self.hand_over: list[int] = []
        """As Steps' times, for giving each step's text to the relay: since load(), by step."""

    def load(self, mix: Mix) -> None:
        """See Side."""
        self._mix = mix
        self._text = np.array(mix.text, np.int32)
        config = CoreConfig(
            num_blocks=mix.num_blocks,
            block_size=mix.block_size,
            max_num_seqs=mix.max_num_seqs,
            max_num_batched_tokens=mix.max_num_batched_tokens,
            max_model_len=mix.max_model_len,
            vocab_size=mix.vocab_size,
        )
        self._core = Core(config, self._vocabulary)
        self._slab = RequestSlab(self._core.layout, mix.max_num_seqs)
        self._next_step = self._next_request = 0
        self.hand_over = []

    def run(self, num_steps: int) -> Steps:
        """See Side."""
        steps = Steps.none()
        # One allocation for all rows: what stays behind in the heap would make every commit fall into new memory.
        rows = np.empty((num_steps, VALUES_PER_ROW * self._mix.max_num_seqs), np.int64)
        num_values = []
        for index in range(num_steps):
            steps.submit.append(self._submit())
            began = thread_time_ns()
            step_id = self._core.schedule(self._slab.buffer)
            steps.schedule.append(thread_time_ns() - began)
            if step_id is None:
                steps.update.append(0)
                self.hand_over.append(0)
                num_values.append(0)
            else:
                self._commit(step_id, steps)
                num_values.append(self._slab.read_rows(rows[index]))
            self._next_step += 1
        steps.rows = [row[:count].tolist() for row, count in zip(rows, num_values, strict=True)]
        return steps

    def close(self) -> None:
        """See Side."""
        if self._streams is not None:
            self._streams.close()

    def _commit(self, step_id: int, steps: Steps) -> None:
        self._slab.sample(self._text)
        began = thread_time_ns()
        deltas = self._core.commit(step_id, self._slab.buffer)
        steps.update.append(thread_time_ns() - began)
        self.hand_over.append(self._streams.deliver(deltas) if self._streams is not None else 0)

    def _submit(self) -> int:
        """Submit what comes before the next step; ns."""
        arrivals = self._mix.arrivals(self._next_request, self._next_step)
        self._next_request += len(arrivals)
        submit = self._core.submit
        began = thread_time_ns()
        # A seed comes back with the slab's admitted rows, and so tells which request a slot serves.
        handles = [
            submit(prompt, max_tokens=max_tokens, temperature=0.0, seed=number, ignore_eos=True)
            for number, prompt, max_tokens in arrivals
        ]
        elapsed = thread_time_ns() - began
        if self._streams is not None:
            for handle, (*_, max_tokens) in zip(handles, arrivals, strict=True):
                if max_tokens > 1:
                    self._streams.attach(handle)
        return elapsed


class RequestSlab:
    """A slab read with requests in the place of slots."""

    def __init__(self, layout: SlabLayout, max_num_seqs: int) -> None:
        self._slab = Slab(layout)
        self.buffer = self._slab.buffer
        self._request: NDArray[np.int64] = np.full(max_num_seqs, -1, np.int64)
        """By slot."""

    def sample(self, text: NDArray[np.int32]) -> None:
        """Write what the step's rows sample."""
        views, header = self._slab.views, self._slab.views.header()
        admitted, samples = slice(header.num_admitted), slice(header.num_samples)
        self._request[views.admitted_slot[admitted]] = views.admitted_seed[admitted]
        requests = self._request[views.sample_slot[samples]]
        views.output_token[samples] = text[place(requests, views.sample_output_index[samples], len(text))]

    def read_rows(self, out: NDArray[np.int64]) -> int:
        """Write the step's rows into `out`, as in Steps.rows; the number of values."""
        views = self._slab.views
        rows = slice(views.header().num_rows)
        requests = self._request[views.row_slot[rows]]
        order = np.argsort(requests)
        columns: tuple[NDArray[Any], ...] = (
            requests,
            views.row_num_computed[rows],
            views.row_num_scheduled[rows],
        )
        num_values = VALUES_PER_ROW * len(requests)
        for place_in_row, column in enumerate(columns):
            out[place_in_row:num_values:VALUES_PER_ROW] = column[order]
        return num_values


class Streams:
    """The relay with every stream at the same socket, which somebody reads."""

    def __init__(self) -> None:
        self._relay = StreamRelay(SHORT_S)
        self._ours, self._theirs = socket.socketpair()
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._theirs.setblocking(False)

    def attach(self, handle: int) -> None:
        """All of this request's text goes through the relay."""
        before, after = EVENT
        self._relay.attach(
            handle, self._ours.fileno(), before, after, chunked=False, last_token_at=perf_counter()
        )

    def deliver(self, deltas: Deltas) -> int:
        """Hand the text over; ns. Then, unmeasured, send it and close the lanes of those that have ended."""
        began = thread_time_ns()
        others = self._relay.deliver(deltas, perf_counter())
        self._relay.take_gaps()
        elapsed = thread_time_ns() - began
        more = True
        while more:
            stalled, more = self._relay.send(1.0)
            assert not stalled, "the socket that takes all streams is full"
            self._read()
        for delta in others:
            self._relay.detach(delta.request)
        return elapsed

    def _read(self) -> None:
        try:
            while self._theirs.recv(SOCKET_BUFFER_BYTES):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Both ends."""
        self._ours.close()
        self._theirs.close()
