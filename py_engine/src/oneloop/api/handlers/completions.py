"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import orjson

from oneloop.api.chunks import completion_chunks
from oneloop.api.errors import bad_request
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.prompt import Prompt, check_context, check_repeated, context_error, tokenized
from oneloop.api.prompt_logprobs import PromptScores, echoed_prompt
from oneloop.api.protocol.completions import read_completion, read_prompts
from oneloop.api.replies import ReplyHead, Told, Usage, completion_reply
from oneloop.engine.logprobs import make_encoders
from oneloop.errors import RequestError
from oneloop.tokenize.renderer import kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from oneloop.api.protocol.completions import CompletionRequest
    from oneloop.api.state import TextState


async def completions(request: web.Request) -> web.StreamResponse:
    """Several prompts, n answers each; choice index = prompt index · n + answer index."""
    return await answer(request, prepare_completion)


async def prepare_completion(
    state: TextState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
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
    headers = state.note_ignored(asked.ignored)
    if asked.scheduling.request_id is not None:
        request_id = asked.scheduling.request_id
        rename(request_id)
    if not asked.score_only:
        state.engine.check_accepting()
    told_back, n = asked.told_back, asked.params.n
    prompts = [await _prepare(state, asked, prompt) for prompt in given]
    _check_told(asked, prompts)
    head = ReplyHead.make("cmpl", request_id, model)
    usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
    scores = _prompt_scores(state, asked, prompts)
    echoes = [await _echo(state, prompt) if asked.echo else "" for prompt in prompts for _ in range(n)]
    vocabulary = await state.engine.id_vocabulary() if told_back.tokens_as_ids else None
    logprobs = make_encoders(
        state.engine.tokenizer, "completion", asked.params, len(echoes), vocabulary=vocabulary
    )
    told_of_each = [_encoded(prompt.told(told_back)) for prompt in prompts]
    told = Told(told_back.token_ids, [one for one in told_of_each for _ in range(n)])
    return Job(
        prompts=[] if asked.score_only else [(prompt.token_ids, asked.params) for prompt in prompts],
        scheduling=asked.scheduling,
        stream=asked.stream,
        usage=usage,
        headers=headers,
        num_choices=len(echoes),
        logprobs=logprobs,
        make_encoder=partial(
            completion_chunks,
            head,
            options=asked.stream,
            usage=usage,
            echoes=echoes,
            logprobs=logprobs,
            told=told,
            echoes_logprobs=asked.echoes_tokens,
        ),
        make_reply=lambda choices, encoded: completion_reply(
            head, choices, usage, echoes=echoes, logprobs=encoded, told=told
        ),
        told=told,
        prompt_scores=scores,
        checked_form=asked.params.grammar if asked.score_only else None,
    )


_LOGPROB_BYTES: Final = 64
_ID_BYTES: Final = 7
_OFFSET_BYTES: Final = 18
_TEXT_BYTES: Final = 5
"""About what each takes in JSON; of a text, for each token."""


def _check_told(asked: CompletionRequest, prompts: Sequence[Prompt]) -> None:
    """Refuse a reply that repeats too much of its prompts: each choice has what is told of its own."""
    told, scored = asked.told_back, asked.params.prompt_logprobs
    per_token = (
        (0 if scored is None else _LOGPROB_BYTES * (1 + scored))
        + _ID_BYTES * told.token_ids
        + _OFFSET_BYTES * told.offsets
        + _TEXT_BYTES * (told.prompt_text + asked.echo)
    )
    n = asked.params.n
    check_repeated(per_token * n * sum(len(prompt.token_ids) for prompt in prompts), n)


def _encoded(told: dict[str, Any]) -> dict[str, Any]:
    """Once for all choices, which repeat it."""
    return {name: orjson.Fragment(orjson.dumps(value)) for name, value in told.items()}


def _prompt_scores(state: TextState, asked: CompletionRequest, prompts: list[Prompt]) -> PromptScores | None:
    if asked.params.prompt_logprobs is None:
        return None
    echoes = prompts if asked.echoes_tokens else []
    tokenizer = state.engine.tokenizer
    return PromptScores(
        echoed=[echoed_prompt(tokenizer, prompt.token_ids, prompt.text) for prompt in echoes],
        num_top=asked.shown_prompt_logprobs,
    )


async def _prepare(state: TextState, asked: CompletionRequest, prompt: str | list[int]) -> Prompt:
    """Tokenise one prompt and fit its answer behind it."""
    limits, params = state.limits, asked.params
    truncation = None
    if asked.truncation is not None:
        truncation = asked.truncation.behind(limits, None if asked.score_only else params)
    if isinstance(prompt, str):
        found = await tokenized(
            state,
            "prompt",
            prompt,
            add_special_tokens=asked.add_special_tokens,
            truncation=truncation,
            offsets=asked.told_back.offsets,
        )
    else:
        found = Prompt(token_ids=kept(prompt, prompt, truncation, state.engine.tokenizer.bos_token_id))
    if truncation is not None and asked.echoes_tokens:
        found = replace(found, text=None)  # tokens of the whole text would stand beside those of a part
    if asked.score_only:
        if len(found.token_ids) > limits.max_model_len:
            raise context_error("prompt", len(found.token_ids), limits)
        return found
    check_context(params, len(found.token_ids), limits, prompt_field="prompt", max_tokens_field="max_tokens")
    return found


async def _echo(state: TextState, prompt: Prompt) -> str:
    """The prompt's text, to go before its answers."""
    if prompt.text is not None:
        return prompt.text
    try:
        return await state.engine.decode(prompt.token_ids, skip_special_tokens=False)
    except RequestError as error:
        raise bad_request("prompt", f"cannot be echoed: {error.message}") from None
