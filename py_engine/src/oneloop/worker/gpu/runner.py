"""Launches one step on a GPU: slab in pinned memory in, tokens in pinned memory out. Never waits for the device."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.device.cpus import usable_cpus
from oneloop.start_times import StartTimes
from oneloop.worker.buckets import MAX_CAPTURED_TOKENS, bucket_of, largest_bucket, token_bucket
from oneloop.worker.gpu.captures import START_LIMIT_S, Border, Captures, Forward, GraphSizes, Sample
from oneloop.worker.gpu.graphs import StepGraphs
from oneloop.worker.gpu.results import DeviceResults
from oneloop.worker.gpu.sampler import DeviceSampler
from oneloop.worker.gpu.slab import DeviceSlab
from oneloop.worker.inputs import LOGPROB_COLUMNS, SlabViews, StepFlag
from oneloop_kernels.launch import INTERPRETED, compiling_ahead
from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION, AttentionShape, AttentionStep
from oneloop_kernels.ops.step_inputs import STEP_INPUTS, SampleOutput, SlotTables, StepInputs
from oneloop_kernels.order import fixed_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from oneloop.models.base import Model
    from oneloop.worker.gpu.captures import Key
    from oneloop.worker.gpu.sampler import SampleVariant
    from oneloop.worker.gpu.slab import HostSlab
    from oneloop.worker.inputs import StepHeader
    from oneloop.worker.memory.ledger import MemoryPlan
    from oneloop_core import SlabLayout
    from oneloop_kernels.compiling.workers import CompileWorkers

log = logging.getLogger(__name__)

MIN_SHARED_TOKENS: Final = 1024
"""With fewer tokens in widely shared blocks, looking for shared prefixes costs more than it saves."""


class GpuModelRunner:
    """A model with its KV cache and the state of its slots. One thread at a time; steps in the core's order.

    A step is: fetch the slab; where its counts say so, admit, fork and copy blocks; the forward pass; sampling;
    publish. Forward and sampling are graphs by bucket; what differs between steps of a bucket they read on the device.
    Where samples have masks, sampling (which fetches them) and publishing are launched by `sample`, behind the forward
    pass if that is still running: from the final hidden states on, so that no buffer for logits is needed.
    """

    def __init__(
        self,
        model: Model,
        plan: MemoryPlan,
        layout: SlabLayout,
        slabs: Sequence[HostSlab],
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        enforce_eager: bool = False,
        orders: tuple[bool, ...] = (False,),
    ) -> None:
        """Allocates the KV cache and the state of the slots on the current stream, which all steps must run on.

        slabs: the ring; its memory must outlive the runner. orders: of sums, that steps may have: as GraphSizes'. Where
        there are both, a step has the fixed one if its flags say so.
        """
        self._model = model
        spec, device = model.spec, model.device
        self.kv = PagedKVCache(
            spec, plan.num_blocks, plan.block_size, dtype=model.dtype, device=device, narrow=plan.narrow_kv
        )
        self._block_size = plan.block_size
        # + 1: a step ahead may have begun the next block.
        max_blocks = -(-plan.max_model_len // plan.block_size) + 1
        self._slab = DeviceSlab(layout, device)
        self._slabs = slabs
        self._views = [SlabViews.over(slab.buffer, layout) for slab in slabs]
        self._targets = [_output_of(slab.fields) for slab in slabs]
        self.flag = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        """How many steps are through, written by the device; on the host."""
        self.is_waiting = False
        """Whether the step that was launched last waits for `sample`."""
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        header = next(field for field in layout.fields if field.name == "header")
        self._mask_offset = layout.mask_offset
        self._size_at = header.offset // 8 + layout.header["used_bytes"]
        self._tables = SlotTables(
            torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device),
            torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
        )
        largest = largest_bucket(max_num_tokens, max_num_seqs)
        self._inputs = _make_inputs(max_num_seqs, largest, device)
        self._output = _make_output(max_num_seqs, device)
        self._sample_hidden = torch.zeros(max_num_seqs, spec.hidden_size, dtype=model.dtype, device=device)
        self._ops = STEP_INPUTS.resolve(device, torch.float32)
        self._attention = DEVICE_ATTENTION.resolve(device, model.dtype)(
            AttentionShape(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                block_size=plan.block_size,
                scale=spec.head_dim**-0.5,
            ),
            max_rows=max_num_seqs,
            max_tokens=largest,
            max_blocks_per_row=max_blocks,
            dtype=model.dtype,
            device=device,
            cache_dtype=self.kv.dtype,
            ordered=True in orders,
        )
        self._attention_step = AttentionStep(
            row_slot=self._inputs.row_slot,
            seq_lens=self._inputs.seq_lens,
            query_start=self._inputs.query_start,
            num_rows=self._inputs.num_rows,
            num_single=self._inputs.num_single,
            block_tables=self._tables.block_tables,
        )
        self._sampler = DeviceSampler(
            max_num_seqs=max_num_seqs,
            vocab_size=spec.vocab_size,
            slab=self._slab,
            last_token=self._tables.last_token,
            output=self._output,
            device=device,
        )
        self._results = DeviceResults(model)
        self._orders = orders
        sizes = GraphSizes.of(largest, max_num_seqs, len(slabs), orders)
        self._row_buckets = sizes.rows
        self._captures = Captures(
            sizes,
            [self._sampler.variant(flags, -1) for flags in (0, StepFlag.RANDOM)],
            [self._sampler.variant(flags | StepFlag.LOGPROBS, 1) for flags in (0, StepFlag.RANDOM)],
        )
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.graphs = StepGraphs(stream, enabled=not enforce_eager)

    @torch.inference_mode()
    def launch(self, slab_index: int) -> None:
        """Launch the step in that slab; `flag` grows by one when it is through.

        Where it has masks (`is_waiting` says so) it is to be followed by `sample`.
        """
        header = self._views[slab_index].header()
        slab, index = self._slab, self._slab.header_index
        self.graphs.launch(Border("fetch", slab_index), partial(self._launch_fetch, slab_index))
        if header.num_admitted:
            self._sampler.admit(header)
        if header.num_forks:
            self._ops.fork(slab.fields, index, self._tables)
            self._sampler.fork(header)
        if header.num_cow:
            count = index["num_cow"]
            self.kv.copy_blocks(slab["cow_src"], slab["cow_dst"], slab["header"][count : count + 1])
        if header.looks_at_hidden:
            with fixed_order(self._is_fixed(header)):
                self._forward_with_results(header, slab_index)
        elif header.num_tokens:
            self._forward(header)
        self.is_waiting = header.num_masked > 0
        if self.is_waiting:
            return
        if header.num_tokens and header.num_samples:
            self._sample(header, slab_index)
        else:
            self.publish(slab_index)

    @torch.inference_mode()
    def sample(self, slab_index: int) -> None:
        """Sample the step that was launched last, whose masks are in its slab now."""
        self._sample(self._views[slab_index].header(), slab_index)

    def publish(self, slab_index: int) -> None:
        """Count a step that has no sample, or whose launch has raised."""
        self.graphs.launch(Border("publish", slab_index), partial(self._launch_publish, slab_index, False))

    def _launch_fetch(self, slab_index: int) -> None:
        self._ops.fetch(self._slabs[slab_index].storage, self._slab.storage, self._size_at)

    def _launch_fetch_masks(self, slab_index: int) -> None:
        """The part's first word says how much of it is used."""
        part = slice(self._mask_offset, None)
        self._ops.fetch(self._slabs[slab_index].storage[part], self._slab.storage[part], 0)

    def _launch_publish(self, slab_index: int, logprobs: bool) -> None:
        slab = self._slab
        self._ops.publish(
            self._output, self._targets[slab_index], slab.fields, slab.header_index, self._counter, self.flag,
            logprobs=logprobs,
        )  # fmt: skip

    def _is_fixed(self, header: StepHeader) -> bool:
        """Whether the step's sums are taken in the fixed order."""
        return True in self._orders and (
            False not in self._orders or bool(header.flags & StepFlag.FIXED_ORDER)
        )

    def _forward(self, header: StepHeader) -> None:
        has_multi = header.num_single < header.num_rows
        fixed = self._is_fixed(header)
        may_share = not fixed and header.num_widely_shared * self._block_size >= MIN_SHARED_TOKENS
        if has_multi:
            num_tokens = token_bucket(header.num_tokens)
        else:
            num_tokens = bucket_of(header.num_tokens, self._row_buckets)
        self.graphs.launch(
            Forward(num_tokens, has_multi, may_share, fixed),
            partial(self._launch_whole_forward, num_tokens, has_multi, may_share, fixed),
            capturable=num_tokens <= MAX_CAPTURED_TOKENS,
        )

    def _forward_with_results(self, header: StepHeader, slab_index: int) -> None:
        """Forward, then what prompts want beside tokens, straight into the step's slab.

        Never a graph: all hidden states are looked at, which within a graph are gone when another one runs.
        """
        hidden = self._launch_forward(token_bucket(header.num_tokens), has_multi=True, may_share=False)
        self._results.launch(hidden, self._slab, self._slabs[slab_index], self._views[slab_index], header)

    def _launch_forward(self, num_tokens: int, has_multi: bool, may_share: bool) -> torch.Tensor:
        inputs, slab = self._inputs, self._slab
        self._ops.prepare(
            slab.fields, slab.header_index, self._tables, inputs,
            num_tokens=num_tokens, block_size=self._block_size,
        )  # fmt: skip
        num_rows = min(num_tokens, inputs.row_slot.shape[0])
        plan = self._attention.plan(
            self._attention_step, num_rows, num_tokens, has_multi, may_share=may_share
        )
        metadata = AttentionMetadata(num_tokens, inputs.kv_slots[:num_tokens], plan)
        hidden = self._model.forward(
            inputs.token_ids[:num_tokens], inputs.positions[:num_tokens], self.kv, metadata
        )
        self._ops.select_rows(slab.fields, slab.header_index, hidden, self._sample_hidden)
        return hidden

    def _launch_whole_forward(self, num_tokens: int, has_multi: bool, may_share: bool, fixed: bool) -> None:
        with fixed_order(fixed):
            self._launch_forward(num_tokens, has_multi, may_share)

    def _sample(self, header: StepHeader, slab_index: int) -> None:
        num_samples = bucket_of(header.num_samples, self._row_buckets)
        masks = header.num_masked > 0
        variant = self._sampler.variant(header.flags, header.max_logprobs, masks=masks)
        self._captures.use(variant)
        fixed = self._is_fixed(header)
        self.graphs.launch(
            Sample(num_samples, variant, slab_index, fixed),
            partial(self._launch_end, num_samples, variant, slab_index, fixed),
        )

    def _launch_end(self, num_samples: int, variant: SampleVariant, slab_index: int, fixed: bool) -> None:
        """Sampling, and the kernel that writes to the step's slab: one graph per slab saves a launch."""
        if variant.masks:
            self._launch_fetch_masks(slab_index)
        with fixed_order(fixed):
            self._launch_sample(num_samples, variant)
        self._launch_publish(slab_index, variant.logprobs)

    def _launch_sample(self, num_samples: int, variant: SampleVariant) -> None:
        logits = self._model.compute_logits(self._sample_hidden[:num_samples])
        self._sampler.sample(logits, num_samples, variant)

    @torch.inference_mode()
    def warm_up(self, workers: CompileWorkers | None = None, times: StartTimes | None = None) -> None:
        """Compile and load every kernel a step can need, run the largest step, capture the first graphs.

        Before any step: the device's slab is empty, so that the kernels find nothing to do. workers: compile for this
        process. times: where the seconds of "kernels" and of "graphs" are counted.
        """
        times = times or StartTimes()
        self._slab.storage.zero_()
        with times.part("kernels"):
            if not INTERPRETED:
                with self._model.one_layer_of_each_kind(), compiling_ahead(usable_cpus(), workers):
                    for fixed in self._orders:
                        with fixed_order(fixed):
                            self._warm_kernels(self._row_buckets)
                            self._compile_the_rare()
            for fixed in self._orders:
                with fixed_order(fixed):
                    self._warm_kernels(self._row_buckets[-1:])
        if self.graphs.enabled:
            with times.part("graphs"):
                self._capture_first()
        self._counter.zero_()
        if self._model.device.type == "cuda":
            # What was launched here counts steps too, on the host's flag: it must be through before that is set back.
            torch.cuda.synchronize(self._model.device)
        self.flag.zero_()

    def _capture_first(self) -> None:
        ends = perf_counter() + START_LIMIT_S
        for key in self._captures.at_start():
            self._rehearse(key)
            self.graphs.capture(key, self._body(key))
        while perf_counter() < ends and self.prepare_in_idle():
            pass
        torch.cuda.synchronize(self._model.device)
        # What ran before it was captured left its memory beside that of the graphs. Steps that are launched kernel by
        # kernel need the largest's share of it: they get it back now, not while requests wait.
        torch.cuda.empty_cache()
        with fixed_order(self._orders[0]):
            self._launch_forward(self._inputs.token_ids.shape[0], has_multi=True, may_share=False)
            self._launch_sample(self._row_buckets[-1], self._sampler.variant(0, -1))

    @torch.inference_mode()
    def prepare_in_idle(self) -> bool:
        """Capture the next graph. Only while no step is in flight. False when there is none, until steps ask for more.

        Takes the host 1 to 63 ms (`captures`). After a failure, as for want of memory, there are no more: steps are
        captured at their second use then.
        """
        key = self._captures.next(self.graphs.wants) if self.graphs.enabled else None
        if key is None:
            return False
        began = perf_counter()
        try:
            self._slab.storage.zero_()  # of an empty step; the next one brings all that it needs
            self._rehearse(key)
            captured = self.graphs.try_capture(key, self._body(key))
        except Exception:  # nobody asked for it: what fails for good fails again in a step, which tells of it
            log.exception("a step could not be rehearsed")
            captured = False
        log.debug("%s: %.0f ms", key, (perf_counter() - began) * 1e3)
        if not captured:
            log.warning("no more steps are captured ahead")
            self._captures.stop()
            torch.cuda.empty_cache()
        return captured

    def graphs_left(self) -> tuple[int, int]:
        """How many graphs of forward passes, and of samplings, idle moments are to bring."""
        return self._captures.left(self.graphs.wants) if self.graphs.enabled else (0, 0)

    def _body(self, key: Key) -> Callable[[], None]:
        """What a graph's steps launch."""
        match key:
            case Forward():
                return partial(self._launch_whole_forward, *key)
            case Sample():
                return partial(self._launch_end, *key)
            case Border("fetch", slab_index):
                return partial(self._launch_fetch, slab_index)
            case Border(_, slab_index):
                return partial(self._launch_publish, slab_index, False)

    def _rehearse(self, key: Key) -> None:
        """Launch an empty step's part, so that what libraries bring is loaded: of layers, one of each kind will do.

        Not what counts steps or writes to the host, which is one kernel that has run.
        """
        match key:
            case Forward(num_tokens, has_multi, may_share, fixed):
                with self._model.one_layer_of_each_kind(), fixed_order(fixed):
                    self._launch_forward(num_tokens, has_multi, may_share)
            case Sample(num_samples, variant, _, fixed):
                with fixed_order(fixed):
                    self._launch_sample(num_samples, variant)

    def _warm_kernels(self, row_buckets: Iterable[int]) -> None:
        """Launch what an empty step may launch: the parts outside of graphs, the largest step, and these batches."""
        slab, index = self._slab, self._slab.header_index
        self._launch_fetch(0)
        self._launch_fetch_masks(0)
        self._sampler.admit(replace(self._views[0].header(), num_admitted=1))  # of slot 0, all zero
        self._ops.fork(slab.fields, index, self._tables)
        count = index["num_cow"]
        self.kv.copy_blocks(slab["cow_src"], slab["cow_dst"], slab["header"][count : count + 1])
        self._launch_forward(self._inputs.token_ids.shape[0], has_multi=True, may_share=False)
        greedy, random = self._sampler.variant(0, -1), self._sampler.variant(StepFlag.RANDOM, -1)
        self._launch_sample(self._row_buckets[-1], random)
        for bucket in row_buckets:
            self._launch_forward(bucket, has_multi=False, may_share=False)
            self._launch_sample(bucket, greedy)
        self._launch_publish(0, False)

    def _compile_the_rare(self) -> None:
        """Only while launches compile: all other sizes, and what few requests need.

        What is first compiled when a step needs it holds up every stream.
        """
        for bucket in reversed(self._captures.sizes.tokens):
            self._launch_forward(bucket, has_multi=True, may_share=False)
        for bucket in self._row_buckets:
            logits = self._model.compute_logits(self._sample_hidden[:bucket])
            for variant in self._sampler.all_variants():
                self._sampler.sample(logits, bucket, variant)
            self._launch_forward(bucket, has_multi=False, may_share=True)
        self._launch_forward(self._inputs.token_ids.shape[0], has_multi=True, may_share=True)
        self._results.warm_up()
        one = replace(self._views[0].header(), num_admitted=1, num_history=1, num_forks=1)
        self._sampler.admit(one)
        self._sampler.fork(one)
        self._sampler.drop_tables()
        self._launch_publish(0, True)


def _make_inputs(max_rows: int, max_tokens: int, device: torch.device) -> StepInputs:
    def ints(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return StepInputs(
        token_ids=ints(max_tokens),
        positions=ints(max_tokens),
        kv_slots=ints(max_tokens, torch.int64),
        row_slot=ints(max_rows),
        seq_lens=ints(max_rows),
        query_start=ints(max_rows + 1),
        num_rows=ints(1),
        num_single=ints(1),
    )


def _make_output(max_rows: int, device: torch.device) -> SampleOutput:
    return SampleOutput(
        token=torch.zeros(max_rows, dtype=torch.int32, device=device),
        rank=torch.zeros(max_rows, dtype=torch.int32, device=device),
        logprob_token=torch.zeros(max_rows * LOGPROB_COLUMNS, dtype=torch.int32, device=device),
        logprob=torch.zeros(max_rows * LOGPROB_COLUMNS, dtype=torch.float32, device=device),
    )


def _output_of(fields: dict[str, torch.Tensor]) -> SampleOutput:
    """The output fields of a slab."""
    return SampleOutput(
        token=fields["output_token"],
        rank=fields["output_rank"],
        logprob_token=fields["output_logprob_token"],
        logprob=fields["output_logprob"],
    )
