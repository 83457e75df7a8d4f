"""Every field that clients of the four text APIs know is honoured, refused by name, or listed as without effect.

Three tables per route. A field is honoured when a value that asks for something is taken and is not listed; what it then
does is tested where it belongs. None may vanish: that is the law here.
"""
# ruff: noqa: E501  (tables)

from __future__ import annotations

from typing import Any

import pytest

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
GENERATE = "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}

SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True,
    "include_stop_str_in_output": True, "min_tokens": 1, "skip_special_tokens": False, "logit_bias": {"5": 1},
    "allowed_token_ids": [65, 66], "bad_words": ["z"], "use_beam_search": True,
}  # fmt: skip
FORMS: dict[str, Any] = {
    "structured_outputs": {"json": SCHEMA}, "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"', "guided_json_object": True,
}  # fmt: skip
MAIN_KEYS: dict[str, Any] = {
    "json": SCHEMA, "regex": "ab?", "choice": ["a", "b"], "grammar": 'start: "a"', "json_object": True,
    "structural_tag": {
        "type": "structural_tag", "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"],
    },
}  # fmt: skip
KEY_OPTIONS: dict[str, Any] = {
    "disable_any_whitespace": True, "disable_additional_properties": True, "whitespace_pattern": "[ ]?",
}  # fmt: skip
PROMPT_CONTROL: dict[str, Any] = {
    "truncate_prompt_tokens": 3, "truncation_side": "right", "add_special_tokens": True, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "return_token_offsets": True, "return_prompt_text": True, "prompt_logprobs": 0,
    "echo": True, "cache_salt": "salt", "request_id": "mine",
}  # fmt: skip
TEMPLATE: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
UNSUPPORTED: dict[str, Any] = {
    "spaces_between_special_tokens": False, "watermarking": True, "repetition_detection": {"max_pattern_size": 5},
    "routed_experts_prompt_start": 0, "stream_interval": 2, "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1}, "logits_processors": ["a"], "prompt_embeds": "AAAA", "priority": 1,
}  # fmt: skip
MEDIA: dict[str, Any] = {
    "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": 1}, "return_mm_kwargs": True, "functions": [FUNCTION],
    "function_call": "auto", "modalities": ["audio"], "audio": {"voice": "a"}, "web_search_options": {"a": 1},
}  # fmt: skip
TOOLS = [{"type": "function", "function": FUNCTION}]

