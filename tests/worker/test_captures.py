"""Which graphs are captured at the start, which in idle moments and in what order, and that the memory plan has all."""

from __future__ import annotations

import pytest

from oneloop.engine.loop import NUM_SLABS
from oneloop.worker.buckets import MAX_CAPTURED_TOKENS, bucket_of, token_bucket
from oneloop.worker.gpu.captures import (
    MIN_SHARERS,
    ROWS_AT_START,
    Border,
    Captures,
    Forward,
    GraphSizes,
    Sample,
)
from oneloop.worker.inputs import SlabViews
from oneloop.worker.memory import gpu as plan
from oneloop_kernels.ops.sampling.device import SampleVariant


def variant(*, random=False, edits=False, penalties=False, logprobs=False):
    return SampleVariant(random=random, edits=edits, penalties=penalties, logprobs=logprobs)


PLAIN = [variant(), variant(random=True)]
OTHERS = [variant(logprobs=True), variant(random=True, logprobs=True)]


@pytest.fixture(params=[(2048, 512), (8192, 256), (64, 1), (100, 8)], ids=str)
def sizes(request):
    return GraphSizes.of(token_bucket(request.param[0]), request.param[1], NUM_SLABS)


def test_every_step_that_can_be_captured_has_a_key_in_idle_moments(sizes):
    keys = set(sizes.later(PLAIN, OTHERS))
    for count in range(1, sizes.rows[-1] + 1):
        rows = bucket_of(count, sizes.rows)
        assert Forward(rows, False, False) in keys
        assert Forward(rows, False, True) in keys or rows < 8, "a block in fewer tables is not widely shared"
        for slab_index in range(NUM_SLABS):
            assert {Sample(rows, one, slab_index) for one in (*PLAIN, *OTHERS)} < keys
    for count in range(1, sizes.tokens[-1] + 1, 3):
        assert {Forward(token_bucket(count), True, share) for share in (False, True)} < keys
    assert sizes.tokens[-1] <= MAX_CAPTURED_TOKENS, "larger steps are launched kernel by kernel"


def test_no_key_comes_twice_or_is_equal_to_one_of_another_kind(sizes):
    for keys in (list(sizes.later(PLAIN, OTHERS)), list(sizes.at_start(PLAIN))):
        assert len(keys) - len(set(keys)) <= 2 * (sizes.rows[-1] <= ROWS_AT_START)
    borders = [key for key in sizes.at_start(PLAIN) if isinstance(key, Border)]
    assert len(set(borders)) == 2 * NUM_SLABS


def test_a_start_captures_the_largest_of_each_kind_first_and_then_small_batches():
    keys = list(GraphSizes.of(2048, 512, NUM_SLABS).at_start(PLAIN))
    assert keys[:3] == [Forward(2048, True, False), Forward(512, False, False), Sample(512, PLAIN[0], 0)]
    decode = [key.num_tokens for key in keys[3:] if isinstance(key, Forward)]
    assert decode == [1, 2, 4, 8]
    assert len(keys) <= 40


def test_the_order_of_idle_moments():
    order = list(GraphSizes.of(2048, 512, NUM_SLABS).later(PLAIN, OTHERS))

    def places(wanted):
        return [place for place, key in enumerate(order) if wanted(key)]

    decode = places(lambda key: key in {Forward(rows, False, False) for rows in range(513)})
    plain = places(lambda key: isinstance(key, Sample) and key.variant in PLAIN)
    prefill = places(lambda key: isinstance(key, Forward) and key.has_multi and not key.may_share)
    others = places(lambda key: isinstance(key, Sample) and key.variant in OTHERS)
    sharing = places(lambda key: isinstance(key, Forward) and key.may_share)
    assert max(decode + plain) < min(prefill)
    assert max(prefill) < min(others)
    assert max(others) < min(sharing)


def test_both_orders_have_graphs_the_usual_one_first():
    both = GraphSizes.of(2048, 512, NUM_SLABS, (False, True))
    order = list(both.later(PLAIN, OTHERS))
    assert len(order) == both.num_forward + both.num_sample(len(PLAIN) + len(OTHERS))
    default = GraphSizes.of(2048, 512, NUM_SLABS)
    assert {key for key in order if not key.fixed} == set(default.later(PLAIN, OTHERS))
    assert {key._replace(fixed=False) for key in order if key.fixed} == {
        key for key in default.later(PLAIN, OTHERS) if not (isinstance(key, Forward) and key.may_share)
    }
    plain = [key.fixed for key in order if isinstance(key, Forward) and not key.may_share]
    assert plain == sorted(plain)
    assert not any(key.fixed for key in both.at_start(PLAIN) if not isinstance(key, Border))


