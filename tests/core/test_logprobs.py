"""Log-probabilities as JSON: byte for byte what a plain encoder in Python makes of them, alone and on the relay."""

from __future__ import annotations

import random
import select
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from oneloop_core import Core, CoreConfig, LogprobsEncoder, StreamDecoder, StreamRelay, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from oneloop_core import Delta, Deltas

WORDS = (
    "word ",
    '"quoted"',
    "back\\slash",
    "日本",
    "🙂",
    "\u2028",
    "line\n\ttab",
    "\x7f\x1b",
    "é",
    "bytes:\\x80",
)
SPECIAL = ("</s>", "日<|pad|>")
PIECES = [*(bytes([value]) for value in range(256)), *(word.encode() for word in (*WORDS, *SPECIAL)), b""]
SPECIAL_IDS = [256 + len(WORDS), 257 + len(WORDS)]
NUM_ROWS = len(PIECES) + 3
"""With rows of the model that are no token."""
VOCABULARY = Vocabulary(PIECES, SPECIAL_IDS)

TokenLogprobs = tuple[int, list[tuple[int, float]]]


class Plain:
    """What LogprobsEncoder must write, with dictionaries and orjson."""

    def __init__(self, form: str, num_top: int, skip_special: bool) -> None:
        self.form, self.num_top, self.skip_special = form, num_top, skip_special
        self.text = StreamDecoder(VOCABULARY, skip_special_tokens=skip_special)
        self.offset = 0
        self.tokens: list[TokenLogprobs] = []

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        self.tokens += tokens

    def take(self) -> bytes:
        tokens, self.tokens = self.tokens, []
        if self.form == "chat":
            return orjson.dumps({"content": [self._entry(ranked) for _, ranked in tokens]})
        return orjson.dumps(
            {
                "text_offset": [self._offset(ranked[0][0]) for _, ranked in tokens],
                "token_logprobs": [number(ranked[0][1]) for _, ranked in tokens],
                "tokens": [name(ranked[0][0]) for _, ranked in tokens],
                "top_logprobs": [self._top(ranked) for _, ranked in tokens],
            }
        )

    def _data(self, token_id: int) -> bytes:
        return b"" if self.skip_special and token_id in SPECIAL_IDS else piece(token_id)

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": number(logprob), "bytes": list(self._data(token_id))}

    def _entry(self, ranked: list[tuple[int, float]]) -> dict[str, Any]:
        top = [self._alternative(*one) for one in ranked[1 : 1 + self.num_top]]
        return {**self._alternative(*ranked[0]), "top_logprobs": top}

    def _offset(self, token_id: int) -> int:
        before = self.offset
        if token_id < len(PIECES):
            self.offset += len(self.text.push(token_id))
        return before

    def _top(self, ranked: list[tuple[int, float]]) -> dict[str, orjson.Fragment]:
        top: dict[str, orjson.Fragment] = {}
        for token_id, logprob in [*ranked[1 : 1 + self.num_top], ranked[0]]:
            top.setdefault(name(token_id), number(logprob))
        return top


def piece(token_id: int) -> bytes:
    return PIECES[token_id] if token_id < len(PIECES) else b""


def name(token_id: int) -> str:
    try:
        return piece(token_id).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece(token_id))


def number(logprob: float) -> orjson.Fragment:
    """As `repr` writes it."""
    return orjson.Fragment(repr(max(-9999.0, logprob)))


