"""Scores and beams beside what binds tokens, and in the routes that take tokens. On a real model, over HTTP."""

from __future__ import annotations

import pytest

from oneloop.engine.constraints import TokenConstraints
from oneloop.engine.params import BeamSearch, SamplingParams
from oneloop.errors import RequestError
from oneloop_core import Grammar

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
PROMPT = [ord(letter) for letter in "a prompt of letters"]
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 4}


def check_scores(found, twin):
    """found: the wire's prompt_logprobs of PROMPT."""
    expected = twin.logprobs(PROMPT)
    assert found[0] is None
    assert len(found) == len(PROMPT)
    for place, entry in enumerate(found[1:]):
        token = PROMPT[place + 1]
        assert entry[str(token)]["logprob"] == pytest.approx(expected[place, token].item(), abs=1e-3)


@pytest.mark.parametrize(
    ("binding", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"allowed_token_ids": [97, 98]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_what_binds_tokens_binds_no_beams(server, binding, param):
    for path, body in (
        (COMPLETIONS, {"prompt": PROMPT}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, reply = await server.post(path, **body, **BEAMS, **binding)
        assert (status, reply["error"]["param"]) == (400, param), reply
        assert "beam" in reply["error"]["message"]


@pytest.mark.parametrize(
    "constraints",
    [
        TokenConstraints(grammar=Grammar.from_automaton([{1: 0}])),
        TokenConstraints(thinking_budget=3, thinking_end=(5,)),
    ],
    ids=["grammar", "thinking"],
)
async def test_what_a_format_binds_binds_no_beams(server, constraints):
    """As a call that must come does, whatever route asked for it."""
    params = SamplingParams(n=2, max_tokens=4, beam_search=BeamSearch())
    with pytest.raises(RequestError, match="use_beam_search"):
        await server.engine.submit(PROMPT, params, constraints=constraints)
    stream = await server.engine.submit(PROMPT, params)
    assert not server.engine.end_thinking(stream.request_id, [5])
    assert {delta.index for delta in await stream.all_deltas()} == {0, 1}


async def test_scores_of_prompts_whose_answers_are_bound(server, twin):
    """The step's results are written before its sampling, which waits for masks."""
    allowed = server.engine.tokenizer.encode("cd", add_special_tokens=False)
    assert len(allowed) == 2
    for binding, letters in (
        ({"structured_outputs": {"regex": "[ab]{6}"}}, "ab"),
        ({"allowed_token_ids": allowed, "bad_words": ["cc"], "max_tokens": 6}, "cd"),
    ):
        status, reply = await server.post(
            COMPLETIONS, prompt=PROMPT, prompt_logprobs=1, n=2, seed=3, **binding
        )
        assert status == 200, reply
        for choice in reply["choices"]:
            assert len(choice["text"]) == 6
            assert set(choice["text"]) <= set(letters)
            assert "cc" not in choice["text"]
            check_scores(choice["prompt_logprobs"], twin)


async def test_a_grammar_without_answer_is_only_scored(server, twin):
    status, reply = await server.post(
        COMPLETIONS, prompt=PROMPT, prompt_logprobs=0, max_tokens=0, guided_regex="[ab]+"
    )
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["text"] == ""
    check_scores(choice["prompt_logprobs"], twin)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_an_echo_with_logprobs_of_a_cut_prompt_is_of_what_is_kept(server, side):
    text = "".join(map(chr, PROMPT))
    status, reply = await server.post(
        COMPLETIONS, prompt=text, echo=True, logprobs=0, max_tokens=2, truncate_prompt_tokens=6, truncation_side=side,
        add_special_tokens=False,
    )  # fmt: skip
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["text"].startswith(text[-6:] if side == "left" else text[:6])
    assert choice["logprobs"]["text_offset"][:6] == list(range(6))
    assert len(choice["logprobs"]["tokens"]) == 8


async def test_tokens_in_and_out_with_scores(server, twin):
    params = {"max_tokens": 0, "prompt_logprobs": 2}
    status, reply = await server.post(GENERATE, token_ids=PROMPT, sampling_params=params)
    assert status == 200, reply
    assert reply["choices"][0]["token_ids"] == []
    check_scores(reply["prompt_logprobs"], twin)


async def test_what_is_rendered_asks_for_the_same(server, twin):
    """Scores, beams and forms go on to the route that takes tokens."""
    for fields in (
        {"prompt_logprobs": 1, "max_tokens": 0},
        {**BEAMS, "length_penalty": 0.5, "early_stopping": "never"},
        {"guided_regex": "[ab]{5}", "temperature": 0},
    ):
        status, whole = await server.post(COMPLETIONS, prompt=PROMPT, **fields)
        assert status == 200, whole
        status, (body,) = await server.post(COMPLETIONS + "/render", prompt=PROMPT, **fields)
        assert status == 200, body
        status, reply = await server.post(GENERATE, **{**body, "output_mode": "text"})
        assert status == 200, reply
        assert [choice["text"] for choice in reply["choices"]] == [
            choice["text"] for choice in whole["choices"]
        ]
        assert reply["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