def test_all_steps_in_the_fixed_order_have_no_other_graphs():
    sizes = GraphSizes.of(2048, 512, NUM_SLABS, (True,))
    keys = [*sizes.at_start(PLAIN), *sizes.later(PLAIN, OTHERS)]
    assert all(key.fixed for key in keys if not isinstance(key, Border))
    assert not any(key.may_share for key in keys if isinstance(key, Forward))
    assert sizes.num_forward == sum(isinstance(key, Forward) for key in sizes.later(PLAIN, OTHERS))


class TestCaptures:
    """One runner's way through them."""

    @pytest.fixture
    def captures(self):
        return Captures(GraphSizes.of(64, 4, NUM_SLABS), PLAIN, OTHERS)

    @staticmethod
    def take_all(captures, have):
        taken = []
        while (key := captures.next(lambda key: key not in have)) is not None:
            have.add(key)
            taken.append(key)
        return taken

    def test_all_that_the_start_has_not_captured_comes_once(self, captures):
        have = set(captures.at_start())
        taken = self.take_all(captures, have)
        assert set(taken) | set(captures.at_start()) == have
        assert have >= set(captures.sizes.later(PLAIN, OTHERS))
        assert not set(taken) & set(captures.at_start())
        assert captures.next(lambda _key: True) is None

    def test_what_was_captured_meanwhile_is_passed_over(self, captures):
        have = set()
        first = captures.next(lambda key: key not in have)
        second = captures.next(lambda key: key != first)
        have |= {first, second}
        assert first not in self.take_all(captures, have)

    def test_a_variant_that_steps_use_comes_into_the_order(self, captures):
        have = set()
        self.take_all(captures, have)
        captures.use(PLAIN[1])
        captures.use(OTHERS[0])
        assert self.take_all(captures, have) == []
        edits = variant(edits=True, penalties=True)
        captures.use(edits)
        taken = self.take_all(captures, have)
        assert {key.variant for key in taken} == {edits}
        assert len(taken) == 3 * NUM_SLABS  # batches of up to 1, 2 and 4

    def test_one_that_comes_while_others_are_captured_is_not_forgotten(self, captures):
        have = {captures.next(lambda _key: True)}
        captures.use(variant(edits=True))
        assert variant(edits=True) in {getattr(key, "variant", None) for key in self.take_all(captures, have)}

    def test_after_stop_there_are_none(self, captures):
        assert captures.next(lambda _key: True) is not None
        captures.stop()
        captures.use(variant(edits=True))
        assert captures.next(lambda _key: True) is None

    def test_how_many_are_left(self, captures):
        have = set(captures.at_start())
        num_forward, num_sample = captures.left(lambda key: key not in have)
        taken = self.take_all(captures, have)
        assert num_forward == sum(isinstance(key, Forward) for key in taken) > 0
        assert num_sample == sum(isinstance(key, Sample) for key in taken) > 0
        assert captures.left(lambda key: key not in have) == (0, 0)

    def test_what_is_used_is_not_counted_twice(self, captures):
        before = captures.left(lambda _key: True)
        captures.use(PLAIN[0])
        captures.use(OTHERS[0])
        assert captures.left(lambda _key: True) == before
        captures.use(variant(edits=True))
        assert captures.left(lambda _key: True) == (before[0], before[1] + 3 * NUM_SLABS)


@pytest.mark.parametrize("num_sequences", [MIN_SHARERS - 1, MIN_SHARERS])
def test_from_so_many_sharers_on_the_core_counts_a_block(core_factory, buffer_factory, num_sequences):
    core = core_factory()
    buffer = buffer_factory(core.layout.num_bytes)
    for own in range(num_sequences):
        core.submit([*range(5), 50 + own], max_tokens=2)
    assert core.schedule(buffer) is not None
    is_counted = SlabViews.over(buffer, core.layout).header().num_widely_shared > 0
    assert is_counted == (num_sequences == MIN_SHARERS)


def test_the_memory_plan_counts_them_all(sizes):
    assert plan.NUM_SLABS == NUM_SLABS
    keys = {*sizes.later(PLAIN, OTHERS), *sizes.at_start(PLAIN)}
    assert sum(isinstance(key, Forward) for key in keys) == sizes.num_forward
    assert sum(isinstance(key, Sample) for key in keys) == sizes.num_sample(len(PLAIN + OTHERS))
