"""From a checked request of the Responses API to what is queued, and what becomes of the reply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.errors import bad_request
from oneloop.api.handlers.generation import Job, abort_all
from oneloop.api.handlers.prompt import check_context, check_text_len, render
from oneloop.api.parsing import parsing_of
from oneloop.api.replies import Usage
from oneloop.api.reply_format import block_source
from oneloop.api.responses.events import ResponseEncoder
from oneloop.api.responses.history import add_output, read_input
from oneloop.api.responses.reply import ResponseObject, new_response_id
from oneloop.engine.constraints import NO_CONSTRAINTS
from oneloop.engine.logprobs import make_encoders

if TYPE_CHECKING:
    from oneloop.api.errors import ApiError
    from oneloop.api.parsing import Parsing
    from oneloop.api.protocol.fields import Fields
    from oneloop.api.responses.request import ResponsesRequest
    from oneloop.api.state import ApiState


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A response that can be queued, and its place in the store."""

    state: ApiState
    owner: bytes
    is_stored: bool
    response: ResponseObject
    messages: list[dict[str, Any]]
    """The conversation so far, without the instructions."""
    job: Job
    has_ended: bool = False

    def begin(self, request_id: str) -> None:
        """From now on it can be looked up. ApiError (503) where the store is full of what runs.

        request_id: by which the engine knows it.
        """
        if self.is_stored:
            body, streams = orjson.dumps(self.response.wire()), self.job.streams
            self.state.responses.begin(
                self.response.id,
                self.owner,
                body,
                lambda: abort_all(streams),
                self.job.scheduling.cache_salt,
            )
        self.state.running_responses[self.response.id] = request_id

    def end(self) -> None:
        """Nothing of it changes any more. Idempotent."""
        if self.has_ended:
            return
        self.has_ended = True
        self.state.running_responses.pop(self.response.id, None)
        if not self.is_stored:
            return
        response, conversation = self.response, None
        if response.status in ("completed", "incomplete"):
            conversation = orjson.dumps(add_output(self.messages, response.output))
        self.state.responses.end(response.id, orjson.dumps(response.wire()), conversation)

    def fail(self, error: ApiError) -> None:
        """It has failed, unless it has ended."""
        if not self.has_ended:
            self.response.fail(error)
            self.end()

    def abandon(self) -> None:
        """Nobody goes on with it, and nothing runs on: where it has not ended its client has left. Idempotent."""
        abort_all(self.job.streams)
        if not self.has_ended:
            self.response.end("abort")
            self.end()


async def prepare_response(
    state: ApiState, asked: ResponsesRequest, fields: Fields, owner: bytes
) -> Prepared:
    """Look up what it goes on from, render and tokenise. Raises as Prepare does. fields: of the body."""
    model = state.check_model(asked.model)
    if asked.background and not state.responses.is_on:
        raise bad_request("background", "background needs a server that stores responses")
    before, salt = _before(state, asked, owner)
    messages = read_input(fields, before)
    unread = fields.unread()
    state.engine.check_accepting()
    text, token_ids = await _fit(state, asked, messages)
    parsing = parsing_of(
        state.formats,
        asked.tools,
        prompt=text,
        template_arguments=asked.form.template_arguments,
        skip_special_tokens=asked.params.skip_special_tokens,
        grammar=asked.params.grammar,
        budget=asked.thinking_budget,
    )
    vain = _without_effect(state, asked, parsing)
    headers = state.note_ignored([*asked.ignored, *vain, *unread])
    params, constraints = asked.params, NO_CONSTRAINTS
    if parsing is not None:
        params, constraints = parsing.shown(params), parsing.constraints
        token_ids = parsing.prompt(token_ids)
    check_context(
        params, len(token_ids), state.limits, prompt_field="input", max_tokens_field="max_output_tokens"
    )
    usage = Usage(prompt_tokens=len(token_ids))
    is_stored = asked.store and state.responses.is_on
    response = ResponseObject(
        id=new_response_id(), model=model, echoed={**asked.echoed, "store": is_stored}, usage=usage
    )
    logprobs = make_encoders(state.engine.tokenizer, "chat", params, 1)

    def make_encoder() -> ResponseEncoder:
        source = block_source(parsing, usage)
        return ResponseEncoder(response, source, logprobs[0] if logprobs else None, prepared.end)

    job = Job(
        prompts=[(token_ids, params)],
        scheduling=replace(asked.scheduling, cache_salt=asked.scheduling.cache_salt or salt),
        stream=asked.stream,
        usage=usage,
        headers=headers,
        num_choices=1,
        logprobs=logprobs,
        make_encoder=make_encoder,
        make_reply=None,
        constraints=constraints,
    )
    prepared = Prepared(
        state=state, owner=owner, is_stored=is_stored, response=response, messages=messages, job=job
    )
    return prepared


