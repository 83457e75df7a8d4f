"""Scoring and embeddings over HTTP, on a real model: the rows of public-bugs.md that need one, and T7's limits."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
GENERATE = "/inference/v1/generate"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97, 123) for _ in range(length)]


async def test_h05_an_echo_with_logprobs_sent_again_and_longer(server, twin):
    """Prefix hits change nothing: arrays equal, as long as the prompt and one more, first null, offsets right."""
    prompt = prompt_of(400)
    replies = []
    for ids in (prompt, prompt, [*prompt, *prompt_of(16, 1)]):
        status, reply = await server.post(
            COMPLETIONS, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        assert status == 200, reply
        (choice,) = reply["choices"]
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {len(ids) + 1}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        expected = twin.logprobs(ids)
        own = [expected[place - 1, ids[place]].item() for place in range(1, len(ids))]
        assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-3)
        best = expected.max(-1).values.tolist()
        assert [max(top.values()) for top in found["top_logprobs"][1:-1]] == pytest.approx(best, abs=1e-3)
        check_offsets(choice)
        replies.append(found["token_logprobs"])
    assert replies[1][1:] == pytest.approx(replies[0][1:], abs=1e-3)
    assert replies[2][1:400] == pytest.approx(replies[0][1:400], abs=1e-3)


def check_offsets(choice):
    """Each token's text stands where its offset says, up to where the next one begins."""
    text, found = choice["text"], choice["logprobs"]
    ends = [*found["text_offset"][1:], len(text)]
    for token, start, end in zip(found["tokens"], found["text_offset"], ends, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[start:end] == token


async def test_the_recipe_of_lm_eval(server, twin):
    """max_tokens 0, echo, logprobs k, several prompts of ids: choice i is about prompt i, and nothing is generated."""
    prompts = [prompt_of(length, length) for length in (3, 50, 1, 17)]
    status, reply = await server.post(
        COMPLETIONS, prompt=prompts, echo=True, logprobs=5, max_tokens=0, temperature=0
    )
    assert status == 200, reply
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply["usage"]["completion_tokens"] == 0
    for index, (prompt, choice) in enumerate(zip(prompts, reply["choices"], strict=True)):
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        pieces = [server.engine.tokenizer.token_bytes(token) for token in prompt]
        assert choice["text"] == b"".join(pieces).decode(errors="replace")
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(prompt)
        check_offsets(choice)
        expected = twin.logprobs(prompt)
        own = [expected[place - 1, prompt[place]].item() for place in range(1, len(prompt))]
        assert found["token_logprobs"] == [None, *(pytest.approx(value, abs=1e-3) for value in own)]
        for place, tops in enumerate(found["top_logprobs"][1:], start=1):
            assert len(tops) in (5, 6)  # the token itself beside the five likeliest
            assert max(tops.values()) == pytest.approx(expected[place - 1].max().item(), abs=1e-3)


async def test_an_echo_of_text_with_special_tokens_and_characters_of_several_bytes(server):
    text = "<|im_start|>naïve 語"
    status, reply = await server.post(
        COMPLETIONS, prompt=text, echo=True, logprobs=0, max_tokens=2, ignore_eos=True
    )
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["text"].startswith(text)
    assert choice["logprobs"]["tokens"][0] == "<|im_start|>"
    assert choice["logprobs"]["text_offset"][:4] == [0, 12, 13, 14]
    assert choice["logprobs"]["text_offset"][len(text.encode()) - 11] == len(text)
    status, without = await server.post(
        COMPLETIONS, prompt=text, echo=True, max_tokens=2, ignore_eos=True, temperature=0
    )
    status, with_them = await server.post(
        COMPLETIONS, prompt=text, echo=True, logprobs=3, max_tokens=2, ignore_eos=True, temperature=0
    )
    assert without["choices"][0]["text"] == with_them["choices"][0]["text"]


async def test_the_field_prompt_logprobs(server, twin):
    prompt = prompt_of(30)
    status, reply = await server.post(
        COMPLETIONS, prompt=prompt, prompt_logprobs=2, max_tokens=3, n=2, temperature=0
    )
    assert status == 200, reply
    for choice in reply["choices"]:
        check_field(choice["prompt_logprobs"], prompt, twin.logprobs(prompt), 2)
        assert choice["logprobs"] is None
    messages = [{"role": "user", "content": "hello"}]
    status, reply = await server.post(CHAT, messages=messages, prompt_logprobs=0, max_tokens=3)
    assert status == 200, reply
    rendered = server.engine.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    check_field(reply["prompt_logprobs"], rendered, twin.logprobs(rendered), 0)


def check_field(field, prompt, expected, num_top):
    assert field[0] is None
    assert len(field) == len(prompt)
    for place, entry in enumerate(field[1:], start=1):
        row, own = expected[place - 1], str(prompt[place])
        assert next(iter(entry)) == own
        assert len(entry) in (num_top, num_top + 1)
        for token, found in entry.items():
            assert found["logprob"] == pytest.approx(row[int(token)].item(), abs=1e-3)
            assert found["rank"] == int((row > row[int(token)]).sum()) + 1


async def test_h18_the_context_is_scored_to_its_last_token(server):
    context = server.engine.model_info.max_model_len
    for length, options, expected in [
        (context - 1, {"max_tokens": 1}, 200),
        (context, {"max_tokens": 1}, 400),
        (context, {"max_tokens": 0, "echo": True, "logprobs": 1}, 200),
        (context, {"max_tokens": 0, "prompt_logprobs": 1}, 200),
        (context, {}, 400),
        (context + 1, {"max_tokens": 0, "echo": True, "logprobs": 1}, 400),
        (context - 2, {"max_tokens": 10 * context}, 400),
    ]:
        status, reply = await server.post(COMPLETIONS, prompt=prompt_of(length), **options)
        assert status == expected, (length, options, reply)
        if status == 400:
            assert str(context) in reply["error"]["message"]
            assert "context_length_exceeded" in reply["error"]["message"]


async def test_h08_a_bias_past_the_vocabulary_disturbs_nobody(server):
    other = asyncio.create_task(
        server.post(COMPLETIONS, prompt=prompt_of(20), max_tokens=100, temperature=0, ignore_eos=True)
    )
    await asyncio.sleep(0.02)
    vocab_size = server.engine.model_info.vocab_size
    for bias in ({str(vocab_size + 100): 5}, {"-1": 1}, {"abc": 1}, {"5": 101}):
        status, _ = await server.post(COMPLETIONS, prompt="x", max_tokens=1, logit_bias=bias)
        assert status == 400, bias
    legal = {str(token): (token % 201) - 100 for token in range(250)}
    assert (await server.post(COMPLETIONS, prompt="x", max_tokens=1, logit_bias=legal))[0] == 200
    status, reply = await other
    again = await server.post(
        COMPLETIONS, prompt=prompt_of(20), max_tokens=100, temperature=0, ignore_eos=True
    )
    assert (status, reply["choices"]) == (200, again[1]["choices"])


async def test_h06_every_choice_comes_and_a_seed_repeats_them(server):
    async def one(number):
        stop = {"stop": ["a", "e"]} if number % 2 else {}
        status, reply = await server.post(
            COMPLETIONS, prompt=prompt_of(20, number), n=8, temperature=1, max_tokens=16, seed=number, **stop
        )
        assert status == 200
        assert [choice["index"] for choice in reply["choices"]] == list(range(8))
        return [choice["text"] for choice in reply["choices"]]

    for start in range(0, 30, 10):
        first = await asyncio.gather(*(one(number) for number in range(start, start + 10)))
        again = await asyncio.gather(*(one(number) for number in range(start, start + 10)))
        assert first == again
        assert all(len(set(texts)) > 1 for texts in first[::2])


@pytest.mark.parametrize("n", [1, 3])
async def test_h10_usage_with_a_cold_and_a_warm_prompt(server, n):
    prompt = "a" * 40
    body = {"prompt": prompt, "max_tokens": 37, "ignore_eos": True, "n": n, "temperature": 1, "seed": 1}
    for round_number in range(2):
        events = await server.stream(COMPLETIONS, **body, stream_options={"include_usage": True})
        _, whole = await server.post(COMPLETIONS, **body)
        usage = events[-1]["usage"]
        assert events[-1]["choices"] == []
        assert all(event["usage"] is None for event in events[:-1])
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 37 * n)
        assert usage["prompt_tokens_details"]["cached_tokens"] == (32 if round_number else 0)
        assert {**whole["usage"], "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}


async def test_embeddings(server, twin):
    ids = [prompt_of(20), prompt_of(7, 1)]
    status, reply = await server.post(EMBEDDINGS, input=ids, model="twin", user="somebody")
    assert status == 200, reply
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 27
    for index, (entry, prompt) in enumerate(zip(reply["data"], ids, strict=True)):
        vector = twin.hidden(prompt)[-1].numpy()
        assert (entry["object"], entry["index"]) == ("embedding", index)
        assert entry["embedding"] == pytest.approx(vector / np.linalg.norm(vector), abs=1e-3)
    status, reply = await server.post(
        EMBEDDINGS, input="hello", encoding_format="base64", normalize=False, pooling="mean"
    )
    vector = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    assert vector == pytest.approx(
        twin.hidden(server.engine.tokenizer.encode("hello")).mean(0).numpy(), abs=1e-3
    )
    cut = {"truncate_prompt_tokens": 3}
    for changes, kept in (({}, ids[0][-3:]), ({"truncation_side": "right"}, ids[0][:3])):
        _, short = await server.post(EMBEDDINGS, input=ids[0], **cut, **changes)
        _, expected = await server.post(EMBEDDINGS, input=kept)
        assert short["data"] == expected["data"]
        assert short["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input[0]"),
        ({"input": ["a", 1]}, "input[1]"), ({"input": [-1]}, "input"), ({"input": [10**9]}, "input"),
        ({"input": "x", "dimensions": 16}, "dimensions"), ({"input": "x", "dimensions": -1}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"), ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 2**40}, "truncate_prompt_tokens"),
        ({"input": "x" * 600}, "input"), ({"input": ["x"] * 10**5}, "input"),
        ({"input": "x", "priority": 1}, "priority"),
        ({"input": "x", "normalize": "yes"}, "normalize"), ({"messages": []}, "messages"),
        ({"input": "x", "cache_salt": "s" * 200}, "cache_salt"),
    ],
)  # fmt: skip
async def test_embeddings_that_are_refused(server, body, param):
    status, reply = await server.post(EMBEDDINGS, **body)
    assert (status, reply["error"]["param"]) == (400, param), reply


