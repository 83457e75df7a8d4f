"""logprob_token_ids: the log-probabilities of tokens that a request names, beside every token's own."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from oneloop import LLM, SamplingParams
from oneloop.errors import RequestError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
NAMED = [101, 3, 250, 77, 101]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97, 123) for _ in range(length)]


def check(twin, prompt, tokens, shown, names=NAMED):
    """shown: per token (own, {id: logprob}) as a reply has them."""
    expected = twin.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
    assert len(shown) == len(tokens)
    for row, token, (own, named) in zip(expected, tokens, shown, strict=True):
        assert own == pytest.approx(row[token].item(), abs=1e-3)
        assert list(named) == list(dict.fromkeys(names))
        for token_id, value in named.items():
            assert value == pytest.approx(row[token_id].item(), abs=1e-3)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 64}], ids=["whole", "chunked"])
def test_they_are_the_models_own(make_llm, twin, settings):
    """Greedy, sampled, masked, penalised, several at once, forked, behind cached prompts: raw log-probabilities."""
    llm: LLM = make_llm(max_num_seqs=8, **settings)
    prompts = [prompt_of(length, length) for length in (5, 90, 33, 33)]
    params = [
        SamplingParams(max_tokens=9, logprob_token_ids=NAMED, seed=index, n=1 + index, **own)
        for index, own in enumerate(
            ({"temperature": 0}, {}, {"repetition_penalty": 1.5}, {"allowed_token_ids": list(range(97, 123))})
        )
    ]
    try:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
            for prompt, output in zip(prompts, outputs, strict=True):
                for sequence in output.outputs:
                    shown = [
                        (top[token].logprob, {name: top[name].logprob for name in dict.fromkeys(NAMED)})
                        for token, top in zip(sequence.token_ids, sequence.logprobs, strict=True)
                    ]
                    check(twin, prompt, sequence.token_ids, shown)
                    for token, top in zip(sequence.token_ids, sequence.logprobs, strict=True):
                        assert {name for name in top if top[name].rank is None} == set(NAMED) - {token}
    finally:
        llm.close()


async def test_over_every_route_whole_and_streamed(server, twin):
    prompt = prompt_of(20)
    asked = {"max_tokens": 6, "seed": 3, "ignore_eos": True, "logprob_token_ids": NAMED}
    body = {
        "prompt": prompt,
        "logprobs": 3,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **asked,
    }
    status, reply = await server.post(COMPLETIONS, **body)
    assert status == 200, reply
    (choice,) = reply["choices"]
    lists = [choice["logprobs"]]
    chunks = await server.stream(COMPLETIONS, **body)
    lists.append(joined([chunk["choices"][0]["logprobs"] for chunk in chunks]))
    for found in lists:
        named = [
            {int(name.partition(":")[2]): value for name, value in top.items()}
            for top in found["top_logprobs"]
        ]
        for top, token in zip(named, choice["token_ids"], strict=True):
            assert set(top) == {*NAMED, token}
        shown = [
            (own, {name: top[name] for name in dict.fromkeys(NAMED)})
            for own, top in zip(found["token_logprobs"], named, strict=True)
        ]
        check(twin, prompt, choice["token_ids"], shown)
    params = {"logprobs": 0, **asked}
    status, reply = await server.post(GENERATE, token_ids=prompt, sampling_params=params)
    assert status == 200, reply
    (choice,) = reply["choices"]
    check(twin, prompt, choice["token_ids"], of_chat(choice["logprobs"]["content"]))


async def test_chat_has_them_in_the_place_of_the_top_ones(server, twin):
    messages = [{"role": "user", "content": "hi"}]
    body = {
        "messages": messages, "logprobs": True, "max_tokens": 5, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "logprob_token_ids": NAMED, "ignore_eos": True, "n": 2, "seed": 1,
    }  # fmt: skip
    status, reply = await server.post(CHAT, **body)
    assert status == 200, reply
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    for choice in reply["choices"]:
        check(twin, reply["prompt_token_ids"], choice["token_ids"], of_chat(choice["logprobs"]["content"]))
    async with server.session.post(server.url + CHAT, json={**body, "top_logprobs": 2}) as answer:
        assert answer.headers["X-Oneloop-Ignored"] == "top_logprobs"
        again = (await answer.json())["choices"]
    assert [choice["token_ids"] for choice in again] == [choice["token_ids"] for choice in reply["choices"]]
    assert of_chat(again[0]["logprobs"]["content"])[0][1].keys() == set(NAMED)


def of_chat(content):
    number = lambda entry: int(entry["token"].partition(":")[2])  # noqa: E731
    return [
        (entry["logprob"], {number(top): top["logprob"] for top in entry["top_logprobs"]})
        for entry in content
    ]


def joined(parts):
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


async def test_neighbours_see_nothing_of_it(server):
    """What runs beside keeps its text and its log-probabilities."""
    body = {"prompt": prompt_of(15, 4), "max_tokens": 40, "seed": 8, "logprobs": 2, "ignore_eos": True}
    _, alone = await server.post(COMPLETIONS, **body)
    others = {"prompt": prompt_of(9), "max_tokens": 30, "logprobs": 0, "ignore_eos": True}
    replies = await asyncio.gather(
        server.post(COMPLETIONS, **body),
        *(server.post(COMPLETIONS, **others, logprob_token_ids=list(range(k, k + 128))) for k in range(4)),
    )
    assert [status for status, _ in replies] == [200] * 5
    assert replies[0][1]["choices"][0]["text"] == alone["choices"][0]["text"]
    found, expected = (reply["choices"][0]["logprobs"]["token_logprobs"] for reply in (replies[0][1], alone))
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "a", "logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [-1]}, "logprob_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [1.5]}, "logprob_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": "1"}, "logprob_token_ids"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprob_token_ids": [1]}, "logprob_token_ids"),
        (
            GENERATE,
            {"token_ids": [65], "sampling_params": {"logprob_token_ids": [1]}},
            "sampling_params.logprob_token_ids",
        ),
        (
            GENERATE,
            {"token_ids": [65], "sampling_params": {"logprobs": 1, "logprob_token_ids": [10**6]}},
            "sampling_params.logprob_token_ids",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "use_beam_search": True, "n": 2, "logprobs": 0, "logprob_token_ids": [1]},
            "logprobs",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "logprob_token_ids": [1]},
            None,
        ),
        ("/v1/responses", {"input": "a", "logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)  # fmt: skip
async def test_what_is_refused(server, path, body, field):
    status, reply = await server.post(path, **body)
    assert status == 400, reply
    assert "logprob" in reply["error"]["message"]
    if field is not None:
        assert reply["error"]["param"] == field


def test_the_python_api_checks_them(make_llm):
    llm: LLM = make_llm()
    try:
        for ids in ([-1], [10**6], list(range(129)), ["1"], 5):
            with pytest.raises(RequestError, match="logprob_token_ids"):
                llm.generate("a", SamplingParams(max_tokens=1, logprob_token_ids=ids))
    finally:
        llm.close()


def test_the_gathering_takes_rows_in_pieces(twin, monkeypatch):
    """More rows than logits exist at a time, with uneven lists: each number comes from its own row."""
    from oneloop.worker import prompt_results

    class Head:
        """Logits are a function of the row."""

        class spec:  # noqa: N801
            vocab_size = 40

        device = torch.device("cpu")
        dtype = torch.float32

        @staticmethod
        def compute_logits(hidden):
            return torch.sin(hidden @ torch.arange(88.0).reshape(2, 44)) * 3

    hidden = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(prompt_results, "SCORES_AT_ONCE", 4)
    index, lists = [8, 0, 0, 3, 5, 1, 2, 7, 6], [[1], [2, 3], [39], [0] * 5, [4, 5], [6], [7, 8, 9], [1], [2]]
    starts = [0]
    for one in lists:
        starts.append(starts[-1] + len(one))
    flat = torch.tensor([token for one in lists for token in one])
    found = prompt_results.PromptResults(Head()).pick(  # type: ignore[arg-type]
        hidden, torch.tensor(index), starts, torch.tensor(starts), flat
    )
    rows = Head.compute_logits(hidden)[:, :40].log_softmax(-1)
    expected = [rows[row, token] for row, one in zip(index, lists, strict=True) for token in one]
    torch.testing.assert_close(found, torch.stack(expected))