def _without_effect(state: ApiState, asked: ResponsesRequest, parsing: Parsing | None) -> list[str]:
    """What this model's formats leave nothing to do for."""
    is_vain = asked.thinking_budget is not None and not state.formats.thinking_end
    vain = ["thinking_token_budget"] if is_vain else []
    return vain if parsing is None else vain + parsing.without_effect


def _before(state: ApiState, asked: ResponsesRequest, owner: bytes) -> tuple[list[dict[str, Any]], str]:
    """The conversation that the request goes on from, and its salt. ApiError (404, 400)."""
    name = asked.previous_response_id
    if name is None:
        return [], ""
    entry = state.responses.find(name, owner, "previous_response_id")
    if entry.conversation is None:
        how = "is not complete yet" if entry.cancel is not None else "was cancelled or has failed"
        raise bad_request("previous_response_id", f"the previous response {how}; it cannot be gone on from")
    messages: list[dict[str, Any]] = orjson.loads(entry.conversation)
    return messages, entry.cache_salt


async def _fit(
    state: ApiState, asked: ResponsesRequest, messages: list[dict[str, Any]]
) -> tuple[str, list[int]]:
    """The prompt, as text and tokens; where it may be cut, from the first of the user's turns on that makes it fit."""
    text, whole = await _rendered(state, asked, messages, 0)
    best = (text, whole)
    if asked.truncates and not _fits(state, asked, whole):
        starts = [index for index, message in enumerate(messages) if message["role"] == "user"][1:]
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            text, cut = await _rendered(state, asked, messages, starts[middle])
            if _fits(state, asked, cut):
                high, best = middle, (text, cut)
            else:
                low = middle + 1
    text, token_ids = best
    if token_ids is None:
        check_text_len("input", text, state.limits)
        raise AssertionError("a text that could fit was not tokenised")
    return text, token_ids


def _fits(state: ApiState, asked: ResponsesRequest, token_ids: list[int] | None) -> bool:
    """Whether the context holds a prompt (None: one that is too long to be tokenised) and its answer."""
    room = state.limits.max_model_len - (asked.params.max_tokens or 1)
    return token_ids is not None and len(token_ids) <= room


async def _rendered(
    state: ApiState, asked: ResponsesRequest, messages: list[dict[str, Any]], start: int
) -> tuple[str, list[int] | None]:
    """The prompt of the instructions and the conversation from `start` on; system messages before it stay.

    Its text, and its tokens unless it cannot fit whatever they are.
    """
    kept = [message for message in messages[:start] if message["role"] in ("system", "developer")]
    kept += messages[start:]
    if asked.instructions is not None:
        kept.insert(0, {"role": "system", "content": asked.instructions})
    text = await render(state, kept, asked.form, asked.tools.offered)
    if len(text) > state.limits.max_prompt_chars:
        return text, None
    return text, await state.engine.encode(text, add_special_tokens=asked.form.add_special_tokens)
