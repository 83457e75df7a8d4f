"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.api.chunks import completion_chunks
from oneloop.api.errors import bad_request
from oneloop.api.handlers.generation import abort_all, collect, submit_all
from oneloop.api.handlers.json_reply import ignored_header, json_reply
from oneloop.api.handlers.prompt import check_context, check_text_len, context_error
from oneloop.api.handlers.streaming import stream_reply
from oneloop.api.logprobs import CompletionLogprobs
from oneloop.api.protocol.completions import read_completion
from oneloop.api.replies import Choice, ReplyHead, Usage, completion_reply, encode_logprobs
from oneloop.api.state import REQUEST_ID, STATE
from oneloop.errors import RequestError

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.protocol.completions import CompletionRequest
    from oneloop.api.state import ApiState
    from oneloop.engine.stream import RequestStream


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt, ready to be queued."""

    token_ids: list[int]
    echo: str
    """Its text, where it is asked back; else empty."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Several prompts, n answers each; choice index = prompt index · n + answer index."""
    state = request.app[STATE]
    body = await state.bodies.read_object(request)
    began = perf_counter()
    asked = read_completion(body, state.limits, state.engine.default_sampling)
    state.engine.metrics.loop.parts["parse"] += perf_counter() - began
    model = state.check_model(asked.model)
    if asked.scheduling.request_id is not None:
        request[REQUEST_ID] = asked.scheduling.request_id
    if not asked.score_only:
        state.engine.check_accepting()
    prompts = [await _prepare(state, asked, index) for index in range(len(asked.prompts))]
    head = ReplyHead.make("cmpl", request[REQUEST_ID], model)
    return await _answer(request, asked, prompts, head)


async def _answer(
    request: web.Request, asked: CompletionRequest, prompts: list[_Prompt], head: ReplyHead
) -> web.StreamResponse:
    state, n = request.app[STATE], asked.params.n
    usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
    echoes = [prompt.echo for prompt in prompts for _ in range(n)]
    logprobs = None if asked.params.logprobs is None else [_logprobs(state, asked) for _ in echoes]
    headers = ignored_header(asked.ignored)
    streams: list[RequestStream] = []
    try:
        work = [] if asked.score_only else [(prompt.token_ids, asked.params) for prompt in prompts]
        await submit_all(state, streams, work, asked.scheduling)
        if not asked.stream.stream:
            choices = await collect(state, streams, n, usage) or [
                Choice(finish_reason="length") for _ in echoes
            ]
            encoded = await encode_logprobs(choices, logprobs)
            reply = completion_reply(head, choices, usage, echoes=echoes, logprobs=encoded)
            return json_reply(reply, headers)
        encoder = completion_chunks(head, options=asked.stream, usage=usage, echoes=echoes, logprobs=logprobs)
        return await stream_reply(request, streams, encoder, usage, asked.stream, headers)
    finally:
        abort_all(streams)


async def _prepare(state: ApiState, asked: CompletionRequest, index: int) -> _Prompt:
    """Tokenise one prompt and fit its answer behind it."""
    prompt, limits = asked.prompts[index], state.limits
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
        return _Prompt(token_ids, echo)
    field = "max_tokens" if asked.explicit_max_tokens else None
    check_context(asked.params, len(token_ids), limits, prompt_field="prompt", max_tokens_field=field)
    return _Prompt(token_ids, echo)


async def _text_of(state: ApiState, token_ids: list[int]) -> str:
    """A prompt of ids as text, to be echoed."""
    try:
        return await state.engine.decode(token_ids, skip_special_tokens=False)
    except RequestError as error:
        raise bad_request("prompt", f"cannot be echoed: {error.message}") from None


def _logprobs(state: ApiState, asked: CompletionRequest) -> CompletionLogprobs:
    """Offsets start at 0: echo and logprobs exclude each other."""
    return CompletionLogprobs(
        state.token_texts, num_top=asked.params.logprobs or 0, skip_special=asked.params.skip_special_tokens
    )