def random_value(draw: random.Random) -> float:
    """A float32 of any size, as often as not one of those that are written in another way."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice([0.0, -0.0, -1.0, -9999.0, -10000.0, float("-inf"), float("nan"), -1e-45, -3.4e38])
    if kind == 1:
        return float(np.uint32(draw.getrandbits(31) | 1 << 31).view(np.float32))
    return float(np.float32(-draw.expovariate(1.0) * 10.0 ** draw.randint(-12, 3)))


def random_token(draw: random.Random, num_entries: int) -> TokenLogprobs:
    ids = [draw.randrange(NUM_ROWS) for _ in range(1 + num_entries)]
    if num_entries and draw.random() < 0.5:
        ids[0] = draw.choice(ids[1:])
    return draw.randint(1, 9), [(token_id, random_value(draw)) for token_id in ids]


@pytest.mark.parametrize("skip_special", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("form", ["chat", "completion"])
def test_bytes_are_the_plain_encoders(form: Any, num_top: int, skip_special: bool) -> None:
    draw = random.Random(num_top)
    encoder = LogprobsEncoder(VOCABULARY, form, num_top=num_top, skip_special_tokens=skip_special)
    plain = Plain(form, num_top, skip_special)
    for _ in range(300):
        tokens = [random_token(draw, draw.choice([num_top, num_top + 1])) for _ in range(draw.randint(0, 3))]
        encoder.add(tokens)
        plain.add(tokens)
        if draw.random() < 0.7:
            assert encoder.take() == plain.take()
    assert encoder.take() == plain.take()
    assert encoder.take() == plain.take()


def test_numbers_are_written_as_python_writes_them() -> None:
    """Over all of float32's exponents and random digits; and float64, which callers may bring."""
    draw = random.Random(5)
    bits = [sign << 31 | exponent << 23 | draw.getrandbits(23) for sign in (0, 1) for exponent in range(255)]
    values = [float(np.uint32(one).view(np.float32)) for one in bits]
    values += [draw.uniform(-30, 0) for _ in range(2000)]
    values += [-(10.0**exponent) for exponent in range(-30, 4)]
    encoder = LogprobsEncoder(VOCABULARY, "completion", num_top=0, skip_special_tokens=True)
    encoder.add([(1, [(65, value)]) for value in values])
    expected = ",".join(repr(max(-9999.0, value)) for value in values)
    assert f'"token_logprobs":[{expected}],'.encode() in encoder.take()


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r'form: "text" is neither "chat" nor "completion"'):
        LogprobsEncoder(VOCABULARY, "text", num_top=0, skip_special_tokens=True)  # type: ignore[arg-type]
    encoder = LogprobsEncoder(VOCABULARY, "chat", num_top=0, skip_special_tokens=True)
    with pytest.raises(ValueError, match=r"tokens\[1\]: without the sampled token"):
        encoder.add([(1, [(65, -1.0)]), (1, [])])
    assert encoder.take() == b'{"content":[]}', "all of it or nothing"
    for num_top in (-1, 1 << 80):
        with pytest.raises(OverflowError):
            LogprobsEncoder(VOCABULARY, "chat", num_top=num_top, skip_special_tokens=True)


# On the relay.

BEFORE, BETWEEN, AFTER = b'data: {"text":', b',"logprobs":', b"}\n\n"
NUM_COLUMNS = 21


