"""/render: what a request comes to, without running it: the body of a POST to /inference/v1/generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.api.handlers.chat import prepare_chat
from oneloop.api.handlers.completions import prepare_completion
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.protocol.generate import PASSED_ON, sampling_wire
from oneloop.api.state import REQUEST_ID, TEXT

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.handlers.generation import Job, PrepareText
    from oneloop.api.state import TextState
    from oneloop.engine.params import ResolvedParams


async def render_chat(request: web.Request) -> web.StreamResponse:
    """A chat request → one body."""
    members = await request.app[TEXT].bodies.read_object(request)
    return await _render_one(request, members, prepare_chat, "chatcmpl")


async def render_completion(request: web.Request) -> web.StreamResponse:
    """A completion request → a list of bodies, one per prompt."""
    members = await request.app[TEXT].bodies.read_object(request)
    return await _render_all(request, members, prepare_completion, "cmpl")


async def render(request: web.Request) -> web.StreamResponse:
    """Either of them, by what is in the body."""
    members = await request.app[TEXT].bodies.read_object(request)
    if "messages" in members:
        return await _render_one(request, members, prepare_chat, "chatcmpl")
    if "prompt" in members:
        return await _render_all(request, members, prepare_completion, "cmpl")
    raise bad_request(None, "Send messages (a chat request) or prompt (a completion request).")


async def _render_one(
    request: web.Request, members: dict[str, object], prepare: PrepareText, prefix: str
) -> web.StreamResponse:
    job, bodies = await rendered(request, members, prepare, prefix)
    return json_reply(bodies[0], job.headers)


async def _render_all(
    request: web.Request, members: dict[str, object], prepare: PrepareText, prefix: str
) -> web.StreamResponse:
    job, bodies = await rendered(request, members, prepare, prefix)
    return json_reply(bodies, job.headers)


async def rendered(
    request: web.Request, members: dict[str, object], prepare: PrepareText, prefix: str
) -> tuple[Job, list[dict[str, Any]]]:
    """The request of any route that prepares a Job, and the bodies that ask for the same. ApiError as that route.

    members: of the request's body. prefix: of the ids of that route's replies.
    """
    state = request.app[TEXT]
    said = {name: members[name] for name in PASSED_ON if members.get(name) is not None}
    model = members.get("model")

    def rename(request_id: str) -> None:
        request[REQUEST_ID] = request_id

    job = await prepare(state, members, request[REQUEST_ID], rename)
    if not job.prompts:
        raise bad_request("max_tokens", "max_tokens must be at least 1: there is nothing to generate.")
    head = {"model": state.check_model(model if isinstance(model, str) else None)}
    identity = f"{prefix}-{request[REQUEST_ID]}"
    return job, [
        {"request_id": identity if len(job.prompts) == 1 else f"{identity}-{place}"}
        | head
        | _body(state, job, place, token_ids, params, said)
        for place, (token_ids, params) in enumerate(job.prompts)
    ]


def _body(
    state: TextState,
    job: Job,
    place: int,
    token_ids: list[int],
    params: ResolvedParams,
    said: dict[str, Any],
) -> dict[str, Any]:
    fitting = params.behind(len(token_ids), state.limits.max_model_len)
    told = {} if job.told is None else dict(job.told.prompts[place * params.n])
    offsets = told.pop("prompt_token_offsets", None)
    told.pop("prompt_token_ids", None)
    stream = job.stream
    options = {"include_usage": stream.include_usage, "continuous_usage_stats": stream.continuous_usage}
    return {
        "token_ids": token_ids,
        "sampling_params": {**sampling_wire(fitting), **said},
        "stream": stream.stream,
        "stream_options": options if stream.stream else None,
        "cache_salt": job.scheduling.cache_salt or None,
        "priority": job.scheduling.priority,
        "features": None,
        "kv_transfer_params": None,
        **told,
        **({} if offsets is None else {"token_offsets": offsets}),
    }
