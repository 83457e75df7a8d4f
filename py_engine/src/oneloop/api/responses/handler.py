"""/v1/responses: create, look up, cancel, delete."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from oneloop.api.errors import bad_request, told
from oneloop.api.handlers.generation import check_delta, submit_all
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.handlers.render import rendered
from oneloop.api.handlers.streaming import stream_reply
from oneloop.api.protocol.fields import Fields
from oneloop.api.responses.prepare import prepare_response
from oneloop.api.responses.request import read_response_request
from oneloop.api.state import REQUEST_ID, STATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.api.handlers.generation import Job
    from oneloop.api.responses.prepare import Prepared
    from oneloop.api.responses.store import StoredResponse
    from oneloop.api.state import ApiState, TextState


async def create_response(request: web.Request) -> web.StreamResponse:
    """One conversation, one answer: whole, streamed, or in the background."""
    state = request.app[STATE]
    fields = Fields(await state.bodies.read_object(request))
    asked = read_response_request(fields, state.limits, state.engine.default_sampling)
    if asked.scheduling.request_id is not None:
        request[REQUEST_ID] = asked.scheduling.request_id
    request_id = request[REQUEST_ID]
    prepared: Prepared | None = None
    try:
        with state.arrivals.one():
            prepared = await prepare_response(state, asked, fields, state.owners.of(request))
            del fields  # an answer may take long, and a conversation may be megabytes
            job = prepared.job
            prepared.begin(request_id)
            await submit_all(state, job.streams, job, request_id)
        if asked.background:
            alone, prepared = prepared, None  # it has its own end
            return _in_background(state, alone, request_id)
        if asked.stream.stream:
            return await stream_reply(request, job.streams, job)
        await _run(state, prepared)
        return json_reply(prepared.response.wire(), job.headers)
    except ConnectionError:
        raise
    except Exception as error:
        if prepared is not None:
            prepared.fail(told(error, request_id))
        raise
    finally:
        if prepared is not None:
            prepared.abandon()


async def render_response(request: web.Request) -> web.StreamResponse:
    """What a request comes to, without running it: as the other /render routes."""
    served = request.app[STATE]
    owner = served.owners.of(request)

    async def prepare(
        state: TextState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
    ) -> Job:
        fields = Fields(members)
        asked = read_response_request(fields, served.limits, served.engine.default_sampling)
        if asked.scheduling.request_id is not None:
            rename(asked.scheduling.request_id)
        return (await prepare_response(served, asked, fields, owner)).job

    job, bodies = await rendered(request, await served.bodies.read_object(request), prepare, "resp")
    return json_reply(bodies[0], job.headers)


async def show_response(request: web.Request) -> web.StreamResponse:
    """A stored response, as far as it has come."""
    entry = _find(request)
    if request.query.get("stream", "false") not in ("false", "0"):
        raise bad_request("stream", "stream is not supported here; ask again until the status is final")
    return web.Response(body=entry.body, content_type="application/json")


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """End a response that runs; what it has come to stays stored."""
    entry = _find(request)
    if entry.cancel is None:
        if orjson.loads(entry.body)["status"] != "cancelled":
            raise bad_request("response_id", "this response has ended; there is nothing to cancel")
        return web.Response(body=entry.body, content_type="application/json")
    entry.cancel()
    return json_reply({**orjson.loads(entry.body), "status": "cancelled"})


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Forget a response; one that runs is ended."""
    entry = _find(request)
    if entry.cancel is not None:
        entry.cancel()
    request.app[STATE].responses.delete(entry)
    return json_reply({"id": entry.id, "object": "response", "deleted": True})


def _find(request: web.Request) -> StoredResponse:
    state = request.app[STATE]
    return state.responses.find(request.match_info["response_id"], state.owners.of(request), "response_id")


def _in_background(state: ApiState, prepared: Prepared, request_id: str) -> web.StreamResponse:
    """Answer at once; it runs on whatever becomes of the client."""
    task = asyncio.create_task(_run_alone(state, prepared, request_id), name="oneloop-background-response")
    state.background.add(task)
    task.add_done_callback(state.background.discard)
    return json_reply(prepared.response.wire(), prepared.job.headers)


async def _run_alone(state: ApiState, prepared: Prepared, request_id: str) -> None:
    try:
        await _run(state, prepared)
    except Exception as error:  # there is nobody to be told but who asks for it later
        prepared.fail(told(error, request_id))
    finally:
        prepared.abandon()


async def _run(state: ApiState, prepared: Prepared) -> None:
    """A whole reply: its events, of which only what they add up to is kept. ApiError when the sequence failed."""
    job = prepared.job
    stream, encoder = job.streams[0], job.make_encoder()
    if job.logprobs is None:
        deltas = await stream.all_deltas()
    else:
        # Step by step: else the log-probabilities of a long reply would be encoded in one go, on the loop.
        deltas = await stream.next_deltas()
    while deltas:
        for delta in deltas:
            check_delta(state, stream, delta)
            encoder.encode(0, delta)
        deltas = await stream.next_deltas()
    job.usage.completion_tokens = stream.num_generated_tokens
    job.usage.cached_tokens = stream.num_cached_tokens
    encoder.closing()
