"""Which graphs there are, and when each is captured: few at the start, the rest in idle moments. No torch.

What a capture takes the host (Llama 3.1 8B, 32 layers, on an H200's machine): 27 to 40 ms in the mean for a forward
pass, the longest 63 ms, 1.7 ms for a sampling, less for the borders of a step. All of them take some
seconds, so that a start captures

* the largest of each kind, because the memory that all share takes its shape from them (a smaller graph fits into the
  place of a larger one, not the other way round);
* what the first few sequences need for every token after their first: decode steps and plain sampling of small batches;
* for as long as START_LIMIT_S, what comes next: a burst may find the server just ready.

A prompt takes one step of its size, whose kernels the host launches about as fast as the device runs them: prefill
comes after decode steps, and what few requests ask for comes last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from oneloop.worker.buckets import MAX_CAPTURED_TOKENS, row_buckets, token_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from oneloop_kernels.ops.sampling.device import SampleVariant

ROWS_AT_START: Final = 8
"""Batches up to this size are captured at the start."""
START_LIMIT_S: Final = 2.0
"""A start captures no more once its captures have taken this long."""
MIN_SHARERS: Final = 8
"""Sequences that must hold a block before the header counts it as widely shared."""


class Forward(NamedTuple):
    """A forward pass. has_multi: with rows of several tokens; may_share: looks for shared prefixes; fixed: in the fixed
    order (oneloop_kernels.order), where nothing is shared."""

    num_tokens: int
    has_multi: bool
    may_share: bool
    fixed: bool = False


class Sample(NamedTuple):
    """Sampling, and the results' way into that slab."""

    num_samples: int
    variant: SampleVariant
    slab_index: int
    fixed: bool = False


class Border(NamedTuple):
    """The slab's way to the device, or a step without samples told."""

    kind: Literal["fetch", "publish"]
    slab_index: int


Key: TypeAlias = Forward | Sample | Border


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The buckets that have graphs. Both lists ascend.

    orders: which there are graphs of, False: the default ones, True: in the fixed order; what is asked for first.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    num_slabs: int
    orders: tuple[bool, ...] = (False,)

    @classmethod
    def of(
        cls,
        largest: int,
        max_num_seqs: int,
        num_slabs: int,
        orders: tuple[bool, ...] = (False,),
    ) -> GraphSizes:
        """largest: tokens of the largest step, padded; steps of more than MAX_CAPTURED_TOKENS have no graph."""
        tokens = tuple(reversed(token_buckets(min(largest, MAX_CAPTURED_TOKENS))))
        return cls(row_buckets(max_num_seqs), tokens, num_slabs, orders)

    def at_start(self, plain: Sequence[SampleVariant]) -> Iterator[Key]:
        """plain: the variants of ordinary requests."""
        fixed = self.orders[0]
        yield Forward(self.tokens[-1], has_multi=True, may_share=False, fixed=fixed)
        yield Forward(self.rows[-1], has_multi=False, may_share=False, fixed=fixed)
        yield Sample(self.rows[-1], plain[0], 0, fixed)
        for slab_index in range(self.num_slabs):
            yield Border("fetch", slab_index)
            yield Border("publish", slab_index)
        for rows in self.rows:
            if rows <= ROWS_AT_START:
                yield from self._decode(rows, plain, fixed)

    def later(self, plain: Sequence[SampleVariant], others: Sequence[SampleVariant]) -> Iterator[Key]:
        """All but the borders, what is most often needed first; those of the start are among them."""
        for fixed in self.orders:
            for rows in self.rows:
                yield from self._decode(rows, plain, fixed)
            for tokens in self.tokens:
                yield Forward(tokens, has_multi=True, may_share=False, fixed=fixed)
        for fixed in self.orders:
            for rows in self.rows:
                yield from self._samples(rows, others, fixed)
        yield from self._sharing()

    def _decode(self, rows: int, variants: Sequence[SampleVariant], fixed: bool) -> Iterator[Key]:
        yield Forward(rows, has_multi=False, may_share=False, fixed=fixed)
        yield from self._samples(rows, variants, fixed)

    def _samples(self, rows: int, variants: Sequence[SampleVariant], fixed: bool) -> Iterator[Key]:
        for variant in variants:
            for slab_index in range(self.num_slabs):
                yield Sample(rows, variant, slab_index, fixed)

    def _sharing(self) -> Iterator[Forward]:
        if False not in self.orders:
            return
        for rows in self.rows:
            if rows >= MIN_SHARERS:
                yield Forward(rows, has_multi=False, may_share=True)
        for tokens in self.tokens:
            yield Forward(tokens, has_multi=True, may_share=True)

    @property
    def num_forward(self) -> int:
        """Graphs of forward passes, once all are captured."""
        return len(self.orders) * (len(self.rows) + len(self.tokens)) + sum(1 for _ in self._sharing())

    def num_sample(self, num_variants: int) -> int:
        """Graphs of samplings, once all of so many variants are captured."""
        return len(self.orders) * len(self.rows) * num_variants * self.num_slabs


class Captures:
    """The order of a runner's captures. Variants that no request has asked for yet come into it with the first."""

    __slots__ = ("_num_planned", "_others", "_plain", "_rest", "_stopped", "sizes")

    def __init__(
        self, sizes: GraphSizes, plain: Sequence[SampleVariant], others: Sequence[SampleVariant]
    ) -> None:
        """plain: variants of ordinary requests. others: further ones that need no request to be worth a capture."""
        self.sizes = sizes
        self._plain = tuple(plain)
        self._others = dict.fromkeys(others)
        self._num_planned = -1
        """Of the others: how many the order in use has; −1: there was none yet."""
        self._rest: Iterator[Key] = iter(())
        self._stopped = False

    def at_start(self) -> Iterator[Key]:
        """See GraphSizes."""
        return self.sizes.at_start(self._plain)

    def use(self, variant: SampleVariant) -> None:
        """A step samples so."""
        if variant not in self._others and variant not in self._plain:
            self._others[variant] = None

    def next(self, is_wanted: Callable[[Key], bool]) -> Key | None:
        """What to capture next in an idle moment: the first that is wanted. None: nothing, until variants are added."""
        while not self._stopped:
            for key in self._rest:
                if is_wanted(key):
                    return key
            if self._num_planned == len(self._others):
                break
            self._num_planned = len(self._others)
            self._rest = self.sizes.later(self._plain, tuple(self._others))
        return None

    def stop(self) -> None:
        """No more in idle moments: one has failed, and the next would too."""
        self._stopped = True

    def left(self, is_wanted: Callable[[Key], bool]) -> tuple[int, int]:
        """Graphs of forward passes, and of samplings, that are wanted and not captured."""
        wanted = [key for key in self.sizes.later(self._plain, tuple(self._others)) if is_wanted(key)]
        num_forward = sum(isinstance(key, Forward) for key in wanted)
        return num_forward, len(wanted) - num_forward
