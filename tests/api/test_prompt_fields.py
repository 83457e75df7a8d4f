"""Fields about prompts: what is kept of them, what is told back, what they are made of; and --strict-fields."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from oneloop import AsyncEngine
from oneloop.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
HELLO = [{"role": "user", "content": "hello 日本"}]
TEXT = "[user]hello 日本[assistant]"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def chunks_of(events: list[str]) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events if event != "[DONE]"]


async def test_token_ids_told_back(server: Any) -> None:
    asked = {"messages": HELLO, "max_tokens": 12, "seed": 2, "n": 2, "return_token_ids": True}
    _, whole = await server.post(CHAT, asked)
    assert whole["prompt_token_ids"] == list(TEXT.encode())
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert [bytes(token for token in some if token < 256).decode(errors="replace") for some in ids] == [
        choice["message"]["content"] for choice in whole["choices"]
    ]
    chunks = chunks_of(await server.stream(CHAT, asked))
    told = [chunk for chunk in chunks if "prompt_token_ids" in chunk]
    assert [chunk["choices"][0]["delta"].get("role") for chunk in told] == ["assistant"] * 2
    assert all(chunk["prompt_token_ids"] == whole["prompt_token_ids"] for chunk in told)
    streamed: list[list[int]] = [[], []]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == ids


async def test_token_ids_told_back_by_completions(server: Any) -> None:
    asked = {
        "prompt": ["a", "日"],
        "max_tokens": 5,
        "seed": 2,
        "return_token_ids": True,
        "return_prompt_text": True,
    }
    _, whole = await server.post(COMPLETIONS, asked)
    prompts = [[256, 97], [256, *"日".encode()]]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
    assert [choice["prompt_text"] for choice in whole["choices"]] == ["a", "日"]
    chunks = chunks_of(await server.stream(COMPLETIONS, asked))
    streamed: dict[int, list[int]] = {0: [], 1: []}
    first: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert choice["index"] not in first
            first[choice["index"]] = choice["prompt_token_ids"]
    assert [first[0], first[1]] == prompts
    assert [streamed[0], streamed[1]] == [choice["token_ids"] for choice in whole["choices"]]


async def test_nothing_is_told_that_was_not_asked(server: Any) -> None:
    _, whole = await server.post(CHAT, {"messages": HELLO, "max_tokens": 3})
    names = {"prompt_token_ids", "prompt_text", "prompt_token_offsets", "token_ids"}
    assert not names & (set(whole) | set(whole["choices"][0]))


async def test_text_and_offsets_told_back(server: Any) -> None:
    asked = {"messages": HELLO, "max_tokens": 3, "return_prompt_text": True, "return_token_offsets": True}
    _, whole = await server.post(CHAT, asked)
    assert whole["prompt_text"] == TEXT
    shown = [TEXT[start:end] for start, end in whole["prompt_token_offsets"]]
    assert len(shown) == len(TEXT.encode())
    assert shown[12:15] == ["日"] * 3
    _, found = await server.post(TOKENIZE, {"prompt": "日", "return_token_offsets": True})
    assert found["token_offsets"] == [[0, 0], [0, 1], [0, 1], [0, 1]]


async def test_tokens_named_by_their_ids(server: Any) -> None:
    asked = {
        "messages": HELLO,
        "seed": 3,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    _, whole = await server.post(CHAT, {**asked, "return_token_ids": True})
    (choice,) = whole["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    streamed = [
        entry["token"]
        for chunk in chunks_of(await server.stream(CHAT, asked))
        for choice in chunk["choices"]
        for entry in (choice.get("logprobs") or {"content": []})["content"]
    ]
    assert streamed == [entry["token"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, [256, *b"def"]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, [256, *b"abc"]),
        ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, [*b"cdef"]),
        ({"truncate_prompt_tokens": 256}, [256, *b"abcdef"]),
        ({"truncate_prompt_tokens": -1}, [256, *b"abcdef"]),
        ({"truncation_side": "right"}, [256, *b"abcdef"]),
    ],
)
async def test_truncation(server: Any, fields: dict[str, Any], expected: list[int]) -> None:
    assert (await server.post(COMPLETIONS, {"prompt": "abcdef", "max_tokens": 2, **fields}))[0] == 200
    assert server.engine.submitted[-1][0] == expected
    assert (await server.post(TOKENIZE, {"prompt": "abcdef", **fields}))[1]["tokens"] == expected


async def test_truncation_of_ids_and_of_conversations(server: Any) -> None:
    _, reply = await server.post(
        COMPLETIONS, {"prompt": [[1, 2, 3], [4]], "max_tokens": 1, "truncate_prompt_tokens": 2}
    )
    assert [one[0] for one in server.engine.submitted] == [[2, 3], [4]]
    assert reply["usage"]["prompt_tokens"] == 3
    await server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "truncate_prompt_tokens": 11})
    assert bytes(server.engine.submitted[-1][0]) == b"[assistant]"


@pytest.mark.parametrize(("max_tokens", "room"), [(10, 10), (None, 1)])
async def test_as_much_as_the_model_takes(server: Any, max_tokens: int | None, room: int) -> None:
    """-1: what the context holds before the answer that was asked for, however long the text is."""
    text = "x" * 3000 + "y" * 400
    asked = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "truncate_prompt_tokens": -1,
    }
    status, reply = await server.post(CHAT, asked)
    assert status == 200, reply
    assert bytes(server.engine.submitted[-1][0]) == b"y" * (256 - room - 11) + b"[assistant]"
    assert (await server.post(CHAT, {**asked, "truncate_prompt_tokens": None}))[0] == 400


async def test_echo_of_a_turn_that_goes_on(server: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    asked = {"messages": messages, "max_tokens": 6, "seed": 1, "continue_final_message": True}
    _, plain = await server.post(CHAT, asked)
    _, echoed = await server.post(CHAT, {**asked, "echo": True})
    expected = "Sure, " + plain["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == expected
    chunks = chunks_of(await server.stream(CHAT, {**asked, "echo": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Sure, "}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == expected
    _, other = await server.post(CHAT, {"messages": HELLO, "max_tokens": 3, "seed": 1, "echo": True})
    assert not other["choices"][0]["message"]["content"].startswith("hello")


async def test_documents_tools_and_effort_reach_the_template(server: Any) -> None:
    body = {"messages": HELLO, "documents": [{"text": "one"}], "tools": [TOOL], "reasoning_effort": "low"}
    _, found = await server.post(TOKENIZE, body)
    assert bytes(found["tokens"]).decode() == "[tool:f][document:one][user]hello 日本effort: low[assistant]"
    _, found = await server.post(TOKENIZE, {"messages": HELLO, "reasoning_effort": "none"})
    assert b"enable_thinking: False" in bytes(found["tokens"])


async def test_parts_and_thoughts(server: Any) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "refusal", "refusal": "b"},
        {"type": "thinking", "thinking": "c"},
    ]
    _, found = await server.post(TOKENIZE, {"messages": [{"role": "assistant", "content": parts}]})
    assert bytes(found["tokens"]).decode() == "[assistant]a\nb[assistant]"


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "B"},
        ],
        [{"role": "system", "content": ""}, {"role": "user", "content": "B"}],
        [
            {"role": "user", "content": "A"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ],
    ],
)
async def test_empty_contents_are_empty_texts(serve: Any, messages: list[Any]) -> None:
    """H16, through the real renderer."""
    async with real(serve) as server:
        status, found = await server.post(TOKENIZE, {"messages": messages, "return_token_strs": True})
        assert status == 200
        text = "".join(found["token_strs"])
        assert "None" not in text
        assert text.count("<|im_start|>") == len(messages) + 1
        assert (await server.post(CHAT, {"messages": messages, "max_tokens": 2}))[0] == 200


@pytest.fixture
def begun_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model, whose texts begin with a token that its template writes too."""
    folder = tmp_path / "begun"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|im_start|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


