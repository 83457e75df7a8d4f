"""/derender: tokens that were generated elsewhere → the reply of the API, whole or chunk by chunk."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.chat_replies import ChatTeller, events_delta
from oneloop.api.errors import bad_request
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.parsing import parsing_of
from oneloop.api.protocol.derender import STATE_VERSION, ChoiceState, read_derender
from oneloop.api.replies import Choice, ReplyHead, Usage, completion_reply, encode_logprobs
from oneloop.api.state import TEXT
from oneloop.engine.logprobs import make_encoder
from oneloop.tokenize.output_text import Ended, TextState, next_text, whole_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from oneloop.api.parsing import Parsing
    from oneloop.api.protocol.derender import Api, ChatParts, DerenderRequest, Generated, Output
    from oneloop.api.state import TextState as ServerTextState
    from oneloop.api.thinking_tokens import EndState
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.tokenize.output_text import TextForm


async def derender_chat(request: web.Request) -> web.StreamResponse:
    """As /v1/chat/completions answers."""
    return await _answer(request, await request.app[TEXT].bodies.read_object(request), "chat")


async def derender_completion(request: web.Request) -> web.StreamResponse:
    """As /v1/completions answers."""
    return await _answer(request, await request.app[TEXT].bodies.read_object(request), "completion")


async def derender(request: web.Request) -> web.StreamResponse:
    """Either of them, by what is in the body."""
    members = await request.app[TEXT].bodies.read_object(request)
    is_completion = "generate_responses" in members or "completion_request" in members
    return await _answer(request, members, "completion" if is_completion else "chat")


async def _answer(request: web.Request, members: dict[str, object], api: Api) -> web.StreamResponse:
    state = request.app[TEXT]
    asked = read_derender(members, api, state.limits)
    model = state.check_model(asked.model)
    headers = state.note_ignored(asked.ignored)
    _check_vocabulary(state, asked)
    parsing = derender_parsing(state, asked.parts, asked.form) if api == "chat" else None
    if parsing is not None:
        asked = replace(asked, form=replace(asked.form, shown_special_ids=state.formats.shown_special_ids))
    if asked.stream:
        chunk, carried = await asyncio.to_thread(_next_chunk, state, asked, api, model, parsing)
        return json_reply({"chunk": chunk, "stream_state": carried}, headers)
    return json_reply(await _whole_reply(state, asked, api, model, parsing), headers)


def derender_parsing(
    state: ServerTextState, parts: ChatParts, form: TextForm, budget: int | None = None
) -> Parsing | None:
    """How chat replies are taken apart. None: all of the text is content. budget: tokens that the thinking may have."""
    vocabulary, end = state.engine.tokenizer.vocabulary, list(parts.prompt_end)
    known = [token for token in end if token < len(vocabulary)]
    return parsing_of(
        state.formats,
        parts.tools,
        prompt=vocabulary.decode(known, skip_special_tokens=False),
        continued=parts.continued,
        template_arguments=parts.template_arguments,
        include_reasoning=parts.include_reasoning,
        skip_special_tokens=form.skip_special_tokens,
        grammar=parts.grammar,
        budget=budget,
        may_open=False,
    )


def _check_vocabulary(state: ServerTextState, asked: DerenderRequest) -> None:
    """A model may have rows beyond its vocabulary (padding); there is no text for them."""
    size = state.engine.tokenizer.vocab_size
    carried = [one.text.tail for one in (asked.state or {}).values()]
    for ids in [output.token_ids for one in asked.generated for output in one.outputs] + carried:
        if ids and max(ids) >= size:
            raise bad_request("token_ids", f"token id {max(ids)} has no text (vocabulary: 0 … {size - 1})")


async def _whole_reply(
    state: ServerTextState, asked: DerenderRequest, api: Api, model: str, parsing: Parsing | None
) -> dict[str, Any]:
    outputs = [output for one in asked.generated for output in one.outputs]
    texts = await asyncio.to_thread(_texts, state, asked.form, outputs)
    choices = [
        Choice(
            text=text,
            token_ids=output.token_ids,
            logprobs=output.logprobs or [],
            finish_reason=output.finish_reason or "stop",
            stop_reason=output.stop_reason,
        )
        for text, output in zip(texts, outputs, strict=True)
    ]
    encoders = [_encoder(state, asked.form, api, output) for output in outputs]
    shown = [
        None if encoder is None else (await encode_logprobs([choice], [encoder]))[0]
        for choice, encoder in zip(choices, encoders, strict=True)
    ]
    first = asked.generated[0]
    head = ReplyHead(first.request_id, _created(first), model)
    usage = _usage(asked)
    usage.completion_tokens = sum(len(output.token_ids) for output in outputs)
    if api == "chat":
        return ChatTeller(head=head, parsing=parsing, usage=usage).reply(choices, shown)
    return completion_reply(head, choices, usage, echoes=[""] * len(choices), logprobs=shown)


def _texts(state: ServerTextState, form: TextForm, outputs: Sequence[Output]) -> list[str]:
    """In a thread."""
    vocabulary = state.engine.tokenizer.vocabulary
    return [
        whole_text(vocabulary, _form_of(form, output), output.token_ids, _ended(output)) for output in outputs
    ]


def _next_chunk(
    state: ServerTextState, asked: DerenderRequest, api: Api, model: str, parsing: Parsing | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """In a thread: what one chunk of tokens comes to, and the state behind it."""
    (chunk,) = asked.generated
    states = dict(asked.state or {})
    choices = []
    for output in chunk.outputs:
        before = states.get(output.index)
        shown, states[output.index] = _next_choice(state, asked.form, api, output, before, parsing)
        choices.append(shown)
    reply: dict[str, Any] = {
        "id": chunk.request_id,
        "object": "chat.completion.chunk" if api == "chat" else "text_completion",
        "created": _created(chunk),
        "model": model,
        "choices": choices,
    }
    if chunk.completion_tokens is not None:
        usage = _usage(asked)
        usage.completion_tokens = chunk.completion_tokens
        reply["usage"] = usage.wire()
    carried = [states[index].wire(index) for index in sorted(states)]
    return reply, {"version": STATE_VERSION, "choices": carried}


def _next_choice(
    state: ServerTextState,
    form: TextForm,
    api: Api,
    output: Output,
    before: ChoiceState | None,
    parsing: Parsing | None,
) -> tuple[dict[str, Any], ChoiceState]:
    known = before or ChoiceState(text=TextState())
    if known.ended:
        raise bad_request("generate_chunk", f"choice {output.index} has ended already")
    ended = None if output.finish_reason is None else _ended(output)
    vocabulary = state.engine.tokenizer.vocabulary
    text, behind = next_text(vocabulary, _form_of(form, output), known.text, output.token_ids, ended)
    after = ChoiceState(text=behind, ended=ended is not None)
    shown: dict[str, Any] = {"index": output.index}
    finish_reason: str | None = output.finish_reason
    if api == "chat":
        role = {"role": "assistant", "content": ""} if before is None else {}
        if parsing is None:
            delta = {"content": text} if text else {}
        else:
            delta, finish_reason, end = _parsed(parsing, known, text, output)
            after = replace(after, said=known.said + text, end=end)
        shown["delta"] = {**role, **delta}
    else:
        shown["text"] = text
    encoder = _encoder(state, form, api, output)
    if encoder is not None:
        shown["logprobs"] = _logprobs(encoder, known.text, output)
    shown["finish_reason"] = finish_reason
    if output.finish_reason is not None:
        shown["stop_reason"] = output.stop_reason
    return shown, after


def _parsed(
    parsing: Parsing, known: ChoiceState, text: str, output: Output
) -> tuple[dict[str, Any], str | None, EndState | None]:
    """A chunk's text taken apart, its finish reason, and what is known then of the thinking's end.

    The parser reads what was before again: no cut changes what comes out, so what follows is what an uninterrupted one
    would say.
    """
    parser = parsing.parser(Usage(), known.end)
    parser.add(known.said, [], None)
    delta = events_delta(parser.add(text, output.token_ids, output.finish_reason), parser.call_id)
    reason = output.finish_reason
    return delta, None if reason is None else parser.finish_reason(reason), parser.end_state


def _logprobs(encoder: LogprobsEncoder, before: TextState, output: Output) -> dict[str, Any]:
    """Of a chunk. What the tokens before it left of a character, and their length, count for its places in the text."""
    encoder.add([(0, [(token, 0.0)]) for token in before.tail])
    encoder.take()
    encoder.add(output.logprobs or [])
    found: dict[str, Any] = orjson.loads(encoder.take())
    if "text_offset" in found:
        found["text_offset"] = [offset + before.num_chars for offset in found["text_offset"]]
    return found


def _form_of(form: TextForm, output: Output) -> TextForm:
    """A stop string that ended the text is known even where the request was not sent along."""
    if form.stop or not isinstance(output.stop_reason, str) or not output.stop_reason:
        return form
    return replace(form, stop=(output.stop_reason,))


def _ended(output: Output) -> Ended:
    by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    return Ended(by_token=by_token)


def _encoder(state: ServerTextState, form: TextForm, api: Api, output: Output) -> LogprobsEncoder | None:
    if output.logprobs is None:
        return None
    num_top = max((len(entries) - 1 for _, entries in output.logprobs), default=0)
    vocabulary = state.engine.tokenizer.vocabulary
    return make_encoder(vocabulary, api, num_top=num_top, skip_special_tokens=form.skip_special_tokens)


def _created(generated: Generated) -> int:
    return int(time.time()) if generated.created is None else generated.created


def _usage(asked: DerenderRequest) -> Usage:
    """The prompts, as the client counted them, or else as the generating server did."""
    told = [one.prompt_tokens or 0 for one in asked.generated]
    given = asked.prompt_tokens
    return Usage(
        prompt_tokens=sum(
            count if count is not None else other for count, other in zip(given, told, strict=True)
        ),
        cached_tokens=sum(one.cached_tokens for one in asked.generated),
    )
