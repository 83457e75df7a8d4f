"""What `Core.submit` refuses, and that each refusal names its argument."""

from __future__ import annotations

import array
import math

import numpy as np
import pytest

from oneloop_core import Core, CoreConfig, RequestError, Vocabulary

VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)])


@pytest.fixture
def core() -> Core:
    config = CoreConfig(
        num_blocks=8, max_num_seqs=4, max_model_len=200, max_num_batched_tokens=64, vocab_size=300
    )
    return Core(config, VOCABULARY)


@pytest.mark.parametrize(
    "make", [list, tuple, lambda ids: array.array("i", ids), lambda ids: np.array(ids, np.int32)]
)
def test_prompts_come_from_buffers_and_sequences(core: Core, make) -> None:
    handles = [core.submit(make([1, 2, 3])) for _ in range(3)]
    assert len(set(handles)) == 3
    assert min(handles) > 0


class Name(int):
    """An int of another type."""


class Numbered:
    """No int, but something that stands for one, and that empties a list when it is asked which."""

    def __init__(self, ids: list[object]) -> None:
        self._ids = ids

    def __index__(self) -> int:
        self._ids.clear()
        return 2


def test_lists_may_hold_what_stands_for_an_int(core: Core) -> None:
    for ids in ([1, Name(2), 3], [True, False], [np.int64(1), np.int32(2)], [1, np.uint8(2)]):
        assert core.submit(ids) > 0
    for ids in ([1, "2"], [1.0], [1, None], [[1]]):
        with pytest.raises(TypeError):
            core.submit(ids)


def test_a_list_may_change_while_it_is_read(core: Core) -> None:
    ids: list[object] = [1]
    ids += [Numbered(ids), *range(100)]
    assert core.submit(ids) > 0  # type: ignore[arg-type]
    assert not ids


SMALL_BAD_PROMPTS = [[], [300], [-1], [2**31 - 1], [1] * 200, [1] * 129]
HUGE_BAD_PROMPTS = [[2**31], [2**40], [10**30], [-(10**30)]]


@pytest.mark.parametrize(
    "prompt", [*SMALL_BAD_PROMPTS, *HUGE_BAD_PROMPTS, *(array.array("i", ids) for ids in SMALL_BAD_PROMPTS)]
)
def test_bad_prompts(core: Core, prompt: list[int] | array.array[int]) -> None:
    with pytest.raises(RequestError) as caught:
        core.submit(prompt)
    assert caught.value.field == "prompt_token_ids"
    assert caught.value.args == (caught.value.message,)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1]),
        ("min_tokens", [-1, 10**30]),
        ("n", [0, -1, 5, 2**40, 10**30]),
        ("temperature", [-0.1, NAN, INF, -INF, 10**400, -(10**400)]),
        ("top_k", [-1]),
        ("top_p", [0.0, -0.1, 1.1, NAN, INF]),
        ("min_p", [-0.1, 1.1, NAN, INF]),
        ("repetition_penalty", [0.0, -1.0, NAN, INF]),
        ("presence_penalty", [-2.1, 2.1, NAN, INF]),
        ("frequency_penalty", [-2.1, 2.1, NAN, INF]),
        ("seed", [2**63, -(2**63) - 1, 10**30]),
        ("logprobs", [-1, 21, 2**40]),
        ("logit_bias", [[(300, 1.0)], [(-1, 1.0)], [(2**40, 1.0)], [(1, NAN)], [(1, INF)], [(1, 101.0)]]),
        ("stop", [[""], ["\ud800"], ["a"] * 1000, ["a" * 100_000]]),
        ("stop_token_ids", [[300], [-1], [10**30]]),
        ("shown_special_ids", [[300], [-1], [10**30]]),
        ("eos_token_ids", [[300], [-1], [10**30]]),
        ("cache_salt", [b"x" * 1000]),
        ("adapter", [2**40, 10**30]),
    ],
)
def test_bad_arguments_name_themselves(core: Core, field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            core.submit([1, 2, 3], **{field: value})
        assert caught.value.field == field, value
        assert field in caught.value.message
    assert not core.has_work()


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 125},
        {"top_k": 10**6},
        {"logprobs": 20},
        {"logit_bias": [(0, -100), (299, 100.0)]},
        {"temperature": 0},
        {"temperature": 1e-9},
        {"temperature": 2},
        {"stop": ("a", "\ufffd\0")},
    ],
)
def test_values_at_the_edge_are_accepted(core: Core, options: dict[str, object]) -> None:
    assert core.submit([1, 2, 3], **options) > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "abc"),
        ("n", 1.5),
        ("n", "1"),
        ("temperature", "hot"),
        ("cache_salt", "text"),
        ("logit_bias", [1]),
    ],
)
def test_wrong_types_are_type_errors(core: Core, field: str, value: object) -> None:
    with pytest.raises(TypeError):
        core.submit([1], **{field: value})


def test_wrong_prompt_types(core: Core) -> None:
    for prompt in (None, 5, [1.5], ["a"], [None]):
        with pytest.raises(TypeError):
            core.submit(prompt)


def test_stop_strings_need_a_vocabulary() -> None:
    core = Core(CoreConfig(num_blocks=8, vocab_size=300))
    with pytest.raises(RequestError) as caught:
        core.submit([1], stop=["a"])
    assert caught.value.field == "stop"


def test_min_tokens_above_max_tokens_is_refused(core: Core) -> None:
    with pytest.raises(RequestError) as caught:
        core.submit([1], min_tokens=5, max_tokens=4)
    assert caught.value.field == "min_tokens"


def test_max_tokens_beyond_the_context_fills_it(make_harness) -> None:
    harness = make_harness(max_model_len=32)
    handle = harness.core.submit([1, 2, 3], max_tokens=10**30)
    harness.run()
    assert len(harness.outputs[handle, 0].token_ids) == 29


def test_a_request_that_can_never_fit_is_refused(core: Core) -> None:
    with pytest.raises(RequestError) as caught:
        core.submit([1, 2, 3], max_tokens=150)
    assert caught.value.field == "max_tokens"
