"""The GPU's runner with the core: texts equal those of the CPU's runner, whatever is batched, chunked or preempted.

Without a GPU its kernels run in Triton's interpreter; with one, the same tests run on it (`-m gpu`), graphs included.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oneloop.config import EngineConfig
from oneloop.models.registry import build_model
from oneloop.worker.gpu.captures import MIN_SHARERS, Forward, Sample
from oneloop.worker.gpu.runner import GpuModelRunner
from oneloop.worker.gpu.slab import HostSlab
from oneloop.worker.inputs import SlabViews
from oneloop.worker.memory.ledger import DeviceMemory
from oneloop.worker.memory.plan import plan_memory
from oneloop.worker.runner import ModelRunner
from oneloop_core import Grammar
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.registry import TRITON, prefer

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, MAX_TOKENS, VOCAB_SIZE = 16, 40, 8, 64, 97
pytestmark = [pytest.mark.usefixtures("recycled_memory"), *([pytest.mark.gpu] if ON_GPU else [])]


def fill(model):
    generator = torch.Generator().manual_seed(0)
    for name, target in model.weight_targets().items():
        weights = torch.empty(target.shape)
        if "norm" in name:
            weights.uniform_(0.5, 1.5, generator=generator)
        else:
            weights.normal_(0.0, 0.3, generator=generator)
        target.copy_(weights)
    return model


@pytest.fixture(scope="module")
def models(make_spec):
    spec = make_spec(head_dim=64, hidden_size=64)
    with prefer(TRITON):
        on_device = fill(build_model(spec, torch.float32, DEVICE))
    return fill(build_model(spec, torch.float32, torch.device("cpu"))), on_device


def memory_plan(spec, kv_cache_dtype="auto"):
    settings = {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": BLOCK_SIZE, "device": "cpu"}
    settings |= {"kv_cache_dtype": kv_cache_dtype}
    settings |= {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_TOKENS, "max_model_len": 128}
    memory = DeviceMemory(total=1 << 30, free=1 << 30)
    return plan_memory(spec, "float32", EngineConfig.from_flat(settings), memory)


@pytest.fixture(autouse=True)
def _numpy_is_silent():
    """The interpreter computes masked lanes too, and integers that are meant to overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


class CpuSide:
    """Runs a step at once; its slabs are plain buffers."""

    def __init__(self, model, plan, layout, buffer_factory):
        self.runner = ModelRunner(model, plan, max_num_seqs=MAX_NUM_SEQS)
        self.runner.kv.storage.fill_(float("nan"))
        self.buffers = [buffer_factory(layout.num_bytes) for _ in range(3)]
        self._views = [SlabViews.over(buffer, layout) for buffer in self.buffers]

    def launch(self, slab_index):
        self._logits = self.runner.forward(self._views[slab_index])
        if not self.num_masked(slab_index):
            self.sample(slab_index)

    def sample(self, slab_index):
        if self._logits is not None:
            self.runner.sample(self._views[slab_index], self._logits)

    def num_masked(self, slab_index):
        return self._views[slab_index].header().num_masked

    def wait(self):
        """Nothing runs on."""


class DeviceSide:
    """Launches; waits for the flag."""

    def __init__(self, model, plan, layout, *, enforce_eager):
        self._slabs = [HostSlab(layout, pinned=ON_GPU) for _ in range(3)]
        if ON_GPU:
            torch.cuda.set_stream(torch.cuda.Stream())
        with prefer(TRITON):
            self.runner = GpuModelRunner(
                model, plan, layout, self._slabs,
                max_num_seqs=MAX_NUM_SEQS, max_num_tokens=MAX_TOKENS, enforce_eager=enforce_eager,
            )  # fmt: skip
        self.runner.kv.storage.fill_(float("nan"))
        if ON_GPU:
            self.runner.warm_up()
        self.buffers = [slab.buffer for slab in self._slabs]
        self._done = 0

    def launch(self, slab_index):
        self.runner.launch(slab_index)

    def sample(self, slab_index):
        self.runner.sample(slab_index)

    def num_masked(self, slab_index):
        return self.runner._views[slab_index].header().num_masked

    def wait(self):
        self._done += 1
        limit = time.monotonic() + 20
        while int(self.runner.flag) < self._done:
            assert time.monotonic() < limit, "the step does not end"


