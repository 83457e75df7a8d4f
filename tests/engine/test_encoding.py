"""Tokenising in batches: what comes together goes together, and each request gets its own result or its own error."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from oneloop.engine.encoding import BATCH, LONG_CHARS, Encoding, in_thread
from oneloop.errors import EngineClosedError, RequestError


class Recorder:
    """A tokenizer of bytes that notes its calls; "bad" texts are refused, and the gates hold it up."""

    def __init__(self):
        self.batches = []
        self.singles = []
        self.has_begun = threading.Event()
        self.gate, self.single_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.single_gate.set()

    def encode(self, text, *, add_special_tokens=True):
        self.singles.append(text)
        self.single_gate.wait(5)
        if "bad" in text:
            raise RequestError("prompt", f"{text} is refused")
        return [*text.encode(), int(add_special_tokens)]

    def encode_batch(self, texts, *, add_special_tokens=True):
        self.has_begun.set()
        self.gate.wait(5)
        if texts:
            self.batches.append(len(texts))
        if any("bad" in text for text in texts):
            raise RequestError("prompt", "one of them is refused")
        return [[*text.encode(), int(add_special_tokens)] for text in texts]


@pytest.fixture
def tokenizer():
    return Recorder()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def encoding(tokenizer, threads):
    return Encoding(tokenizer, threads)


async def test_what_comes_in_one_turn_goes_together(encoding, tokenizer):
    found = await asyncio.gather(
        *(encoding.encode(f"text {number}", add_special_tokens=number % 2 == 0) for number in range(10))
    )
    assert found == [[*f"text {number}".encode(), int(number % 2 == 0)] for number in range(10)]
    assert tokenizer.batches == [5, 5]


async def test_what_comes_meanwhile_is_the_next_batch(encoding, tokenizer):
    tokenizer.gate.clear()
    first = asyncio.create_task(encoding.encode("first", add_special_tokens=True))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(encoding.encode("x" * n, add_special_tokens=True)) for n in range(1, 41)]
    await asyncio.sleep(0.01)
    assert not first.done()
    tokenizer.gate.set()
    assert await first == [*b"first", 1]
    assert [len(found) - 1 for found in await asyncio.gather(*others)] == list(range(1, 41))
    assert tokenizer.batches == [1, BATCH, BATCH, 40 - 2 * BATCH]


async def test_a_text_that_is_refused_spoils_no_other(encoding):
    found = await asyncio.gather(
        *(encoding.encode(text, add_special_tokens=False) for text in ("a", "bad b", "c", "bad d")),
        return_exceptions=True,
    )
    assert (found[0], found[2]) == ([97, 0], [99, 0])
    assert [str(error) for error in (found[1], found[3])] == ["bad b is refused", "bad d is refused"]
    assert await encoding.encode("e", add_special_tokens=False) == [101, 0]


class Broken(Recorder):
    """Returns nothing for texts that come together."""

    def encode_batch(self, texts, *, add_special_tokens=True):
        return []


async def test_a_tokenizer_that_is_broken_leaves_nobody_waiting(threads):
    encoding = Encoding(Broken(), threads)
    async with asyncio.timeout(5):
        found = await asyncio.gather(
            *(encoding.encode("x", add_special_tokens=True) for _ in range(2 * BATCH)), return_exceptions=True
        )
    assert {type(error) for error in found} == {ValueError}


async def test_a_long_text_goes_alone_and_holds_nobody_up(encoding, tokenizer):
    tokenizer.gate.clear()
    waiting = asyncio.create_task(encoding.encode("short", add_special_tokens=True))
    long = await asyncio.wait_for(encoding.encode("y" * (LONG_CHARS + 1), add_special_tokens=True), 5)
    assert len(long) == LONG_CHARS + 2
    assert tokenizer.batches == []
    tokenizer.gate.set()
    assert await waiting == [*b"short", 1]


async def test_long_texts_leave_a_thread_to_the_short_ones(encoding, tokenizer):
    tokenizer.single_gate.clear()
    long = [
        asyncio.create_task(encoding.encode("y" * (LONG_CHARS + 1), add_special_tokens=True))
        for _ in range(3)
    ]
    short = await asyncio.wait_for(encoding.encode("short", add_special_tokens=True), 2)
    assert short == [*b"short", 1]
    assert len(tokenizer.singles) <= 1
    tokenizer.single_gate.set()
    assert [len(found) for found in await asyncio.gather(*long)] == [LONG_CHARS + 2] * 3


async def test_requests_that_leave(encoding, tokenizer):
    """Waiting or on their way: nobody else notices, and what is not on its way yet costs nothing."""
    tokenizer.gate.clear()
    under_way = asyncio.create_task(encoding.encode("under way", add_special_tokens=True))
    await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(encoding.encode("waiting", add_special_tokens=True)) for _ in range(5)]
    stays = asyncio.create_task(encoding.encode("stays", add_special_tokens=True))
    await asyncio.sleep(0.01)
    for task in (under_way, *waiting):
        task.cancel()
    await asyncio.sleep(0.01)
    tokenizer.gate.set()
    assert await stays == [*b"stays", 1]
    assert tokenizer.batches == [1, 1]


async def test_threads_that_were_shut_down(tokenizer):
    """What has begun is finished; all others hear of it at once, however many they are."""
    threads = ThreadPoolExecutor(1)
    encoding = Encoding(tokenizer, threads)
    tokenizer.gate.clear()
    running = asyncio.create_task(encoding.encode("running", add_special_tokens=True))
    await asyncio.to_thread(tokenizer.has_begun.wait, 5)
    texts = ["waiting"] * (2 * BATCH) + ["y" * (LONG_CHARS + 1)] * 2
    waiting = [asyncio.create_task(encoding.encode(text, add_special_tokens=True)) for text in texts]
    rendering = asyncio.create_task(in_thread(threads, lambda: "rendered"))
    await asyncio.sleep(0)
    threads.shutdown(wait=False, cancel_futures=True)
    tokenizer.gate.set()
    assert await running == [*b"running", 1]
    async with asyncio.timeout(5):
        found = await asyncio.gather(*waiting, rendering, return_exceptions=True)
    assert {type(error) for error in found} == {EngineClosedError}
    with pytest.raises(EngineClosedError, match="shut down"):
        await encoding.encode("later", add_special_tokens=True)
    assert tokenizer.singles == []


async def test_who_is_cancelled_while_a_thread_works_is_cancelled(threads):
    gate = threading.Event()
    task = asyncio.create_task(in_thread(threads, lambda: gate.wait(5)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()


def test_a_loop_that_ends_first(tokenizer, threads, caplog):
    async def leave():
        tokenizer.gate.clear()
        asyncio.get_running_loop().create_task(
            Encoding(tokenizer, threads).encode("x", add_special_tokens=True)
        )
        await asyncio.sleep(0.01)

    asyncio.run(leave())
    tokenizer.gate.set()
    threads.shutdown()
    assert tokenizer.batches == [1]
    assert caplog.text == ""
