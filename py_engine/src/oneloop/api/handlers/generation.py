"""What chat and completions share: a request read to the end, queueing its prompts, adding up a whole reply."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from oneloop.api.errors import GENERATION_FAILED, ApiError, ErrorKind, bad_request, shutting_down
from oneloop.api.replies import Choice
from oneloop.engine.constraints import NO_CONSTRAINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oneloop.api.encoder import EventEncoder
    from oneloop.api.prompt_logprobs import PromptScores
    from oneloop.api.protocol.sampling import Scheduling, StreamOptions
    from oneloop.api.replies import Logprobs, Told, Usage
    from oneloop.api.state import ApiState, TextState
    from oneloop.engine.constraints import TokenConstraints
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import Added
    from oneloop.engine.params import ResolvedParams
    from oneloop.engine.stream import RequestStream
    from oneloop.engine.structured import GrammarSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a request comes to, whichever route it took: what is to be queued, and how the answer is told."""

    prompts: list[tuple[list[int], ResolvedParams]]
    """None: a request for no tokens."""
    scheduling: Scheduling
    stream: StreamOptions
    usage: Usage
    """With the prompts counted; the rest is filled in by the end."""
    headers: Mapping[str, str]
    """Of the reply, beside those of every reply."""
    num_choices: int
    logprobs: Sequence[LogprobsEncoder] | None
    """One per choice."""
    make_encoder: Callable[[], EventEncoder]
    """For a streamed reply."""
    make_reply: Callable[[Sequence[Choice], Sequence[Logprobs]], dict[str, Any]] | None
    """The body of a whole one, of all choices and their log-probabilities. None: the route makes it itself."""
    streams: list[RequestStream] = field(default_factory=list)
    """One per prompt, once they are queued."""
    told: Told | None = None
    """What the reply tells of tokens."""
    prompt_scores: PromptScores | None = None
    """What a whole one shows of its prompts' log-probabilities."""
    constraints: TokenConstraints = NO_CONSTRAINTS
    """What else binds the tokens."""
    checked_form: GrammarSpec | None = None
    """A form that nothing will have, as no tokens are asked for; it must be one all the same."""


class Prepare(Protocol):
    """A route's reading of a request."""

    async def __call__(
        self, state: ApiState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
    ) -> Job:
        """Check, render and tokenise. Raises ApiError, RequestError and what the engine raises.

        members: of the body. request_id: for the reply. rename: told the client's own id, where the body has one.
        """


class PrepareText(Protocol):
    """The same of a route that needs no model for it."""

    async def __call__(
        self, state: TextState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
    ) -> Job:
        """As Prepare."""


async def submit_all(state: ApiState, streams: list[RequestStream], job: Job, request_id: str) -> None:
    """Queue the prompts; `streams` gets theirs as they come, and is the caller's to end with `abort_all`.

    request_id: by which the live view names them.
    """
    scheduling = job.scheduling
    if job.checked_form is not None:
        await state.engine.grammars.get(job.checked_form)
    for token_ids, params in job.prompts:
        stream = await state.engine.submit(
            token_ids,
            params,
            request_id=request_id,
            priority=scheduling.priority,
            cache_salt=scheduling.cache_salt,
            constraints=job.constraints,
        )
        streams.append(stream)


def abort_all(streams: Sequence[RequestStream]) -> None:
    """End what has not ended: whoever asked for it has its answer, or is gone."""
    for stream in streams:
        stream.abort()


async def collect(state: ApiState, streams: Sequence[RequestStream], job: Job) -> list[Choice]:
    """All choices, once every sequence has ended; wakes once per prompt. ApiError when a sequence failed."""
    if not streams:
        return [Choice(finish_reason="length") for _ in range(job.num_choices)]
    usage, n = job.usage, job.num_choices // len(streams)
    choices = [Choice() for _ in range(job.num_choices)]
    for prompt, stream in enumerate(streams):
        for delta in await stream.all_deltas():
            check_delta(state, stream, delta)
            choices[prompt * n + delta.index].add(delta)
            usage.completion_tokens += len(delta.token_ids)
        usage.cached_tokens += stream.num_cached_tokens
    return choices


def check_delta(state: ApiState, stream: RequestStream, delta: Added) -> None:
    """Raise what a sequence of this stream that did not end by itself means for its client."""
    if delta.finish_reason == "error":
        if delta.is_request_at_fault:
            raise _cannot_be(stream.bound_by, delta.error)
        log.error("generation failed: %s", delta.error)
        if state.engine.health().ok:
            raise ApiError(ErrorKind.INTERNAL, GENERATION_FAILED)
        raise ApiError(ErrorKind.UNAVAILABLE, "The engine has stopped before the answer was complete.")
    if delta.finish_reason == "abort" and not state.engine.health().ok:
        raise shutting_down("The server was shut down before the answer was complete.")


def _cannot_be(field: str | None, reason: str | None) -> ApiError:
    """What the request asks of its answer's tokens leaves none, or is too much work."""
    place = f"{field}: " if field is not None else ""
    remedy = "make the form simpler, or loosen what else binds the tokens"
    return bad_request(field, f"{place}the answer could not go on ({reason}); {remedy}.")