def drive(side, core, requests, *, lookahead):
    """Run all requests with up to two steps in flight; per request and sequence its tokens (and log-probabilities)."""
    handles = [core.submit(prompt, **options) for prompt, options in requests]
    texts = {(h, n): [] for h, (_, o) in zip(handles, requests, strict=True) for n in range(o.get("n", 1))}
    logprobs, of_prompts, pooled = [], {}, {}
    in_flight, turn, held, num_held = [], 0, None, 0
    while core.has_work():
        if len(in_flight) < (2 if lookahead else 1):
            step = core.schedule(side.buffers[turn % 3])
            if step is not None:
                side.launch(turn % 3)
                if side.num_masked(turn % 3):
                    held = (step, turn % 3)
                    num_held += bool(in_flight)
                in_flight.append((step, side.buffers[turn % 3]))
                turn += 1
                if held is None or len(in_flight) > 1:
                    continue
        if held is None or len(in_flight) > 1:
            side.wait()
            deltas = core.commit(*in_flight.pop(0))
        else:
            deltas = []
        if held is not None:
            core.fill_masks(held[0], side.buffers[held[1]])
            side.sample(held[1])
            held = None
        for delta in deltas:
            texts[delta.request, delta.index] += delta.token_ids
            logprobs += delta.logprobs or []
            if delta.prompt_logprobs is not None:
                of_prompts[delta.request] = delta.prompt_logprobs.tokens()
            if delta.pooled is not None:
                pooled[delta.request] = np.frombuffer(delta.pooled, np.float32)
            assert delta.finish_reason != "error"
        core.audit()
    return SimpleNamespace(
        texts=list(texts.values()),
        logprobs=logprobs,
        of_prompts=of_prompts,
        pooled=pooled,
        stats=core.stats(),
        num_held=num_held,
    )


@pytest.fixture
def run(models, core_factory, buffer_factory):
    """Run requests on a fresh core and a fresh runner: (on the CPU's runner, on the GPU's)."""

    def start(requests, *, lookahead=True, enforce_eager=False, **changes):
        sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "vocab_size": VOCAB_SIZE} | changes
        plan = memory_plan(models[0].spec)
        outcomes = []
        for on_device in (False, True):
            core = core_factory(**sizes, hash_key=None)
            if on_device:
                side = DeviceSide(models[1], plan, core.layout, enforce_eager=enforce_eager)
            else:
                side = CpuSide(models[0], plan, core.layout, buffer_factory)
            outcomes.append(drive(side, core, requests, lookahead=lookahead))
        return outcomes

    return start


def some_requests(count, seed=0, longest=20, **options):
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))],
            {"max_tokens": rng.randint(4, longest), "ignore_eos": True, "seed": index} | options,
        )
        for index in range(count)
    ]


