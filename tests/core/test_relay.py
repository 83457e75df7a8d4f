"""The relay writes what the Python encoder would, loses nothing whatever the socket does, and counts every token."""

from __future__ import annotations

import os
import random
import select
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from oneloop_core import Core, CoreConfig, StreamRelay, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oneloop_core import Deltas

BOUNDS = (0.5, 1.5, 2.5)
BEFORE, AFTER = b'data: {"choices":[{"index":0,"text":', b',"finish_reason":null}]}\n\n'
WORDS = ("word ", '"quoted"', "back\\slash", "日本", "🙂", "\u2028", "line\n\ttab", "\x7f\x1b", "é")
PIECES = [bytes([value]) for value in range(256)] + [word.encode() for word in WORDS]


class Batch:
    """A core whose sequences "sample" what the test says."""

    def __init__(self, slab_type: Any, num_requests: int, **settings: Any) -> None:
        config = CoreConfig(num_blocks=4096, max_num_seqs=64, max_model_len=4096, vocab_size=len(PIECES))
        self.core = Core(config, Vocabulary(PIECES, []))
        self.slab = slab_type(self.core.layout)
        settings = {"max_tokens": 4000, "ignore_eos": True, **settings}
        self.handles = [self.core.submit([1, 2, 3], **settings) for _ in range(num_requests)]

    def step(self, *tokens: int) -> Deltas:
        """One token per request, in their order."""
        step_id = self.core.schedule(self.slab.buffer)
        assert step_id is not None
        self.slab["output_token"][: len(tokens)] = tokens
        return self.core.commit(step_id, self.slab.buffer)


@pytest.fixture
def make_batch(slab_type: Any) -> Callable[..., Batch]:
    return lambda *arguments, **settings: Batch(slab_type, *arguments, **settings)


@pytest.fixture
def relay() -> StreamRelay:
    return StreamRelay(BOUNDS)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made: list[tuple[socket.socket, socket.socket]] = [socket.socketpair() for _ in range(24)]
    for _, theirs in made:
        theirs.settimeout(5)
    yield made
    for pair in made:
        for end in pair:
            end.close()


def attach(relay: StreamRelay, handle: int, sock: socket.socket, *, chunked: bool = True) -> None:
    relay.attach(handle, sock.fileno(), BEFORE, AFTER, chunked=chunked, last_token_at=0.0)


def events_of(data: bytes, *, chunked: bool = True) -> list[bytes]:
    """The events on the wire; a chunk holds one or several."""
    if not chunked:
        return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
    events = []
    for chunk in chunks_of(data):
        assert chunk.endswith(b"\n\n")
        events += events_of(chunk, chunked=False)
    return events


def chunks_of(data: bytes) -> list[bytes]:
    chunks = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert size == b"%x" % length, "as Python writes it"
        chunks.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        data = rest[length + 2 :]
    return chunks


def text_of(events: list[bytes]) -> str:
    """Their text; each must be what the Python encoder makes of it."""
    texts = []
    for event in events:
        assert event.startswith(BEFORE)
        assert event.endswith(AFTER)
        text = orjson.loads(event[len(BEFORE) : -len(AFTER)])
        assert text, "no event without text"
        assert event == BEFORE + orjson.dumps(text) + AFTER
        texts.append(text)
    return "".join(texts)


def drain(sock: socket.socket) -> bytes:
    """What has come."""
    data = b""
    while select.select([sock], [], [], 0)[0]:
        piece = sock.recv(1 << 16)
        if not piece:
            break
        data += piece
    return data


@pytest.mark.parametrize("chunked", [True, False])
def test_bytes_are_the_python_encoders(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any, chunked: bool
) -> None:
    """Random tokens: quotes, control characters, characters cut into bytes, bytes that are no character.

    Each step's text is an event of its own, however many go in one write.
    """
    draw, count = random.Random(3), len(pairs)
    batch = make_batch(count)
    texts, told, wires = [""] * count, [0] * count, [b""] * count
    num_texts = [0] * count
    for number, handle in enumerate(batch.handles):
        attach(relay, handle, pairs[number][0], chunked=chunked)
    for step in range(400):
        tokens = [draw.randrange(len(PIECES)) for _ in range(count)]
        deltas = batch.step(*tokens)
        for number, one in enumerate(deltas):
            texts[number] += one.text
            num_texts[number] += bool(one.text)
            told[number] += len(one.token_ids)
        assert relay.deliver(deltas, 1.0) == []
        if step % draw.randint(1, 4) == 0:  # else several steps go in one write
            assert relay.send(10.0) == ([], False)
        if step % 20 == 0:
            for number, (_, theirs) in enumerate(pairs):
                wires[number] += drain(theirs)
    for number, handle in enumerate(batch.handles):
        unsent, num_tokens, last_token_at = relay.detach(handle) or (b"", 0, 0.0)
        wire = wires[number] + drain(pairs[number][1]) + unsent
        events = events_of(wire, chunked=chunked)
        assert text_of(events) == texts[number]
        assert len(events) == num_texts[number]
        assert (num_tokens, last_token_at) == (told[number], 1.0)


