"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.api.chunks import completion_chunks
from oneloop.api.errors import bad_request
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.json_reply import ignored_header
from oneloop.api.handlers.prompt import check_context, check_text_len, context_error
from oneloop.api.prompt_logprobs import PromptScores, echoed_prompt
from oneloop.api.protocol.completions import read_completion, read_prompts
from oneloop.api.replies import ReplyHead, Usage, completion_reply
from oneloop.engine.logprobs import make_encoders
from oneloop.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from oneloop.api.protocol.completions import CompletionRequest
    from oneloop.api.state import ApiState


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt, ready to be queued."""

    token_ids: list[int]
    echo: str
    """Its text, where it is asked back; else empty."""
    given: str | None
    """As the client sent it, where that was text."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Several prompts, n answers each; choice index = prompt index · n + answer index."""
    return await answer(request, prepare_completion)


async def prepare_completion(
    state: ApiState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
) -> Job:
    """As Prepare."""
    began = perf_counter()
    given = read_prompts(members.pop("prompt", None), state.limits)
    asked = state.repeated_completions.read(
        members,
        len(given),
        lambda: read_completion(members, len(given), state.limits, state.engine.default_sampling),
    )
    state.engine.metrics.loop.parts["parse"] += perf_counter() - began
    model = state.check_model(asked.model)
    if asked.scheduling.request_id is not None:
        request_id = asked.scheduling.request_id
        rename(request_id)
    if not asked.score_only:
        state.engine.check_accepting()
    prompts = [await _prepare(state, asked, prompt) for prompt in given]
    head = ReplyHead.make("cmpl", request_id, model)
    usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
    echoes = [prompt.echo for prompt in prompts for _ in range(asked.params.n)]
    logprobs = make_encoders(state.engine.tokenizer, "completion", asked.params, len(echoes))
    return Job(
        prompts=[] if asked.score_only else [(prompt.token_ids, asked.params) for prompt in prompts],
        scheduling=asked.scheduling,
        stream=asked.stream,
        usage=usage,
        headers=ignored_header(asked.ignored),
        num_choices=len(echoes),
        logprobs=logprobs,
        make_encoder=partial(
            completion_chunks, head, options=asked.stream, usage=usage, echoes=echoes, logprobs=logprobs
        ),
        make_reply=lambda choices, encoded: completion_reply(
            head, choices, usage, echoes=echoes, logprobs=encoded
        ),
        prompt_scores=_prompt_scores(state, asked, prompts),
    )


def _prompt_scores(state: ApiState, asked: CompletionRequest, prompts: list[_Prompt]) -> PromptScores | None:
    if asked.params.prompt_logprobs is None:
        return None
    echoes = prompts if asked.echo and asked.params.logprobs is not None else []
    tokenizer = state.engine.tokenizer
    return PromptScores(
        echoed=[echoed_prompt(tokenizer, prompt.token_ids, prompt.given) for prompt in echoes],
        num_top=asked.shown_prompt_logprobs,
    )


async def _prepare(state: ApiState, asked: CompletionRequest, prompt: str | list[int]) -> _Prompt:
    """Tokenise one prompt and fit its answer behind it."""
    limits = state.limits
    given = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, str):
        check_text_len("prompt", prompt, limits)
        token_ids = await state.engine.encode(prompt, add_special_tokens=asked.add_special_tokens)
        echo = prompt if asked.echo else ""
    else:
        token_ids = prompt
        echo = await _text_of(state, prompt) if asked.echo else ""
    if asked.score_only:
        if len(token_ids) > limits.max_model_len:
            raise context_error("prompt", len(token_ids), limits)
        return _Prompt(token_ids, echo, given)
    check_context(asked.params, len(token_ids), limits, prompt_field="prompt", max_tokens_field="max_tokens")
    return _Prompt(token_ids, echo, given)


async def _text_of(state: ApiState, token_ids: list[int]) -> str:
    """A prompt of ids as text, to be echoed."""
    try:
        return await state.engine.decode(token_ids, skip_special_tokens=False)
    except RequestError as error:
        raise bad_request("prompt", f"cannot be echoed: {error.message}") from None
