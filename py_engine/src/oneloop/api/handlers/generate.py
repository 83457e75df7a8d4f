"""POST /inference/v1/generate: tokens in, tokens out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oneloop.api.chat_replies import ChatTeller
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.derender import derender_parsing
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.prompt import check_context
from oneloop.api.prompt_logprobs import PromptScores
from oneloop.api.protocol.generate import read_generate
from oneloop.api.replies import ReplyHead, Usage
from oneloop.api.token_chunks import TokenChunks, generate_reply
from oneloop.engine.constraints import NO_CONSTRAINTS
from oneloop.engine.logprobs import make_encoders
from oneloop.tokenize.output_text import TextForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from oneloop.api.parsing import Parsing
    from oneloop.api.protocol.generate import GenerateRequest
    from oneloop.api.state import TextState
    from oneloop.engine.params import ResolvedParams


async def generate(request: web.Request) -> web.StreamResponse:
    """One prompt of tokens, n answers: of tokens, of tokens with text, or as chat's."""
    return await answer(request, prepare_generate)


async def prepare_generate(
    state: TextState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
) -> Job:
    """As Prepare."""
    asked = read_generate(members, state.limits, state.engine.default_sampling)
    model = state.check_model(asked.model)
    headers = state.note_ignored(asked.ignored)
    if asked.request_id is not None:
        request_id = asked.request_id
        rename(request_id)
    state.engine.check_accepting()
    check_context(
        asked.params,
        len(asked.token_ids),
        state.limits,
        prompt_field="token_ids",
        max_tokens_field="sampling_params.max_tokens",
    )
    params = asked.params if asked.output_mode != "tokens" else _without_text(asked.params)
    form = TextForm(skip_special_tokens=params.skip_special_tokens)
    parsing = derender_parsing(state, asked.parts, form, asked.thinking_budget)
    constraints = NO_CONSTRAINTS
    if parsing is not None:
        constraints = parsing.constraints
        shown = parsing.shown(params)
        params = shown if asked.output_mode == "derender" else replace(params, grammar=shown.grammar)
    head = ReplyHead.named(request_id, model)
    usage = Usage(prompt_tokens=len(asked.token_ids))
    named_by_text = asked.output_mode == "derender"
    vocabulary = None if named_by_text or params.logprobs is None else await state.engine.id_vocabulary()
    logprobs = make_encoders(state.engine.tokenizer, "chat", params, params.n, vocabulary=vocabulary)
    job = Job(
        prompts=[(asked.token_ids, params)],
        scheduling=asked.scheduling,
        stream=asked.stream,
        usage=usage,
        headers=headers,
        num_choices=params.n,
        logprobs=logprobs,
        make_encoder=partial(
            TokenChunks,
            head,
            num_choices=params.n,
            options=asked.stream,
            usage=usage,
            logprobs=logprobs,
            with_text=asked.output_mode == "text",
        ),
        make_reply=lambda choices, encoded: generate_reply(
            head, choices, usage, encoded, with_text=asked.output_mode == "text"
        ),
        prompt_scores=None
        if params.prompt_logprobs is None
        else PromptScores(echoed=(), num_top=params.prompt_logprobs),
        constraints=constraints,
    )
    return _as_chat(job, head, asked, parsing) if named_by_text else job


def _without_text(params: ResolvedParams) -> ResolvedParams:
    """Tokens need no text, but where stop strings are looked for."""
    return params if params.stop else replace(params, detokenize=False)


def _as_chat(job: Job, head: ReplyHead, asked: GenerateRequest, parsing: Parsing | None) -> Job:
    """The same, answered as /v1/chat/completions does."""
    teller = ChatTeller(head=head, parsing=parsing, usage=job.usage)
    return replace(
        job,
        make_encoder=partial(teller.encoder, job.num_choices, asked.stream, job.logprobs),
        make_reply=teller.reply,
    )
