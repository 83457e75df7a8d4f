"""Our side: the Rust core through its Python API, called as the engine's loop calls it."""

from __future__ import annotations

import socket
from time import perf_counter, thread_time_ns
from typing import TYPE_CHECKING

import numpy as np

from oneloop.engine.metrics import SHORT_S
from oneloop_bench.null_executor import Slab
from oneloop_bench.scheduler.workload import Mix, Steps, place
from oneloop_core import Core, CoreConfig, StreamRelay

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from oneloop_core import Deltas, SlabLayout, Vocabulary

SOCKET_BUFFER_BYTES = 1 << 20
EVENT = (b'data: {"choices":[{"index":0,"delta":{"content":', b"}}]}\n\n")
"""What stands around a text. Encoding and sending are not measured here."""


class CoreSide:
    """Without a vocabulary tokens come out as ids, as they do of vLLM's scheduler.

    With one they also come out as text, which is handed to the relay that sends it to the streams.
    """

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self._vocabulary = vocabulary
        self._streams = Streams()
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
        self._streams.close()
        self._streams = Streams()
        self._next_step = self._next_request = 0
        self.hand_over = []

    def run(self, num_steps: int) -> Steps:
        """See Side."""
        steps = Steps.none()
        for _ in range(num_steps):
            steps.submit.append(self._submit())
            began = thread_time_ns()
            step_id = self._core.schedule(self._slab.buffer)
            steps.schedule.append(thread_time_ns() - began)
            update = hand_over = 0
            rows: list[int] = []
            if step_id is not None:
                self._slab.sample(self._text)
                began = thread_time_ns()
                deltas = self._core.commit(step_id, self._slab.buffer)
                update = thread_time_ns() - began
                rows = self._slab.rows()
                if self._vocabulary is not None:
                    hand_over = self._streams.deliver(deltas)
            steps.update.append(update)
            steps.rows.append(rows)
            self.hand_over.append(hand_over)
            self._next_step += 1
        return steps

    def close(self) -> None:
        """See Side."""
        self._streams.close()

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
        if self._vocabulary is not None:
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
        view, header = self._slab.view, self._slab.header
        admitted = slice(header("num_admitted"))
        self._request[view("admitted_slot")[admitted]] = view("admitted_seed")[admitted]
        samples = slice(header("num_samples"))
        requests = self._request[view("sample_slot")[samples]]
        view("output_token")[samples] = text[place(requests, view("sample_output_index")[samples], len(text))]

    def rows(self) -> list[int]:
        """As Steps.rows, of one step."""
        view, rows = self._slab.view, slice(self._slab.header("num_rows"))
        requests = self._request[view("row_slot")[rows]]
        columns = (requests, view("row_num_computed")[rows], view("row_num_scheduled")[rows])
        flat: list[int] = np.stack(columns, axis=1)[np.argsort(requests)].ravel().tolist()
        return flat


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
