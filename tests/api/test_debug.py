"""The live view: only where it was asked for, behind the key, and true."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.api.app import DEBUG_ROUTES
from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.engine.stacks import MAX_TASKS, describe_stacks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SCHEDULER, EXPERTS, STACKS = "/debug/scheduler", "/debug/experts", "/debug/stacks"
KEY = "the-key"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@asynccontextmanager
async def served(serve: Any, settings: Any = None, **server: Any) -> AsyncIterator[Any]:
    """A server over the null executor."""
    config = EngineConfig.from_flat(
        {"executor": "null", "null_step_ms": 1.0, "max_num_seqs": 4, **(settings or {})}
    )
    async with (
        AsyncEngine(config) as engine,
        serve(engine, **{"enable_debug_endpoints": True, "shutdown_timeout": 0.0, **server}) as found,
    ):
        yield found


def read_slowly(server: Any, count: int, **body: Any) -> list[asyncio.Task[Any]]:
    """Streams that run for long."""
    body = {"prompt": "secret", "max_tokens": 4000, "ignore_eos": True, **body}
    return [asyncio.create_task(server.stream("/v1/completions", body)) for _ in range(count)]


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def view_when(server: Any, is_there: Any) -> Any:
    async with asyncio.timeout(10):
        while True:
            _, text = await server.get(SCHEDULER)
            view = json.loads(text)
            if is_there(view):
                return view
            await asyncio.sleep(0.005)


def test_routes() -> None:
    assert {path for _, path, _ in DEBUG_ROUTES} == {SCHEDULER, EXPERTS, STACKS}


@pytest.mark.parametrize("path", [SCHEDULER, EXPERTS, STACKS, SCHEDULER + "?format=html"])
async def test_without_the_switch_there_is_nothing(server: Any, path: str) -> None:
    status, text = await server.get(path)
    assert (status, json.loads(text)["error"]["message"]) == (404, "There is no such route.")


async def test_tokens_of_experts(serve: Any, tiny_sparse_model: Any) -> None:
    """Every token that is computed, prompts' and generated ones', is sent to top_k experts of each sparse layer."""
    settings = {
        "model": str(tiny_sparse_model),
        "load_format": "dummy",
        "device": "cpu",
        "expert_statistics": True,
    }
    config = EngineConfig.from_flat(settings | {"num_gpu_blocks_override": 64, "max_num_seqs": 4})
    async with AsyncEngine(config) as engine, serve(engine, enable_debug_endpoints=True) as server:
        body = {"prompt": "abcdefg", "max_tokens": 5, "ignore_eos": True}
        assert (await server.post("/v1/completions", body))[0] == 200
        status, text = await server.get(EXPERTS)
    view = json.loads(text)
    assert (status, view["counted"], [entry["layer"] for entry in view["layers"]]) == (200, True, [1])
    (tokens,) = (entry["tokens"] for entry in view["layers"])
    # The last token is not computed; a step more may be on its way when the request ends.
    assert (len(tokens), sum(tokens) in (2 * (7 + 4), 2 * (7 + 5))) == (4, True)


async def test_tokens_of_experts_where_none_are_counted(serve: Any) -> None:
    async with served(serve) as server:
        status, text = await server.get(EXPERTS)
    assert (status, json.loads(text)) == (200, {"counted": False, "layers": []})


@pytest.mark.parametrize("path", [SCHEDULER, EXPERTS, STACKS])
async def test_the_key_is_asked_for(serve: Any, path: str) -> None:
    async with served(serve, api_key=KEY) as server:
        for headers in ({}, HTML, {"Authorization": "Bearer wrong"}):
            assert (await server.get(path, headers=headers))[0] == 401
        assert (await server.get(path, headers={"Authorization": f"Bearer {KEY}"}))[0] == 200
        assert (await server.post(path, headers={"Authorization": f"Bearer {KEY}"}))[0] == 405


async def test_an_idle_engine(serve: Any) -> None:
    async with served(serve) as server:
        status, text = await server.get(SCHEDULER)
        view = json.loads(text)
        assert (status, view["state"], view["num_running"]) == (200, "ready", 0)
        assert (view["running"], view["waiting"], view["steps"]) == ([], [], [])
        kv = view["kv"]
        assert kv["num_free"] == kv["num_blocks"] == 65_536
        assert kv["map"] == "." * 1024
        assert kv["blocks_per_letter"] == 64
        assert set(kv["letters"]) == set(".cus")


async def test_what_runs_and_what_waits(serve: Any) -> None:
    async with served(serve) as server:
        tasks = read_slowly(server, 6, request_id="my-own-name")
        view = await view_when(server, lambda view: view["num_running"] == 4 and view["num_waiting"] == 2)
        assert [row["request_id"] for row in view["running"]] == ["my-own-name"] * 4
        assert sorted(row["slot"] for row in view["running"]) == [0, 1, 2, 3]
        assert all(row["num_prompt_tokens"] == 6 and row["max_tokens"] == 4000 for row in view["running"])
        assert all(row["num_owed_tokens"] in (0, 1) and row["age_s"] > 0 for row in view["running"])
        first, second = view["waiting"]
        assert first["waits_for"] == {
            "what": "slots", "needed": 1, "available": 0, "of_request": None, "of_index": None,
        }  # fmt: skip
        assert second["waits_for"]["what"] == "turn"
        assert second["waits_for"]["of_request"] == first["request"]
        view = await view_when(server, lambda view: len(view["steps"]) == 64)
        assert [step["step_id"] for step in view["steps"]] == list(
            range(view["num_steps"] - 63, view["num_steps"] + 1)
        )
        assert view["steps"][0]["took_s"] >= 0.001
        assert sum(step["took_s"] is None for step in view["steps"]) <= 2
        assert "u" in view["kv"]["map"] or view["kv"]["num_used"] < 64
        assert "secret" not in json.dumps(view)
        await ended(tasks)
        await view_when(server, lambda view: not view["num_running"] and not view["num_waiting"])


async def test_who_waits_for_blocks_and_who_was_preempted(serve: Any) -> None:
    settings = {"num_gpu_blocks_override": 20, "block_size": 4, "max_model_len": 80}
    async with served(serve, settings) as server:
        body = {"prompt": "secret", "max_tokens": 60, "ignore_eos": True}

        async def again() -> None:
            while True:
                await server.stream("/v1/completions", body)

        tasks = [asyncio.create_task(again()) for _ in range(4)]
        view = await view_when(
            server, lambda view: any(row["waits_for"]["what"] == "blocks" for row in view["waiting"])
        )
        reason = next(row["waits_for"] for row in view["waiting"] if row["waits_for"]["what"] == "blocks")
        assert reason["needed"] > reason["available"]
        view = await view_when(server, lambda view: view["num_preemptions"] > 0)
        assert len(view["kv"]["map"]) == 20
        await ended(tasks)


async def test_the_lists_are_bounded(serve: Any) -> None:
    async with served(serve, {"max_num_seqs": 256, "null_step_ms": 5.0}) as server:
        tasks = read_slowly(server, 4, n=100)
        view = await view_when(server, lambda view: view["num_running"] >= 200)
        assert len(view["running"]) == 100
        await ended(tasks)


async def test_json_or_a_page(serve: Any) -> None:
    async with served(serve) as server:

        async def kind(path: str, headers: Any = None) -> tuple[int, str]:
            async with server.session.get(server.url + path, headers=headers) as reply:
                assert reply.status != 200 or reply.headers["Cache-Control"] == "no-store"
                return reply.status, reply.headers["Content-Type"].partition(";")[0]

        assert await kind(SCHEDULER) == (200, "application/json")
        assert await kind(SCHEDULER, {"Accept": "application/json"}) == (200, "application/json")
        assert await kind(SCHEDULER, HTML) == (200, "text/html")
        assert await kind(SCHEDULER + "?format=html") == (200, "text/html")
        assert await kind(SCHEDULER + "?format=json", HTML) == (200, "application/json")
        assert (await kind(SCHEDULER + "?format=xml"))[0] == 400


async def test_the_page_runs_nothing_but_its_own_script(serve: Any) -> None:
    async with served(serve) as server:
        nonces = set()
        for _ in range(2):
            async with server.session.get(server.url + SCHEDULER, headers=HTML) as reply:
                policy, text = reply.headers["Content-Security-Policy"], await reply.text()
            found = set(re.findall(r'nonce="([^"]+)"', text))
            assert len(found) == 1
            (nonce,) = found
            assert f"default-src 'none'; script-src 'nonce-{nonce}'" in policy
            nonces.add(nonce)
            assert "innerHTML" not in text
            assert "http" not in text.lower().replace("http-equiv", "").replace('http " + reply.status', "")
        assert len(nonces) == 2


def test_the_page_shows_every_field_that_it_names() -> None:
    """What the script reads of a row, a step or the whole is in the snapshot's types, or was added beside it."""
    from oneloop.api.debug_page import page
    from oneloop_core import snapshot

    text = page("x")
    row_fields = set(re.findall(r"\b(?:r|row)\.(\w+)", text))
    known = {
        "request_id",
        *snapshot.RunningSequence.__annotations__,
        *snapshot.WaitingSequence.__annotations__,
    }
    assert row_fields <= known
    assert len(row_fields) > 12
    assert set(re.findall(r"\bstep\.(\w+)", text)) <= set(snapshot.StepSummary.__annotations__)
    shown = text.split("({what,", 1)[1].split("})[what]", 1)[0]
    whats = set(re.findall(r"^  (\w+): ", shown, re.MULTILINE))
    assert whats == set(snapshot.WaitsFor.__annotations__["what"].__args__)