T7 = [
    {"n": 10**9}, {"best_of": 10**9}, {"max_tokens": 2**63}, {"logprobs": 10**9}, {"prompt_logprobs": -1},
    {"prompt_logprobs": 260}, {"min_tokens": 10**12}, {"seed": 2**70}, {"top_k": -2}, {"top_k": 2**40},
    {"stop": ["x"] * 10**5}, {"stop": "x" * (10 << 20)}, {"logit_bias": {str(key): 1 for key in range(10**6)}},
    {"bad_words": ["x"] * 10**5}, {"stop_token_ids": [1] * 10**6}, {"priority": 2**70}, {"priority": -(2**70)},
    {"cache_salt": "s" * (1 << 20)}, {"logprob_token_ids": [1] * 129},
]  # fmt: skip


T7_BODIES = [json.dumps({"prompt": "x", **fields}).encode() for fields in T7]


async def test_t7_numbers_without_bounds_are_refused_while_others_stream(server):
    """400 within a second each, and nobody else's stream stalls."""
    gaps = []

    async def watch():
        body = {"prompt": prompt_of(10), "max_tokens": 480, "ignore_eos": True, "stream": True}
        async with server.session.post(server.url + COMPLETIONS, json=body) as reply:
            last = time.monotonic()
            async for _ in reply.content:
                now = time.monotonic()
                gaps.append(now - last)
                last = now

    bodies = [*T7_BODIES]
    bodies.append(json.dumps({"prompt": prompt_of(480), "prompt_logprobs": 260}).encode())
    watching = asyncio.create_task(watch())
    for body in bodies:
        began = time.monotonic()
        headers = {"Content-Type": "application/json"}
        async with server.session.post(
            server.url + COMPLETIONS, data=io.BytesIO(body), headers=headers
        ) as reply:
            assert reply.status in (400, 413), (body[:80], await reply.text())
        assert time.monotonic() - began < 2
    await watching
    assert len(gaps) > 100


