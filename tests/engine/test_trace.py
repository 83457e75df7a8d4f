"""Schedule traces of engines over the null executor: recorded beside serving, replayed exactly, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import stat
import threading
import time
import zlib

import pytest

from oneloop import AsyncEngine, SamplingParams
from oneloop.config import EngineConfig
from oneloop.engine.params import BeamSearch
from oneloop.engine.trace import TraceRecording, replay_trace
from oneloop.errors import ConfigError, TraceFileError
from oneloop_core import Core, CoreConfig

SECRET = "the quick brown fox jumps over the lazy dog and on and on"


def make_config(path, **settings):
    """A pool that is too small for what runs."""
    return EngineConfig.from_flat(
        {
            "executor": "null", "max_num_seqs": 12, "max_num_batched_tokens": 48, "block_size": 4,
            "num_gpu_blocks_override": 55, "max_model_len": 200, "record_trace": str(path), **settings,
        }
    )  # fmt: skip


async def random_load(engine, source, num_requests):
    """Shared prefixes, several turns, n > 1, beams, stops, priorities, salts, readers that leave."""
    takes_priority = engine.config.scheduler.scheduling_policy == "priority"

    async def one():
        await asyncio.sleep(source.random() * 0.005)
        prompt = SECRET[: source.randint(1, len(SECRET))] + "".join(
            source.choices("xyz", k=source.randint(0, 20))
        )
        params = SamplingParams(
            max_tokens=source.randint(20, 80), n=source.choice([1, 1, 1, 3]), temperature=source.choice([0.0, 1.0]),
            stop=source.choice([[], [], [], ["e", "th"]]), stop_token_ids=source.choice([[], [], [ord("q")]]),
            min_tokens=source.choice([0, 0, 10]), seed=source.choice([None, 1]),
            repetition_penalty=source.choice([1.0, 1.2]), logprobs=source.choice([None, 2]),
        )  # fmt: skip
        if source.random() < 0.15:
            search = BeamSearch(
                length_penalty=source.choice([0.0, 1.0, -1.0]),
                early_stopping=source.choice([False, True, "never"]),
            )
            params = SamplingParams(
                max_tokens=source.randint(2, 9), n=source.randint(2, 3), beam_search=search
            )
        options = {"cache_salt": source.choice(["", "", "pepper"])}
        if takes_priority:
            options["priority"] = source.randint(0, 2)
        num_read, leaves_after = 0, source.choice([None, None, None, 5])
        async with await engine.submit(prompt, params, final_only=source.random() < 0.2, **options) as stream:
            text = ""
            async for deltas in stream:
                text += "".join(delta.text for delta in deltas)
                num_read += 1
                if takes_priority and num_read == 3:
                    engine.set_priority(stream.request_id, source.randint(-2, 2))
                if num_read == leaves_after:
                    return
        if params.n == 1 and source.random() < 0.5 and len(prompt + text) < 150:
            follow_up = SamplingParams(max_tokens=8, ignore_eos=True)
            async for _ in engine.generate(prompt + text + " and?", follow_up, **options):
                pass

    await asyncio.gather(*[one() for _ in range(num_requests)])


async def record(path, seed, **settings):
    """Statistics of a recorded run."""
    async with AsyncEngine(make_config(path, **settings)) as engine:
        await random_load(engine, random.Random(seed), 60)
        engine.reset_prefix_cache()
        return engine.stats()


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (1, {}),
        (2, {"scheduling_policy": "priority"}),
        (3, {"enable_prefix_caching": False}),
        (4, {"mixed_step_tokens": 16, "null_step_ms": 0.3}),
        (5, {"block_size": 1, "num_gpu_blocks_override": 220}),
    ],
)
async def test_a_random_run_is_replayed_exactly(tmp_path, seed, settings):
    stats = await record(tmp_path / "trace", seed, **settings)
    report = replay_trace(tmp_path / "trace")
    assert (report.difference, report.problem) == (None, None)
    replay = report.replay
    assert replay.end == "the engine was shut down"
    assert replay.num_steps == stats.num_steps > 100
    assert replay.num_preemptions > 0
    assert stats.num_aborted > 3
    assert stats.num_finished_stop > 3
    if settings.get("enable_prefix_caching", True):
        assert stats.num_prefix_hit_tokens > 100


async def test_the_file_holds_no_text_and_is_its_owner_s(tmp_path):
    """Neither as letters nor as the letters' token ids, which are bytes here; the same text twice looks different."""
    path = tmp_path / "trace"
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    contents = []
    for _ in range(2):
        async with AsyncEngine(make_config(path)) as engine:
            async for _ in engine.generate(SECRET, params):
                pass
        contents.append(path.read_bytes())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)  # as an older file may be
    assert contents[0] != contents[1]
    assert all(SECRET[start : start + 4].encode() not in contents[0] for start in range(len(SECRET) - 4))


async def test_an_older_trace_is_kept(tmp_path):
    """Of one that was started again after a crash; what is empty or no file is not."""
    path, previous = tmp_path / "trace", tmp_path / "trace.previous"
    path.touch()
    for content in (None, b"of the crash"):
        if content is not None:
            path.write_bytes(content)
        engine = AsyncEngine(make_config(path))
        await engine.start()
        await engine.shutdown()
        assert replay_trace(path).is_identical
        assert previous.exists() == (content is not None)
    assert previous.read_bytes() == b"of the crash"
    link = tmp_path / "link"
    link.symlink_to(path)
    engine = AsyncEngine(make_config(link))
    await engine.start()
    await engine.shutdown()
    assert link.is_symlink()