async def test_stacks(serve: Any) -> None:
    async with served(serve) as server:
        tasks = read_slowly(server, 4)
        await view_when(server, lambda view: view["num_running"] == 4)
        async with server.session.get(server.url + STACKS) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            text = await reply.text()
        await ended(tasks)
    assert "(this one: the event loop's)\n    oneloop.engine.stacks:" in text
    assert re.search(r"^    oneloop\.api\.handlers\.debug:\d+ stacks$", text, re.MULTILINE)
    loop_task = r"^task oneloop-step-loop\n(    .*\n)*    oneloop\.engine\.loop:\d+ StepLoop\.run$"
    assert re.search(loop_task, text, re.MULTILINE)
    assert re.search(r"^thread oneloop-intake|^thread MainThread", text, re.MULTILINE)
    assert re.search(r"^task .* and 3 more\n(    .*\n)+", text, re.MULTILINE), "equal stacks stand together"
    assert "/" not in re.sub(r"^thread .*|^task .*", "", text, flags=re.MULTILINE), "no paths of this machine"


async def test_stacks_of_threads_and_of_many_tasks() -> None:
    release = threading.Event()

    def waiting_here() -> None:
        release.wait()

    thread = threading.Thread(target=waiting_here, name="a-thread")
    thread.start()

    async def inner() -> None:
        await asyncio.sleep(60)

    async def outer() -> None:
        await inner()

    tasks = [asyncio.create_task(outer()) for _ in range(MAX_TASKS + 50)]
    await asyncio.sleep(0)
    text = describe_stacks()
    release.set()
    thread.join()
    await ended(tasks)
    assert re.search(r"thread a-thread\n(    .*\n)*    \S+:\d+ \S*waiting_here\n", text)
    assert f"{MAX_TASKS + 51} tasks, {MAX_TASKS} of them looked at" in text
    places = r"    <\w+>\n    asyncio\.tasks:\d+ sleep\n    \S+ \S*inner\n    \S+ \S*outer\n"
    assert re.search(r"task .* and 1\d\d\d more\n" + places, text)
    assert len(text) < 20_000