GREEDY = {"temperature": 0.0}
RANDOM = {"temperature": 1.0, "top_p": 0.9}
TRUNCATED = {"temperature": 0.7, "top_k": 9, "min_p": 0.02}
PENALIZED = {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
LISTS = {"temperature": 1.0, "logit_bias": [(3, 4.0), (9, -100.0)], "stop_token_ids": [3], "min_tokens": 4}
KINDS = (GREEDY, RANDOM, TRUNCATED, PENALIZED, LISTS)
# The interpreter takes about half a second per step.
EACH, LONGEST = (12, 40) if ON_GPU else (1, 8)


def some_of_each(seed=0, longest=LONGEST):
    return [
        request
        for number, options in enumerate(KINDS)
        for request in some_requests(EACH, seed + number, longest, **options)
    ]


def test_equal_to_the_cpu(run):
    cpu, gpu = run(some_of_each())
    assert gpu.texts == cpu.texts


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("lookahead", [False, True], ids=["in step", "overlap"])
def test_graphs_and_overlap_change_nothing(run, enforce_eager, lookahead):
    cpu, gpu = run(some_of_each(7), enforce_eager=enforce_eager, lookahead=lookahead)
    assert gpu.texts == cpu.texts


def test_chunks_and_preemption(run):
    requests = [
        (list(range(start, start + 14)), {"max_tokens": 24, "ignore_eos": True, "seed": start, **options})
        for start, options in enumerate((GREEDY, GREEDY, PENALIZED, GREEDY, RANDOM))
    ]
    cpu, gpu = run(requests, num_blocks=9, max_num_batched_tokens=11, max_num_seqs=8)
    assert gpu.stats.num_preemptions > 0
    assert gpu.texts == cpu.texts


def test_prefix_hits_and_forks(run):
    prefix = list(range(40))
    requests = [
        ([*prefix, 50 + i], {"max_tokens": 5, "ignore_eos": True, "n": 1 + i % 3, "seed": i, **RANDOM})
        for i in range(3 * EACH)
    ]
    cpu, gpu = run(requests)
    assert gpu.stats.num_prefix_hit_tokens > 0
    assert gpu.texts == cpu.texts


def test_more_samples_than_tokens(run):
    """n rows of a prompt of one token, and of one that is cached but for its last token."""
    prompt = list(range(33))
    options = {"max_tokens": 3, "ignore_eos": True, "seed": 4, **RANDOM}
    requests = [([7], options | {"n": 8}), (prompt, options), (prompt, options | {"n": 8})]
    for one in (requests[:1], requests[1:]):
        cpu, gpu = run(one)
        assert gpu.texts == cpu.texts


def test_masks(run):
    """Of grammars, allowed tokens and bad words, with every kind of sampling, beside rows without; two in flight."""
    rng = random.Random(3)
    states = [{rng.randrange(VOCAB_SIZE): rng.randrange(6) for _ in range(3)} for _ in range(6)]
    constraints = (
        {"grammar": Grammar.from_automaton(states)},
        {},
        {"allowed_token_ids": list(range(0, VOCAB_SIZE, 3)), "bad_words": [[3], [6, 9]]},
        {"thinking_budget": 2, "thinking_end": [5, 6], "logprobs": 3},
        {"grammar": Grammar.from_automaton([{7: 1, 8: 1}, {9: 0}]), "n": 2},
    )
    requests = [
        ([index + 1, 2, 3], {"max_tokens": LONGEST, "ignore_eos": True, "seed": index, **kind, **constraint})
        for index, (kind, constraint) in enumerate(zip(KINDS, constraints, strict=True))
    ]
    cpu, gpu = run(requests)
    assert gpu.num_held == cpu.num_held > 3
    assert gpu.texts == cpu.texts
    assert all(token % 3 == 0 and token != 3 for token in gpu.texts[2])
    assert gpu.texts[3][2:4] == [5, 6]
    assert all(token in (7, 8) for token in gpu.texts[4][::2] + gpu.texts[5][::2])
    assert [[token for token, _ in entries] for _, entries in gpu.logprobs] == [
        [token for token, _ in entries] for _, entries in cpu.logprobs
    ]


def test_results_of_prompts(run, models):
    """Log-probabilities and pooled states of prompts in chunks, and of named tokens, beside requests that want none."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 30, 17, 40, 9, 12)]
    named = {"logprobs": 0, "logprob_token_ids": [5, 1, VOCAB_SIZE - 1], **GREEDY}
    options = [
        {"max_tokens": 0, "prompt_logprobs": 3},
        {"max_tokens": 3, "prompt_logprobs": 0, "ignore_eos": True, **GREEDY},
        {"max_tokens": 0, "pooling": "mean"},
        {"max_tokens": 4, "logprobs": 0, "logprob_token_ids": range(40), "n": 2, **GREEDY},
        {"max_tokens": 0, "pooling": "last"},
        {"max_tokens": 3, "prompt_logprobs": 1, "ignore_eos": True, "allowed_token_ids": [1, 2, 3], **named},
    ]
    hidden_size = models[0].spec.hidden_size
    requests = list(zip(prompts, options, strict=True))
    cpu, gpu = run(requests, max_num_batched_tokens=24, hidden_size=hidden_size)
    assert gpu.texts == cpu.texts
    assert gpu.of_prompts.keys() == cpu.of_prompts.keys()
    assert gpu.pooled.keys() == cpu.pooled.keys()
    assert [len(gpu.of_prompts), len(gpu.pooled), len(gpu.logprobs)] == [3, 2, 2 * 4 + 3]
    pairs = [(gpu.logprobs, cpu.logprobs), *((ours, cpu.of_prompts[k]) for k, ours in gpu.of_prompts.items())]
    for (rank, mine), (other, reference) in [pair for both in pairs for pair in zip(*both, strict=True)]:
        assert rank == other
        assert np.array(mine) == pytest.approx(np.array(reference), abs=1e-3)
    for handle, vector in gpu.pooled.items():
        assert vector == pytest.approx(cpu.pooled[handle], abs=1e-3)


def test_logprobs(run):
    cpu, gpu = run(some_requests(2 * EACH, 5, 6, logprobs=4, **GREEDY))
    assert [[token for token, _ in entries] for _, entries in gpu.logprobs] == [
        [token for token, _ in entries] for _, entries in cpu.logprobs
    ]
    for (rank, entries), (other_rank, others) in zip(gpu.logprobs, cpu.logprobs, strict=True):
        assert rank == other_rank
        assert [value for _, value in entries] == pytest.approx([value for _, value in others], abs=2e-4)


def test_warm_up_leaves_no_trace(models, core_factory, buffer_factory, monkeypatch):
    """Also where the interpreter runs it, on few sizes: the same answers after it."""
    monkeypatch.setattr("oneloop.worker.gpu.runner.MAX_CAPTURED_TOKENS", 16)
    core = core_factory(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=VOCAB_SIZE)
    side = DeviceSide(models[1], memory_plan(models[0].spec), core.layout, enforce_eager=False)
    side.runner.warm_up()
    assert int(side.runner.flag) == 0
    request = ([5, 6, 7], {"max_tokens": 3, "ignore_eos": True, **GREEDY})
    warm = drive(side, core, [request], lookahead=True)
    cpu = CpuSide(models[0], memory_plan(models[0].spec), core.layout, buffer_factory)
    core = core_factory(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=VOCAB_SIZE)
    assert warm.texts == drive(cpu, core, [request], lookahead=True).texts


class RecordedGraphs:
    """Where there is no GPU: a "graph" is its launches, made anew at each replay."""

    enabled = True

    def __init__(self):
        self.bodies = {}
        self.replayed = set()

    def wants(self, key):
        return key not in self.bodies

    def try_capture(self, key, body):
        self.bodies[key] = body
        return True

    def launch(self, key, body, *, capturable=True):
        if capturable and key in self.bodies:
            self.replayed.add(key)
            body = self.bodies[key]
        body()


@pytest.fixture
def in_waves(models, core_factory, buffer_factory, monkeypatch):
    """Run waves of requests on one core and one runner each: (texts on the CPU's, on the GPU's, the GPU's runner).

    between: called with the GPU's runner after each of its waves. Blocks count as widely shared from few tokens on.
    Starts capture no more than they must, so that idle moments have something left.
    """
    monkeypatch.setattr("oneloop.worker.gpu.runner.START_LIMIT_S", 0.0)
    if not ON_GPU:
        monkeypatch.setattr("oneloop.worker.gpu.runner.MAX_CAPTURED_TOKENS", 16)
    monkeypatch.setattr("oneloop.worker.gpu.runner.MIN_SHARED_TOKENS", 16)

    def start(waves, between):
        plan = memory_plan(models[0].spec)
        sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "vocab_size": VOCAB_SIZE}
        core = core_factory(**sizes, hash_key=None)
        side = CpuSide(models[0], plan, core.layout, buffer_factory)
        on_cpu = [drive(side, core, wave, lookahead=True).texts for wave in waves]
        core = core_factory(**sizes, hash_key=None)
        side = DeviceSide(models[1], plan, core.layout, enforce_eager=False)
        if not ON_GPU:
            side.runner.graphs = RecordedGraphs()
        on_gpu = []
        for wave in waves:
            on_gpu.append(drive(side, core, wave, lookahead=True).texts)
            between(side.runner)
        return on_cpu, on_gpu, side.runner

    return start


def sharers(**options):
    """Eight requests with two whole blocks in common."""
    return [
        ([*range(2 * BLOCK_SIZE), 40 + i], {"max_tokens": LONGEST, "ignore_eos": True, "seed": i, **options})
        for i in range(MAX_NUM_SEQS)
    ]


def test_idle_moments_change_nothing(in_waves):
    """Rehearsals and captures between requests: blocks found again and slots keep what they held."""
    prepared = []

    def prepare(runner):
        prepared.append([runner.prepare_in_idle() for _ in range(7)])  # those of a batch of one

    requests = some_requests(1, 3, 6, **RANDOM)
    cpu, gpu, runner = in_waves([requests, requests], prepare)
    assert gpu == cpu
    assert prepared == [[True] * 7] * 2
    if not ON_GPU:
        assert runner.graphs.replayed, "what was captured is used"


def test_an_idle_moment_repeats_nothing_of_the_last_step(in_waves):
    """Whose row would be written with the token that came after it, in a block that is found again."""
    options = {"max_tokens": 3, "ignore_eos": True, **GREEDY}
    first = (list(range(BLOCK_SIZE - 2)), options)
    alone, _, _ = in_waves([[first]], lambda _runner: None)
    (tokens,) = alone[0]
    assert tokens[1] != tokens[2]
    again = ([*first[0], *tokens[:2], 7], options)
    cpu, gpu, _ = in_waves([[first], [again]], lambda runner: runner.prepare_in_idle())
    assert gpu == cpu


def test_idle_moments_bring_the_variants_that_steps_have_used(in_waves):
    left = []
    requests = [some_requests(1, 3, 4, **GREEDY), some_requests(1, 3, 4, logit_bias=[(3, 1.0)], **GREEDY)]
    in_waves(requests, lambda runner: left.append(runner.graphs_left()))
    (num_forward, num_sample), (num_forward_after, num_sample_after) = left
    assert num_forward_after <= num_forward
    assert num_sample_after > num_sample


@pytest.mark.gpu
def test_all_graphs_of_idle_moments_give_the_same(in_waves):
    """Also those of variants that requests have asked for: no step captures what an idle moment could have."""
    known, variants = set(), set()

    def prepare(runner):
        graphs = runner.graphs._graphs
        for key in set(graphs) - known if known else ():
            few_sharers = isinstance(key, Forward) and key.may_share and key.num_tokens < MIN_SHARERS
            assert few_sharers or key.variant not in variants
        while runner.prepare_in_idle():
            """One more."""
        assert runner.graphs_left() == (0, 0)
        known.update(graphs)
        variants.update(key.variant for key in known if isinstance(key, Sample))

    def wave(seed):
        logprobs = [
            *some_requests(4, seed, 12, logprobs=3, **GREEDY),
            *some_requests(4, 9, 12, logprobs=2, **RANDOM),
        ]
        return [*some_of_each(seed, 16), *logprobs, *sharers(**GREEDY), *sharers(**RANDOM)]

    cpu, gpu, runner = in_waves([wave(11), wave(11), wave(12), sharers(**TRUNCATED)], prepare)
    assert gpu == cpu
    assert any(isinstance(key, Forward) and key.may_share and not key.has_multi for key in known)
    assert runner.graphs._attempts == {}


@pytest.mark.parametrize("where", ["rehearsal", "capture"])
def test_a_failure_in_idle_moments_ends_them_and_nothing_else(in_waves, monkeypatch, caplog, where):
    """Short of memory in the rehearsal, or in the capture: no more are captured ahead, and steps go on."""
    prepared = []

    def prepare(runner):
        if not prepared:
            with monkeypatch.context() as patch:
                if where == "rehearsal":
                    patch.setattr(runner, "_launch_forward", short_of_memory)
                    patch.setattr(runner, "_launch_sample", short_of_memory)
                else:
                    patch.setattr(type(runner.graphs), "try_capture", lambda *_arguments: False)
                prepared.append(runner.prepare_in_idle())
        prepared.append(runner.prepare_in_idle())

    def short_of_memory(*_arguments):
        raise torch.OutOfMemoryError

    requests = some_requests(1, 4, 5, **GREEDY)
    cpu, gpu, _ = in_waves([requests, requests], prepare)
    assert gpu == cpu
    assert prepared == [False, False, False]
    assert "no more steps are captured ahead" in caplog.text