class Batch:
    """A core whose sequences "sample" random tokens and log-probabilities."""

    def __init__(self, slab_type: Any, num_requests: int, num_top: int, **settings: Any) -> None:
        config = CoreConfig(num_blocks=4096, max_num_seqs=32, max_model_len=4096, vocab_size=NUM_ROWS)
        self.core = Core(config, VOCABULARY)
        self.slab = slab_type(self.core.layout)
        self.draw = random.Random(num_top)
        settings = {"max_tokens": 4000, "ignore_eos": True, "logprobs": num_top, **settings}
        self.handles = [self.core.submit([1, 2, 3], **settings) for _ in range(num_requests)]

    def step(self) -> Deltas:
        step_id = self.core.schedule(self.slab.buffer)
        assert step_id is not None
        for row in range(len(self.handles)):
            _, ranked = random_token(self.draw, NUM_COLUMNS - 1)
            columns = slice(NUM_COLUMNS * row, NUM_COLUMNS * (row + 1))
            self.slab["output_token"][row] = ranked[0][0]
            self.slab["output_logprob_token"][columns] = [token_id for token_id, _ in ranked]
            self.slab["output_logprob"][columns] = [value for _, value in ranked]
        return self.core.commit(step_id, self.slab.buffer)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made: list[tuple[socket.socket, socket.socket]] = [socket.socketpair() for _ in range(16)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


def drain(sock: socket.socket) -> bytes:
    """What has come."""
    data = b""
    while select.select([sock], [], [], 0)[0]:
        data += sock.recv(1 << 16)
    return data


def end(num_tokens: int) -> bytes:
    """Of an event, behind a prompt of three tokens."""
    return b',"total":%d,"output":%d}\n\n' % (3 + num_tokens, num_tokens)


class Client:
    """A stream that is attached to the relay at times and else written to by Python; beside it what it must bring."""

    def __init__(self, relay: StreamRelay, handle: int, pair: Any, *arguments: Any) -> None:
        form, num_top, skip_special = arguments
        self.relay, self.handle, (self.ours, self.theirs) = relay, handle, pair
        self.encoder = LogprobsEncoder(VOCABULARY, form, num_top=num_top, skip_special_tokens=skip_special)
        self.plain = Plain(form, num_top, skip_special)
        self.is_attached = False
        self.wire = self.expected = b""
        self.num_written = self.num_expected = 0
        """Tokens."""

    def expect(self, delta: Delta) -> None:
        self.plain.add(delta.logprobs or [])
        self.num_expected += len(delta.token_ids)
        if delta.text:
            text = BEFORE + orjson.dumps(delta.text)
            self.expected += text + BETWEEN + self.plain.take() + end(self.num_expected)

    def write(self, delta: Delta) -> None:
        """What the relay does not take."""
        assert not self.is_attached
        self.encoder.add(delta.logprobs or [])
        self.num_written += len(delta.token_ids)
        if delta.text:
            text = BEFORE + orjson.dumps(delta.text)
            self.wire += text + BETWEEN + self.encoder.take() + end(self.num_written)

    def attach(self) -> None:
        self.relay.attach(
            self.handle,
            self.ours.fileno(),
            BEFORE,
            b',"total":',
            chunked=False,
            last_token_at=0.0,
            logprobs=(BETWEEN, self.encoder),
            usage=(b',"output":', b"}\n\n", 3, self.num_written),
        )
        self.is_attached = True

    def detach(self) -> None:
        unsent, num_tokens, _ = self.relay.detach(self.handle) or (b"", 0, 0.0)
        self.wire += drain(self.theirs) + unsent
        self.num_written += num_tokens
        self.is_attached = False

    def read(self) -> None:
        if self.is_attached:
            self.wire += drain(self.theirs)


@pytest.mark.parametrize("skip_special", [False, True])
@pytest.mark.parametrize("num_top", [0, 2, 20])
@pytest.mark.parametrize("form", ["chat", "completion"])
def test_the_relay_writes_the_same(
    slab_type: Any, pairs: Any, form: Any, num_top: int, skip_special: bool
) -> None:
    """Lanes that come and go amid characters: what Python writes in between goes on where they have left off."""
    relay, draw = StreamRelay((1.0,)), random.Random(1)
    batch = Batch(slab_type, len(pairs), num_top, skip_special_tokens=skip_special)
    clients = {
        handle: Client(relay, handle, pair, form, num_top, skip_special)
        for handle, pair in zip(batch.handles, pairs, strict=True)
    }
    for _ in range(150):
        deltas = batch.step()
        for delta in deltas:
            clients[delta.request].expect(delta)
        for delta in relay.deliver(deltas, 1.0):
            clients[delta.request].write(delta)
        more = draw.random() < 0.5  # else several steps go in one write
        while more:
            stalled, more = relay.send(1.0)
            assert not stalled
            for client in clients.values():
                client.read()
        for client in clients.values():
            if draw.random() < 0.1:
                client.detach() if client.is_attached else client.attach()
    for client in clients.values():
        if client.is_attached:
            client.detach()
        assert client.wire == client.expected
        assert client.encoder.take() == client.plain.take(), "tokens that no text has followed"


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_a_socket_that_takes_no_more(slab_type: Any, pairs: Any, form: Any) -> None:
    """What has come meanwhile is one event, with the log-probabilities of all its tokens."""
    (ours, theirs), *_ = pairs
    relay, batch = StreamRelay((1.0,)), Batch(slab_type, 1, 20, skip_special_tokens=True)
    encoder = LogprobsEncoder(VOCABULARY, form, num_top=20, skip_special_tokens=True)
    relay.attach(
        batch.handles[0],
        ours.fileno(),
        BEFORE,
        AFTER,
        chunked=False,
        last_token_at=0.0,
        logprobs=(BETWEEN, encoder),
    )
    whole, tokens, num_later, stalled = "", [], 0, False
    while num_later < 20:
        deltas = batch.step()
        for delta in deltas:
            whole += delta.text
            tokens += delta.logprobs or []
        relay.deliver(deltas, 1.0)
        stalled = relay.send(1.0)[0] == batch.handles or stalled
        num_later += stalled
    unsent, num_tokens, _ = relay.detach(batch.handles[0]) or (b"", 0, 0.0)
    assert num_tokens == len(tokens)
    events = [event.removeprefix(b"data: ") for event in (drain(theirs) + unsent).split(b"\n\n")[:-1]]
    assert "".join(orjson.loads(event)["text"] for event in events) == whole
    list_name = "content" if form == "chat" else "tokens"
    assert len(orjson.loads(events[-1])["logprobs"][list_name]) >= 10, "merged"
    shown: list[Any] = []
    for value in [*(orjson.loads(event)["logprobs"] for event in events), orjson.loads(encoder.take())]:
        shown += value[list_name]
    plain = Plain(form, 20, skip_special=True)
    plain.add(tokens)
    assert shown == orjson.loads(plain.take())[list_name]


def test_a_lane_that_shows_none_leaves_them_to_others(slab_type: Any, pairs: Any) -> None:
    relay, batch = StreamRelay((1.0,)), Batch(slab_type, 1, 0)
    relay.attach(batch.handles[0], pairs[0][0].fileno(), BEFORE, AFTER, chunked=False, last_token_at=0.0)
    (delta,) = relay.deliver(batch.step(), 1.0)
    assert delta.logprobs is not None
    assert relay.detach(batch.handles[0]) == (b"", 0, 0.0)