async def test_begin_tokens_on_all_routes(serve: Any, begun_model: Path) -> None:
    """H17: one where the flag says so or the text has it, never two; a leading space stays."""
    async with real(serve, model=str(begun_model), load_format="dummy") as server:
        bos = server.engine.tokenizer.bos_token_id

        async def on_all_routes(**body: Any) -> list[int]:
            is_chat = "messages" in body
            path = CHAT if is_chat else COMPLETIONS
            tokens: list[int] = (await server.post(TOKENIZE, body))[1]["tokens"]
            rendered = (await server.post(f"{path}/render", body))[1]
            assert (rendered if is_chat else rendered[0])["token_ids"] == tokens
            _, reply = await server.post(path, {**body, "max_tokens": 1, "return_token_ids": True})
            told = reply if is_chat else reply["choices"][0]
            assert told["prompt_token_ids"] == tokens
            assert reply["usage"]["prompt_tokens"] == len(tokens)
            return tokens

        for text in (" a", "<|im_start|> a"):
            plain = await on_all_routes(prompt=text, add_special_tokens=False)
            begun = await on_all_routes(prompt=text, add_special_tokens=True)
            assert begun == await on_all_routes(prompt=text)
            space_and_a = server.engine.tokenizer.encode(" a", add_special_tokens=False)
            assert len(space_and_a) == 2
            assert begun == [bos, *space_and_a]
            assert plain == begun[text == " a" :]
        chat = await on_all_routes(messages=HELLO)
        assert chat == await on_all_routes(messages=HELLO, add_special_tokens=True)
        assert (chat[0], chat[1] == bos, chat.count(bos)) == (bos, False, 2)


