"""SamplingParams.resolve: every field is checked, and the message names it (security.md T7–T9)."""

import math

import pytest

from oneloop import SamplingParams
from oneloop.engine.params import MAX_LOGPROB_ENTRIES, SamplingDefaults
from oneloop.errors import ConfigError, RequestError
from oneloop.formats.generation import GenerationDefaults


def resolve(defaults=SamplingDefaults(), **fields):
    return SamplingParams(**fields).resolve(defaults, vocab_size=100, max_sequences=8)


BAD = [
    ("n", 0), ("n", 9), ("n", 10**9), ("n", 1.0), ("n", True), ("n", "2"),
    ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1), ("temperature", 1e9),
    ("temperature", "hot"),
    ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", -math.inf),
    ("top_k", -2), ("top_k", 2**40), ("top_k", 1.5),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1), ("frequency_penalty", "1"),
    ("seed", 2**70), ("seed", 1.5), ("seed", 2**63),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**63), ("max_tokens", "many"),
    ("min_tokens", -1), ("min_tokens", 10**12),
    ("logprob_token_ids", [100]), ("logprob_token_ids", [-1]), ("logprob_token_ids", [1] * 129),
    ("logprob_token_ids", "1"),
    ("stop", [""]), ("stop", [5]), ("stop", "x" * 1025), ("stop", "€" * 400), ("stop", ["a"] * 17), ("stop", "\ud800"),
    ("stop_token_ids", [100]), ("stop_token_ids", [-1]), ("stop_token_ids", [2**40]), ("stop_token_ids", ["1"]),
    ("stop_token_ids", [1] * 257), ("stop_token_ids", 7), ("stop_token_ids", "12"), ("stop_token_ids", {7: 1}),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", 10**9), ("logprobs", True),
    ("logit_bias", {100: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: 101}),
    ("logit_bias", {1: math.nan}), ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("logit_bias", [1]), ("logit_bias", "1"), ("logit_bias", 0.0),
    ("ignore_eos", 1), ("skip_special_tokens", None), ("detokenize", "yes"), ("include_stop_str_in_output", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), BAD, ids=[f"{field}-{number}" for number, (field, _) in enumerate(BAD)]
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        resolve(**{field: value})
    assert caught.value.field == field
    assert field in caught.value.message
    assert len(caught.value.message) < 200
    caught.value.message.encode()


def test_min_above_max_and_stop_without_text():
    with pytest.raises(RequestError, match=r"min_tokens \(5\) is above max_tokens \(4\)"):
        resolve(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="detokenize"):
        resolve(stop="x", detokenize=False)


def test_legal_extremes():
    found = resolve(
        n=8, temperature=5e-324, top_p=5e-324, top_k=-1, min_p=-0.0, seed=-(2**63), max_tokens=2**31 - 1,
        stop="end", stop_token_ids=[99], logit_bias={0: -100, 99: 100.0}, logprobs=20,
    )  # fmt: skip
    assert (found.top_k, found.stop, found.stop_token_ids) == (0, ("end",), (99,))
    assert found.logit_bias == ((0, -100.0), (99, 100.0))


def test_open_fields_come_from_the_model_then_from_the_usual():
    usual = resolve(max_tokens=None)
    assert (usual.temperature, usual.top_p, usual.top_k, usual.min_p, usual.repetition_penalty) == (
        1,
        1,
        0,
        0,
        1,
    )
    assert usual.max_tokens is None
    model = SamplingDefaults.over(GenerationDefaults(temperature=0.6, top_k=20, max_new_tokens=7))
    found = resolve(model, top_k=5, max_tokens=None)
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (0.6, 1.0, 5, 7)
    assert resolve(model, top_k=5).max_tokens == 16
    assert (model.without_params().max_tokens, SamplingDefaults().without_params().max_tokens) == (7, 16)
    assert resolve(model, temperature=0.0).temperature == 0.0


def test_a_model_with_impossible_defaults_is_refused():
    with pytest.raises(ConfigError, match=r"top_p .*--generation-config none"):
        SamplingDefaults.over(GenerationDefaults(top_p=0.0))


def test_a_limit_that_was_chosen_must_fit_the_context_and_a_default_is_cut():
    model = SamplingDefaults(max_tokens=100)
    assert resolve(max_tokens=10).behind(90, 100).max_tokens == 10
    assert resolve(model, max_tokens=None).behind(90, 100).max_tokens == 10
    assert resolve(max_tokens=None).behind(99, 100).max_tokens is None
    for params, num_prompt_tokens, field in (
        (resolve(max_tokens=11), 90, "max_tokens"),
        (resolve(max_tokens=None, min_tokens=11), 90, "min_tokens"),
        (resolve(max_tokens=None), 100, "prompt"),
    ):
        with pytest.raises(RequestError) as caught:
            params.behind(num_prompt_tokens, 100)
        assert caught.value.field == field


def test_the_log_probabilities_of_answers_are_bounded_together():
    """n x tokens x entries of a token: a limit that was chosen must keep to it, a default is cut."""
    context = 1 << 20
    named = {"logprob_token_ids": list(range(63))}
    for asked, entries in (
        ({"logprobs": 0}, 1),
        ({"logprobs": 20}, 21),
        (named, 64),
        ({**named, "n": 4}, 256),
    ):
        most = MAX_LOGPROB_ENTRIES // entries
        room = min(most, context - 10)
        assert resolve(max_tokens=room, **asked).behind(10, context).max_tokens == room
        cut = resolve(max_tokens=None, **asked).behind(10, context).max_tokens
        assert cut == (None if most >= context - 10 else most)
        model = SamplingDefaults(max_tokens=context)
        assert resolve(model, max_tokens=None, **asked).behind(10, context).max_tokens == room
        if most < context - 10:
            for wrong in ({"max_tokens": most + 1}, {"max_tokens": None, "min_tokens": most + 1}):
                with pytest.raises(RequestError) as caught:
                    resolve(**wrong, **asked).behind(10, context)
                assert caught.value.field == "logprobs"
    assert resolve(max_tokens=context - 10, n=8).behind(10, context).max_tokens == context - 10
