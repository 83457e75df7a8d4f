"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from oneloop.api.chat_replies import ParsedChunkEncoder, parsed_answer, plain_answer
from oneloop.api.chunks import chat_chunks
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.json_reply import ignored_header
from oneloop.api.handlers.prompt import check_context, check_text_len, render
from oneloop.api.parsing import parsing_of
from oneloop.api.protocol.chat import read_chat
from oneloop.api.protocol.messages import read_messages
from oneloop.api.replies import ReplyHead, Usage, chat_reply
from oneloop.engine.logprobs import make_encoders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from oneloop.api.chunks import ChunkEncoder
    from oneloop.api.parsing import Parsing
    from oneloop.api.protocol.sampling import StreamOptions
    from oneloop.api.replies import Choice, Logprobs
    from oneloop.api.state import ApiState
    from oneloop.engine.logprobs import LogprobsEncoder


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """One conversation, n answers."""
    return await answer(request, prepare_chat)


async def prepare_chat(
    state: ApiState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
) -> Job:
    """As Prepare."""
    began = perf_counter()
    messages = read_messages(members.pop("messages", None))
    chat = state.repeated_chats.read(
        members, 1, lambda: read_chat(members, state.limits, state.engine.default_sampling)
    )
    state.engine.metrics.loop.parts["parse"] += perf_counter() - began
    model = state.check_model(chat.model)
    if chat.scheduling.request_id is not None:
        request_id = chat.scheduling.request_id
        rename(request_id)
    state.engine.check_accepting()
    text = await render(state, messages, chat.form, chat.tools.offered)
    check_text_len("messages", text, state.limits)
    token_ids = await state.engine.encode(text, add_special_tokens=chat.form.add_special_tokens)
    params = chat.params
    parsing = parsing_of(
        state.formats,
        chat.tools,
        prompt=text,
        continued=messages[-1]["content"] if chat.form.continue_final_message else None,
        template_arguments=chat.form.template_arguments,
        include_reasoning=chat.include_reasoning,
        skip_special_tokens=params.skip_special_tokens,
    )
    if parsing is not None:
        params = parsing.shown(params)
    check_context(
        params,
        len(token_ids),
        state.limits,
        prompt_field="messages",
        max_tokens_field=chat.max_tokens_field,
    )
    head = ReplyHead.make("chatcmpl", request_id, model)
    usage = Usage(prompt_tokens=len(token_ids))
    logprobs = make_encoders(state.engine.tokenizer, "chat", params, params.n)
    return Job(
        prompts=[(token_ids, params)],
        scheduling=chat.scheduling,
        stream=chat.stream,
        usage=usage,
        headers=ignored_header(chat.ignored),
        num_choices=params.n,
        logprobs=logprobs,
        make_encoder=partial(_encoder, head, parsing, params.n, chat.stream, usage, logprobs),
        make_reply=partial(_reply, head, parsing, usage),
    )


def _encoder(
    head: ReplyHead,
    parsing: Parsing | None,
    n: int,
    options: StreamOptions,
    usage: Usage,
    logprobs: Sequence[LogprobsEncoder] | None,
) -> ChunkEncoder | ParsedChunkEncoder:
    """Of a stream; one for plain text where nothing is to be taken apart."""
    if parsing is None:
        return chat_chunks(head, num_choices=n, options=options, usage=usage, logprobs=logprobs)
    parsers = [parsing.parser(usage) for _ in range(n)]
    return ParsedChunkEncoder(head, parsers, options=options, usage=usage, logprobs=logprobs)


def _reply(
    head: ReplyHead,
    parsing: Parsing | None,
    usage: Usage,
    choices: Sequence[Choice],
    logprobs: Sequence[Logprobs],
) -> dict[str, Any]:
    """A whole one."""
    if parsing is None:
        answers = [plain_answer(choice) for choice in choices]
    else:
        answers = [parsed_answer(choice, parsing.parser(usage)) for choice in choices]
    return chat_reply(head, choices, answers, usage, logprobs)