STRICT = [
    (CHAT, {"messages": HELLO, "temprature": 1}, "temprature"),
    (CHAT, {"messages": HELLO, "user": "me"}, "user"),
    (CHAT, {"messages": [{**HELLO[0], "cache_control": {}}]}, "messages[0].cache_control"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "b": 1}]}]},
     "messages[0].content[0].b"),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (CHAT, {"messages": HELLO, "tools": [{**TOOL, "x": 1}], "tool_choice": "none"}, "tools[0].x"),
    (CHAT, {"messages": HELLO, "tools": [{**TOOL, "function": {"name": "f", "returns": {}}}], "tool_choice": "none"},
     "tools[0].function.returns"),
    (COMPLETIONS, {"prompt": "a", "user": "me"}, "user"), (TOKENIZE, {"prompt": "a", "x": 1}, "x"),
    (TOKENIZE, {"messages": [{**HELLO[0], "x": 1}]}, "messages[0].x"), ("/detokenize", {"tokens": [97], "x": 1}, "x"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ("/v1/chat/completions/render", {"messages": HELLO, "x": 1}, "x"),
    ("/derender", {"generate_response": {"request_id": "x", "choices": [{"x": 1}]}}, "generate_response.choices[0].x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "name"), STRICT, ids=lambda value: str(value)[:40])
async def test_strict_fields(serve: Any, server: Any, path: str, body: dict[str, Any], name: str) -> None:
    """Named in the header, or a 400 that names them."""
    body = {"max_tokens": 2, **body} if path in (CHAT, COMPLETIONS) else body
    async with server.session.post(server.url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["X-Oneloop-Ignored"] == name
    async with serve(strict_fields=True) as strict:
        status, answer = await strict.post(path, body)
        assert (status, answer["error"]["param"]) == (400, name)
        assert not strict.engine.submitted


async def test_what_a_strict_server_takes(serve: Any) -> None:
    async with serve(strict_fields=True) as server:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            *HELLO,
            {"role": "assistant", "content": None, "refusal": None, "reasoning": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
        body = {"messages": messages, "max_tokens": 2, "chat_template_kwargs": {"any": 1}, "stream": True}
        await server.stream(CHAT, {**body, "stream_options": {"include_usage": True}})


async def test_the_tokenizers_description(serve: Any, server: Any) -> None:
    assert (await server.get("/tokenizer_info"))[0] == 404
    async with real(serve, enable_tokenizer_info_endpoint=True) as described:
        status, text = await described.get("/tokenizer_info")
        found = json.loads(text)
        assert status == 200
        assert (found["vocab_size"], found["eos_token"], found["eos_token_ids"]) == (258, "<|im_end|>", [257])
        assert "<|im_start|>" in found["chat_template"]


@asynccontextmanager
async def real(serve: Any, **settings: Any) -> AsyncIterator[Any]:
    """A server over the real engine, without steps that take time."""
    ours = {"enable_tokenizer_info_endpoint", "trust_request_chat_template"}
    server_settings = {name: value for name, value in settings.items() if name in ours}
    engine_settings = {name: value for name, value in settings.items() if name not in ours}
    config = EngineConfig.from_flat({"executor": "null", "max_num_seqs": 8, **engine_settings})
    async with AsyncEngine(config) as engine:
        engine.paused = asyncio.Event()  # type: ignore[attr-defined]  # as the double's, which `serving` lets go
        async with serve(engine, **server_settings) as server:
            yield server


LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
HOSTILE = [
    LOOPS,
    "{{ 'a' * 10**9 }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for %}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no') }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
]


@pytest.mark.parametrize("template", HOSTILE, ids=lambda template: template[:30])
async def test_templates_of_requests(serve: Any, template: str) -> None:
    """T6: refused without the operator's word; with it, still in the sandbox and bounded, and others go on."""
    asked = {"messages": HELLO, "max_tokens": 2, "chat_template": template}
    async with real(serve) as server:
        status, answer = await server.post(CHAT, asked)
        assert (status, answer["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in answer["error"]["message"]
    async with real(serve, trust_request_chat_template=True) as server:
        began = time.monotonic()
        hostile = [asyncio.create_task(server.post(path, asked)) for path in (CHAT, TOKENIZE, "/render")]
        num_served = 0
        while not all(task.done() for task in hostile):
            assert (await server.post(CHAT, {"messages": HELLO, "max_tokens": 2}))[0] == 200
            num_served += 1
        assert num_served
        assert time.monotonic() - began < 15
        for task in hostile:
            status, answer = task.result()
            assert status == 400
            assert not any(word in answer["error"]["message"] for word in ("class '", "/usr", ".py", "root:"))


async def test_a_models_own_template_is_no_more_trusted(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    """T5 on every route that renders: an error for who asks, and others' texts meanwhile."""
    folder = tmp_path / "hostile"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": LOOPS}))
    async with real(serve, model=str(folder), load_format="dummy") as server:
        asked = {"messages": HELLO, "max_tokens": 2}
        routes = [(path, asked) for path in (CHAT, TOKENIZE, "/render", f"{CHAT}/render", "/v1/messages")]
        routes += [("/v1/messages/count_tokens", {"messages": HELLO})]
        routes += [(path, {"input": "hello"}) for path in ("/v1/responses", "/v1/responses/render")]
        rendering = [asyncio.create_task(server.post(path, body)) for path, body in routes]
        num_served = 0
        while not all(task.done() for task in rendering):
            assert (await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}))[0] == 200
            num_served += 1
        assert num_served
        for task in rendering:
            status, answer = task.result()
            assert (status, answer["error"]["message"]) == (400, "the chat template ran longer than 1 s")


async def test_a_template_of_the_request(serve: Any) -> None:
    async with real(serve, trust_request_chat_template=True) as server:
        body = {"messages": HELLO, "chat_template": "{{ messages[0].content }}"}
        _, found = await server.post(TOKENIZE, body)
        assert bytes(found["tokens"]).decode() == "hello 日本"
        _, found = await server.post(TOKENIZE, {"messages": HELLO})
        assert len(found["tokens"]) > 20
        status, answer = await server.post(TOKENIZE, {**body, "chat_template": "x" * 70_000})
        assert (status, answer["error"]["param"]) == (400, "chat_template")