async def test_until_and_lines(tmp_path):
    await record(tmp_path / "trace", 6)
    lines: list[str] = []
    report = replay_trace(tmp_path / "trace", until=20, show=lines.append)
    assert report.replay.num_steps == 20
    assert report.replay.end is None
    assert lines[-1].startswith("step 20: ")
    assert any("admits 1.0 to slot 0" in line for line in lines)
    assert any(line.startswith("submit 1: ") for line in lines)
    silent = replay_trace(tmp_path / "trace", until=20)
    assert silent.replay.num_events == report.replay.num_events


async def test_a_long_trace_is_replayed_in_slices(tmp_path, monkeypatch):
    stats = await record(tmp_path / "trace", 10)
    monkeypatch.setattr("oneloop.engine.trace._SLICE_STEPS", 7)
    for until, expected in ((None, stats.num_steps), (20, 20), (21, 21), (10**9, stats.num_steps)):
        report = replay_trace(tmp_path / "trace", until=until)
        assert report.is_identical
        assert report.replay.num_steps == expected
        assert (report.replay.end is None) == (expected < stats.num_steps)


async def test_another_pool_decides_otherwise(tmp_path):
    """The sizes are in the file's head: with others in their place the first different decision is named."""
    await record(tmp_path / "trace", 7)
    content = bytearray((tmp_path / "trace").read_bytes())
    head = content.index(b"0.1.0") + 5
    assert content[head] == 55
    content[head] = 52
    payload_len = int.from_bytes(content[12:16], "little")
    content[16:20] = zlib.crc32(content[20 : 20 + payload_len]).to_bytes(4, "little")
    (tmp_path / "trace").write_bytes(content)
    report = replay_trace(tmp_path / "trace")
    assert report.problem is None
    assert report.difference is not None
    assert report.difference.step_id > 1
    assert report.difference.expected != report.difference.got


async def test_a_trace_that_was_cut_off_is_replayed_up_to_there(tmp_path):
    await record(tmp_path / "trace", 8)
    content = (tmp_path / "trace").read_bytes()
    (tmp_path / "trace").write_bytes(content[:-1])
    report = replay_trace(tmp_path / "trace")
    assert report.problem is not None
    assert "cut off at byte" in report.problem
    assert report.difference is None
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 4
    (tmp_path / "trace").write_bytes(damaged)
    assert "damaged in the frame at byte" in (replay_trace(tmp_path / "trace").problem or "")


def test_what_is_no_trace(tmp_path):
    with pytest.raises(TraceFileError, match="No such file"):
        replay_trace(tmp_path / "none")
    (tmp_path / "text").write_text("hello, world")
    with pytest.raises(TraceFileError, match="no schedule trace"):
        replay_trace(tmp_path / "text")
    with pytest.raises(TraceFileError, match="directory"):
        replay_trace(tmp_path)


async def test_a_file_that_cannot_be_made(tmp_path):
    engine = AsyncEngine(make_config(tmp_path / "none" / "trace"))
    with pytest.raises(ConfigError, match=r"record_trace: cannot write .*No such file"):
        await engine.start()
    await engine.shutdown()


async def test_a_full_disk_ends_the_trace_and_nothing_else(caplog):
    caplog.set_level(logging.INFO)
    stats = await record("/dev/full", 9)
    assert stats.num_submitted > 60
    (line,) = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    assert "No space left on device" in line
    assert "serving goes on without it" in line


def test_a_disk_that_is_too_slow_ends_the_trace(tmp_path, caplog):
    """A pipe that nobody reads stands in for it; the core is never held up."""
    caplog.set_level(logging.INFO)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    core = Core(CoreConfig(num_blocks=1 << 16, vocab_size=1000, max_model_len=20_000))
    recording = TraceRecording(core, str(pipe))
    longest = 0.0
    for first in range(1300):  # of 64 KB each; the pipe takes 64 KB, the queue 64 MB
        core.submit([first % 1000, first // 1000, *range(1000)] * 15, max_tokens=1)
        begin = time.thread_time()
        core.drain()
        longest = max(longest, time.thread_time() - begin)
    assert longest < 0.02
    assert core.stats().num_waiting == 1300
    os.set_blocking(reader, True)
    drained = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reader, 1 << 20), b"")])
    drained.start()
    recording.close()
    drained.join(10)
    os.close(reader)
    (line,) = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    assert "the disk did not keep up" in line


async def test_a_failed_step_and_a_panic_free_end(tmp_path, kit):
    """Another executor: steps that fail are in the trace too."""
    path = tmp_path / "trace"
    executor = kit.FakeExecutor(num_blocks=30, fail_on=lambda step: step % 9 == 8)
    async with kit.running_engine(executor, record_trace=str(path)) as engine:

        async def one(number):
            try:
                async for _ in engine.generate(
                    f"{SECRET[:30]} {number}", SamplingParams(max_tokens=20, ignore_eos=True)
                ):
                    pass
            except Exception as error:
                assert "failed" in str(error)  # noqa: PT017

        for _ in range(3):
            await asyncio.gather(*[one(number) for number in range(6)])
        assert engine.stats().num_errored > 0
    lines: list[str] = []
    report = replay_trace(path, show=lines.append)
    assert (report.difference, report.problem) == (None, None)
    assert any(line.endswith(" failed") for line in lines)