def test_every_step_is_one_event(make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any) -> None:
    (ours, theirs), *_ = pairs
    batch = make_batch(1)
    attach(relay, batch.handles[0], ours)
    for number in range(50):
        relay.deliver(batch.step(65 + number % 26), float(number))
        assert relay.send(1.0) == ([], False)
        event = BEFORE + orjson.dumps(chr(65 + number % 26)) + AFTER
        assert theirs.recv(1 << 16) == b"%x\r\n%b\r\n" % (len(event), event)


def test_who_has_no_lane_and_who_ends_is_returned(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    batch = make_batch(3, max_tokens=2)
    attach(relay, batch.handles[1], pairs[1][0])
    assert [one.request for one in relay.deliver(batch.step(65, 66, 67), 1.0)] == [
        batch.handles[0],
        batch.handles[2],
    ]
    assert relay.send(1.0) == ([], False)
    last = relay.deliver(batch.step(65, 66, 67), 2.0)
    assert [(one.request, one.text, one.finish_reason) for one in last] == [
        (handle, text, "length") for handle, text in zip(batch.handles, "ABC", strict=True)
    ]
    unsent, num_tokens, last_token_at = relay.detach(batch.handles[1]) or (b"", 0, 0.0)
    assert text_of(events_of(drain(pairs[1][1]) + unsent)) == "B"
    assert (num_tokens, last_token_at) == (1, 1.0)
    assert relay.detach(batch.handles[1]) is None


def test_logprobs_are_not_the_relays(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    batch = make_batch(1, logprobs=2)
    attach(relay, batch.handles[0], pairs[0][0])
    (one,) = relay.deliver(batch.step(65), 1.0)
    assert one.text == "A"
    assert one.logprobs is not None
    assert relay.detach(batch.handles[0]) == (b"", 0, 0.0)


def test_times_between_tokens_are_counted(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    batch = make_batch(2)
    for handle, (ours, _) in zip(batch.handles, pairs, strict=False):
        attach(relay, handle, ours)
    for now in (0.5, 2.0, 4.0, 40.0):
        relay.deliver(batch.step(65, 66), now)
    assert relay.take_gaps() == ([2, 2, 2, 2], 80.0)
    assert relay.take_gaps() == ([0, 0, 0, 0], 0.0)


def test_a_slice_ends_in_time(make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any) -> None:
    """At least one write per call; the rest keeps its order, and what comes meanwhile goes along or behind."""
    batch = make_batch(len(pairs))
    for handle, (ours, _) in zip(batch.handles, pairs, strict=True):
        attach(relay, handle, ours)
    relay.deliver(batch.step(*[65] * len(pairs)), 1.0)
    for number in range(5):
        assert relay.send(0.0) == ([], True)
        assert [bool(drain(theirs)) for _, theirs in pairs].index(True) == number
    relay.deliver(batch.step(*[66] * len(pairs)), 2.0)
    assert relay.send(10.0) == ([], False)
    wires = [drain(theirs) for _, theirs in pairs]
    assert [text_of(events_of(wire)) for wire in wires] == ["B"] * 5 + ["AB"] * (len(pairs) - 5)
    assert [len(events_of(wire)) for wire in wires] == [1] * 5 + [2] * (len(pairs) - 5)
    assert all(len(chunks_of(wire)) == 1 for wire in wires)
    assert relay.send(0.0) == ([], False)


def test_much_that_waits_goes_in_several_writes(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    """One lane's pile holds up no other's turn, and keeps its order."""
    (ours, theirs), (others, others_peer), *_ = pairs
    batch, texts, wire = make_batch(2), "", b""
    attach(relay, batch.handles[0], ours)
    for number in range(2000):
        letter = 65 + number % 26
        texts += chr(letter)
        relay.deliver(batch.step(letter, letter), 1.0)
    attach(relay, batch.handles[1], others)
    relay.deliver(batch.step(66, 67), 1.0)
    num_calls, more = 0, True
    while more:
        stalled, more = relay.send(0.0)
        assert not stalled
        num_calls += 1
        wire += drain(theirs)
        if num_calls == 2:
            assert text_of(events_of(drain(others_peer))) == "C"
    chunks = chunks_of(wire)
    assert len(chunks) == num_calls - 1 > 2
    assert max(map(len, chunks)) < (16 << 10) + 1024
    assert text_of(events_of(wire)) == texts + "B"
    assert len(events_of(wire)) == 2001


def test_what_waits_at_the_end_keeps_its_events(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    batch = make_batch(1)
    attach(relay, batch.handles[0], pairs[0][0])
    for _ in range(1000):
        relay.deliver(batch.step(65), 1.0)
    unsent, num_tokens, _ = relay.detach(batch.handles[0]) or (b"", 0, 0.0)
    assert len(events_of(unsent)) == num_tokens == 1000
    assert len(chunks_of(unsent)) > 1


def test_a_socket_that_takes_no_more(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    """It is told once; what comes then waits, merged; nothing is lost and nothing twice."""
    (ours, theirs), *_ = pairs
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    batch = make_batch(1)
    attach(relay, batch.handles[0], ours)
    text, num_steps, stalled = "", 0, []
    while not stalled:
        deltas = batch.step(256 + num_steps % len(WORDS))
        text += "".join(one.text for one in deltas)
        relay.deliver(deltas, 1.0)
        stalled, _ = relay.send(1.0)
        num_steps += 1
        assert num_steps < 3000
    assert stalled == batch.handles
    for number in range(100):
        deltas = batch.step(256 + number % len(WORDS))
        text += "".join(one.text for one in deltas)
        relay.deliver(deltas, 1.0)
        assert relay.send(1.0) == ([], False)
    unsent, num_tokens, _ = relay.detach(batch.handles[0]) or (b"", 0, 0.0)
    assert num_tokens == num_steps + 100
    events = events_of(drain(theirs) + unsent)
    assert text_of(events) == text
    assert len(events) < num_tokens


def test_a_client_that_left(make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any) -> None:
    (ours, theirs), *_ = pairs
    batch = make_batch(1)
    attach(relay, batch.handles[0], ours)
    theirs.close()
    relay.deliver(batch.step(65), 1.0)
    assert relay.send(1.0) == (batch.handles, False)
    relay.deliver(batch.step(66), 1.0)
    assert relay.send(1.0) == ([], False)
    unsent, _, _ = relay.detach(batch.handles[0]) or (b"", 0, 0.0)
    assert text_of(events_of(unsent)) == "AB"


def test_detached_while_it_waits(make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any) -> None:
    """Its place in the queue means nothing any more, nor does it when the request is attached again."""
    (ours, theirs), *_ = pairs
    batch = make_batch(1)
    attach(relay, batch.handles[0], ours)
    relay.deliver(batch.step(65), 1.0)
    unsent, _, _ = relay.detach(batch.handles[0]) or (b"", 0, 0.0)
    assert text_of(events_of(unsent)) == "A"
    attach(relay, batch.handles[0], ours)
    assert relay.send(1.0) == ([], False)
    assert drain(theirs) == b""
    relay.deliver(batch.step(66), 1.0)
    assert relay.send(1.0) == ([], False)
    assert text_of(events_of(drain(theirs))) == "B"


def test_the_connection_ends_with_the_lane(
    make_batch: Callable[..., Batch], relay: StreamRelay, pairs: Any
) -> None:
    """The lane's descriptor is its own: closing ours neither ends the connection nor redirects what is sent."""
    (ours, theirs), (other, others_peer), *_ = pairs
    batch = make_batch(1)
    attach(relay, batch.handles[0], ours)
    number = ours.fileno()
    ours.close()
    os.dup2(other.fileno(), number)  # the number means another connection now
    try:
        relay.deliver(batch.step(65), 1.0)
        assert relay.send(1.0) == ([], False)
        assert text_of(events_of(drain(theirs))) == "A"
        assert drain(others_peer) == b""
        relay.detach(batch.handles[0])
        assert theirs.recv(1 << 16) == b""
    finally:
        os.close(number)


def test_arguments(relay: StreamRelay, pairs: Any) -> None:
    with pytest.raises(ValueError, match="ascending"):
        StreamRelay((2.0, 1.0))
    assert StreamRelay(np.array(BOUNDS)).take_gaps() == ([0, 0, 0, 0], 0.0)
    attach(relay, 7, pairs[0][0])
    with pytest.raises(ValueError, match="7 has a lane already"):
        attach(relay, 7, pairs[0][0])
    for fd in (-1, 1 << 20):
        with pytest.raises(OSError, match="descriptor"):
            relay.attach(8, fd, b"", b"", chunked=True, last_token_at=0.0)
    assert relay.detach(8) is None
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="max_s"):
            relay.send(wrong)