Base = dict[str, Any]
HONOURED: dict[str, tuple[Base, Base]] = {
    CHAT: (
        {"messages": HELLO, "max_tokens": 4},
        {
            **SAMPLING, **FORMS, **PROMPT_CONTROL, **TEMPLATE, "model": "fake", "n": 2, "max_completion_tokens": 3,
            "logprobs": True, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            "reasoning_effort": "high", "add_generation_prompt": False, "documents": [{"text": "a"}], "stream": True,
            "include_reasoning": False,
        },
    ),
    COMPLETIONS: (
        {"prompt": "hello", "max_tokens": 4},
        {
            **SAMPLING, **FORMS, **PROMPT_CONTROL, "model": "fake", "n": 2, "logprobs": 2, "stream": True, "best_of": 1,
            "response_format": {"type": "json_object"}, "add_special_tokens": False,
        },
    ),
    MESSAGES: (
        {"messages": HELLO, "max_tokens": 4},
        {
            **{name: SAMPLING[name] for name in (
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "presence_penalty",
                "frequency_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
            )},
            **FORMS, **TEMPLATE, "model": "fake", "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "stop_sequences": ["x"], "stream": True, "thinking": {"type": "disabled"}, "cache_salt": "salt", "request_id": "mine",
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
    ),
    RESPONSES: (
        {"input": "hello", "max_output_tokens": 4},
        {
            **{name: SAMPLING[name] for name in (
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "presence_penalty",
                "frequency_penalty", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
            )},
            **FORMS, **TEMPLATE, "model": "fake", "instructions": "be brief", "max_tool_calls": 2, "metadata": {"a": "b"},
            "parallel_tool_calls": False, "reasoning": {"effort": "low"}, "store": False, "stream": True,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "include": ["message.output_text.logprobs"], "truncation": "auto", "background": True, "cache_salt": "salt",
            "request_id": "mine",
        },
    ),
}  # fmt: skip
TOGETHER: dict[str, list[Base]] = {
    CHAT: [
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "logprob_token_ids": [5, 6]},
        {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": True},
        {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"add_generation_prompt": False, "messages": [*HELLO, {"role": "assistant", "content": "a"}], "continue_final_message": True},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
        *({"structured_outputs": {key: value}} for key, value in MAIN_KEYS.items()),
        *({"structured_outputs": {"json": SCHEMA, key: value}} for key, value in KEY_OPTIONS.items()),
        {"messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning": "r"}, *HELLO]},
        {"messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "r"}, *HELLO]},
    ],
    COMPLETIONS: [
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": 0, "logprob_token_ids": [5, 6]}, {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "logprobs": 1, "stream": True},
        {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "early_stopping": "never"},
        {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"prompt": [[1], [2, 3]]},
        *({"structured_outputs": {key: value}} for key, value in MAIN_KEYS.items()),
    ],
    MESSAGES: [
        {"tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}], "tool_choice": {"type": kind, **name}}
        for kind, name in (("any", {}), ("tool", {"name": "f"}), ("none", {}), ("any", {"disable_parallel_tool_use": True}))
    ] + [
        *({"structured_outputs": {key: value}} for key, value in MAIN_KEYS.items()),
        *({"structured_outputs": {"json": SCHEMA, key: value}} for key, value in KEY_OPTIONS.items()),
        {"messages": [*HELLO, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "a"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "r", "is_error": True,
                                          "cache_control": {"type": "ephemeral"}}]}]},
    ],
    RESPONSES: [
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "f"}},
        *({"structured_outputs": {key: value}} for key, value in MAIN_KEYS.items()),
        *({"structured_outputs": {"json": SCHEMA, key: value}} for key, value in KEY_OPTIONS.items()),
    ],
}  # fmt: skip
REFUSED: dict[str, Base] = {
    CHAT: {**UNSUPPORTED, **MEDIA, "chat_template": "{{ messages }}", "top_logprobs": 2, "stream_options": {"include_usage": True},
           "logprob_token_ids": [1], "tools": []},
    COMPLETIONS: {**UNSUPPORTED, "suffix": "x", "best_of": 5, "logprob_token_ids": [1]},
    MESSAGES: {**UNSUPPORTED, "n": 2, "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [1], "mcp_servers": [{"a": 1}],
               "chat_template": "{{ messages }}"},
    RESPONSES: {**UNSUPPORTED, "n": 2, "conversation": "c", "prompt": {"id": "p"}, "logprob_token_ids": [1], "chat_template": "{{ messages }}",
                "previous_response_id": "resp_none"},
}  # fmt: skip
IGNORED: dict[str, Base] = {
    CHAT: {"user": "u", "session_id": "s", "service_tier": "auto", "store": True, "metadata": {"a": "b"}, "guided_decoding_backend": "x",
           "thinking_token_budget": 5, "safety_identifier": "s", "prompt_cache_key": "k", "prediction": {"a": 1}, "verbosity": "low",
           "parallel_tool_calls": False},
    COMPLETIONS: {"user": "u", "session_id": "s", "guided_decoding_backend": "x", "metadata": {"a": "b"}, "thinking_token_budget": 5},
    MESSAGES: {"metadata": {"user_id": "u"}, "service_tier": "auto", "container": "c", "context_management": {"a": 1}, "betas": ["b"],
               "inference_geo": "eu", "frobnicate": 1},
    RESPONSES: {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "auto",
                "top_logprobs": 2, "previous_response": {"id": "r"}, "enable_response_messages": True, "frobnicate": 1,
                "thinking_token_budget": 5},
}  # fmt: skip


def cases(table: dict[str, Base]) -> list[Any]:
    return [
        pytest.param(path, {name: value}, id=f"{path}-{name}")
        for path, fields in table.items()
        for name, value in fields.items()
    ]


async def told(server: Any, path: str, changes: Base) -> tuple[int, str | None, str]:
    """Status, the list of what had no effect, and the body."""
    body = {**HONOURED[path][0], **changes}
    async with server.session.post(server.url + path, json=body) as reply:
        return reply.status, reply.headers.get("X-Oneloop-Ignored"), await reply.text()


@pytest.mark.parametrize(("path", "changes"), cases({path: fields for path, (_, fields) in HONOURED.items()}))
async def test_honoured(server: Any, path: str, changes: Base) -> None:
    status, ignored, body = await told(server, path, changes)
    assert (status, ignored) == (200, None), body


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        pytest.param(path, changes, id=f"{path}-{index}")
        for path, rows in TOGETHER.items()
        for index, changes in enumerate(rows)
    ],
)
async def test_honoured_with_what_they_need(server: Any, path: str, changes: Base) -> None:
    status, ignored, body = await told(server, path, changes)
    assert (status, ignored) == (200, None), body


@pytest.mark.parametrize(("path", "changes"), cases(REFUSED))
async def test_refused(server: Any, path: str, changes: Base) -> None:
    status, _, body = await told(server, path, changes)
    assert status == (404 if "previous_response_id" in changes else 400), body
    assert next(iter(changes)) in body


@pytest.mark.parametrize(("path", "changes"), cases(IGNORED))
async def test_listed_as_without_effect(serve: Any, server: Any, path: str, changes: Base) -> None:
    status, ignored, body = await told(server, path, changes)
    assert status == 200, body
    assert ignored is not None
    assert next(iter(changes)) in ignored.split(", ")
    async with serve(strict_fields=True) as strict:
        status, _, body = await told(strict, path, changes)
        assert status == 400
        assert next(iter(changes)) in body