@pytest.mark.parametrize("prompts", ["text", "ids", "several"])
async def test_a_streamed_echo_with_logprobs_says_what_the_whole_reply_says(server, prompts):
    """The first chunk of each choice has the prompt and its numbers, and all chunks together are the whole reply."""
    prompt = {
        "text": "naïve 語 <|im_start|>",
        "ids": prompt_of(60),
        "several": ["a", "hello there", "a longer one"],
    }
    body = {
        "prompt": prompt[prompts], "echo": True, "logprobs": 2, "max_tokens": 5, "seed": 1, "ignore_eos": True, "n": 2,
    }  # fmt: skip
    for limits in ({}, {"max_tokens": 0, "n": 1}, {"n": 1, "stream_options": {"include_usage": True}}):
        asked = {**body, **limits}
        _, whole = await server.post(COMPLETIONS, **{**asked, "stream_options": None})
        chunks = await server.stream(COMPLETIONS, **asked)
        if "stream_options" in limits:
            assert chunks.pop()["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert own[0]["logprobs"]["token_logprobs"][0] is None
            assert len(own[0]["logprobs"]["tokens"]) >= 1
            for name, values in choice["logprobs"].items():
                assert [value for c in own for value in c["logprobs"][name]] == values
            assert own[-1]["finish_reason"] == choice["finish_reason"]


async def test_a_client_that_leaves_before_its_echo_is_known_leaves_nothing(server):
    body = {"prompt": prompt_of(450), "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    port = int(server.url.rpartition(":")[2])
    for _ in range(4):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
    async with asyncio.timeout(10):
        while server.engine.stats().num_running or server.engine.stats().num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert server.engine.stats().num_used_blocks == 0
    chunks = await server.stream(COMPLETIONS, **body)
    assert len(chunks[0]["choices"][0]["logprobs"]["tokens"]) == 450


@pytest.mark.parametrize(
    ("sizes", "good", "bad"),
    [(None, [32], [16, 33, 0]), ((), [32, 1, 16], [33, 0, -1, 10**30]), ((8, 32), [8, 32], [16])],
)  # fmt: skip
async def test_dimensions_where_the_model_says_so(server, monkeypatch, sizes, good, bad):
    """The first numbers of the whole vector, of length 1 again unless that is switched off."""
    info = replace(server.engine.model_info, short_vectors=sizes)
    monkeypatch.setattr(type(server.engine), "model_info", property(lambda _: info))
    _, reply = await server.post(EMBEDDINGS, input="hello", normalize=False)
    whole = np.array(reply["data"][0]["embedding"])
    for size in good:
        for normalize in (True, False):
            status, reply = await server.post(EMBEDDINGS, input="hello", dimensions=size, normalize=normalize)
            assert status == 200, reply
            cut = whole[:size]
            expected = cut / np.linalg.norm(cut) if normalize else cut
            assert np.array(reply["data"][0]["embedding"]) == pytest.approx(expected, abs=1e-6)
    for size in bad:
        status, reply = await server.post(EMBEDDINGS, input="hello", dimensions=size)
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, "dimensions", 400), reply


async def test_t9_token_ids_that_are_none_beside_a_neighbour(server):
    """Each is refused by name, wherever a client may put it, and who runs in the same batch keeps its text."""
    size = server.engine.model_info.vocab_size
    assert size > len(server.engine.tokenizer.vocabulary), "rows of the model that are no token"
    golden = {"prompt": prompt_of(20), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    _, alone = await server.post(COMPLETIONS, **golden)
    neighbour = asyncio.create_task(server.post(COMPLETIONS, **golden))
    await asyncio.sleep(0.05)
    asked = {"prompt": "x", "max_tokens": 2}

    def generate(params):
        return {"token_ids": [65], "sampling_params": params}

    for bad in (size, -1, 999_999_999, 2**40):
        for path, body, field in (
            (COMPLETIONS, {**asked, "prompt": [65, bad]}, "prompt"),
            (COMPLETIONS, {**asked, "prompt": [[65], [bad]]}, "prompt[1]"),
            (COMPLETIONS, {**asked, "logit_bias": {str(bad): 1}}, "logit_bias"),
            (COMPLETIONS, {**asked, "stop_token_ids": [bad]}, "stop_token_ids"),
            (COMPLETIONS, {**asked, "stop_token_ids": [bad], "min_tokens": 1}, "stop_token_ids"),
            (COMPLETIONS, {**asked, "allowed_token_ids": [65, bad]}, "allowed_token_ids"),
            (COMPLETIONS, {**asked, "logprobs": 0, "logprob_token_ids": [65, bad]}, "logprob_token_ids"),
            (GENERATE, {"token_ids": [65, bad]}, "token_ids"),
            (GENERATE, generate({"logit_bias": {str(bad): 1}}), "sampling_params.logit_bias"),
            ("/detokenize", {"tokens": [bad]}, "tokens"),
            (EMBEDDINGS, {"input": [65, bad]}, "input"),
        ):  # fmt: skip
            status, reply = await server.post(path, **body)
            assert (status, reply["error"]["param"]) == (400, field), (bad, path, reply)
            assert not neighbour.done(), "the neighbour must have run meanwhile"
    for field, value in (
        ("prompt", [65, size - 1]),
        ("stop_token_ids", [size - 1]),
        ("allowed_token_ids", [65, size - 1]),
    ):
        status, reply = await server.post(COMPLETIONS, **{**asked, field: value})
        assert status == 200, reply
    status, reply = await neighbour
    assert status == 200
    assert reply["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"prompt": prompt_of(40), "n": 8, "prompt_logprobs": 20}, "n"),
        ({"prompt": [prompt_of(40)] * 8, "prompt_logprobs": 20}, "prompt"),
        ({"prompt": prompt_of(40), "n": 8, "echo": True, "logprobs": 20}, "n"),
        ({"prompt": "a" * 40, "n": 8, "return_token_ids": True, "return_token_offsets": True}, "n"),
        ({"prompt": "a" * 40, "n": 8, "return_prompt_text": True, "echo": True}, "n"),
    ],
)
async def test_what_is_repeated_of_prompts_is_bounded_over_all_choices(server, monkeypatch, asked, field):
    """Each choice repeats it: a request of a few hundred kilobytes could ask for gigabytes, made at once."""
    status, _ = await server.post(COMPLETIONS, max_tokens=1, **asked)
    assert status == 200
    monkeypatch.setattr("oneloop.api.handlers.prompt.MAX_TOLD_BYTES", 8 * 40 * 10 - 1)
    status, reply = await server.post(COMPLETIONS, max_tokens=1, **asked)
    assert (status, reply["error"]["param"]) == (400, field)
    assert "would repeat" in reply["error"]["message"]
    one = {**asked, "prompt": asked["prompt"][0][:2] if field == "prompt" else asked["prompt"][:2], "n": 1}
    assert (await server.post(COMPLETIONS, max_tokens=1, **one))[0] == 200


async def test_a_message_that_is_echoed_is_bounded_over_all_choices(server, monkeypatch):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 40}]
    asked = {
        "messages": messages,
        "echo": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    monkeypatch.setattr("oneloop.api.handlers.prompt.MAX_TOLD_BYTES", 8 * 40 - 1)
    for n, expected in ((7, 200), (8, 400)):
        status, reply = await server.post(CHAT, max_tokens=1, n=n, **asked)
        assert status == expected, reply
    assert reply["error"]["param"] == "n"
