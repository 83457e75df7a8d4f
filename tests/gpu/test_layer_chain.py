"""Decoder layers in one graph, where a kernel begins before the one ahead has ended: nobody reads what is not there.

norm → qkv → rotation and KV write → attention → output and residual → gate and up → down and residual, three layers of
the real sizes, against the same in float32. Padding rows are NaN throughout, so are unwritten cache slots and, before
each step, every buffer between the kernels. Without a GPU a small case runs in Triton's interpreter, without a graph.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.device.cpus import usable_cpus
from oneloop.formats.model_spec import ModelSpec
from oneloop.models.registry import build_model
from oneloop.worker.buckets import token_bucket
from oneloop.worker.gpu.graphs import StepGraphs
from oneloop_kernels.launch import INTERPRETED, compiling_ahead
from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION, AttentionShape, AttentionStep
from oneloop_kernels.registry import TRITON, prefer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oneloop.models.base import Model

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if ON_GPU:
    pytestmark = pytest.mark.gpu
BLOCK_SIZE = 16
VOCAB = 512
NAN_TOKEN = VOCAB - 1
"""Its embedding is NaN; the tokens of padding rows."""
MAX_ROWS, MAX_TOKENS, MAX_CONTEXT, NUM_BLOCKS = (512, 512, 640, 4200) if ON_GPU else (8, 16, 48, 40)
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_layers=3, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=VOCAB, max_position=MAX_CONTEXT, rms_norm_eps=1e-5, rope_theta=5e5,
    rope_scaling=None, tie_word_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
    dtype="bfloat16",
)  # fmt: skip
QWEN_06B = replace(
    LLAMA_8B,
    architecture="Qwen3ForCausalLM",
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    qk_norm=True,
)
SMOLLM2 = replace(LLAMA_8B, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
SMALL = replace(
    QWEN_06B, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
)
SPECS = {"llama8b": LLAMA_8B, "qwen06b": QWEN_06B, "smol135m": SMOLLM2} if ON_GPU else {"small": SMALL}
DTYPES = [torch.bfloat16] if ON_GPU else [torch.float32]
ROW_ERROR = {torch.float32: 2e-5, torch.bfloat16: 1.8e-2}
"""‖row − expected‖ / ‖expected‖. In bfloat16 each of six sums into the residual is rounded, and its inputs four times,
by 2^-8 at most each; done so in plain torch, of 3,000 rows the worst is 1.3 % off and the worst element 6 %."""
SHARPNESS = 2.0
"""Standard deviation of the scores: of 600 keys some ten matter, so that a wrong one shows."""
ELEMENT_ERROR = 6.0
"""Limit on |element − expected|, in ROW_ERROR · root mean square of the row: six deviations of an even error."""


class Load(NamedTuple):
    """A step's bucket, whether rows of several tokens may be in it, and (scheduled, longest context) of the rows."""

    bucket: int
    has_multi: bool
    rows: tuple[tuple[int, int], ...]


def decode(bucket: int, longest: int) -> Load:
    return Load(bucket, False, ((1, longest),) * (bucket - bucket // 8))


LOADS = {
    "decode 1": decode(1, 600),
    "decode 8": decode(8, 500),
    "decode 64": decode(64, 200),
    "decode 128": decode(128, 100),
    "decode 512": decode(512, 40),
    "mixed 300": Load(token_bucket(300), True, ((1, 300),) * 30 + ((150, 90), (60, 0), (57, 400), (3, 20))),
    "one prompt": Load(token_bucket(130), True, ((130, 0),)),
}
if not ON_GPU:
    LOADS = {"mixed": Load(16, True, ((1, 30),) * 2 + ((7, 9), (4, 0)))}


@pytest.fixture(scope="module", params=[(name, dtype) for name in SPECS for dtype in DTYPES], ids=str)
def chain(request) -> Iterator[Chain]:
    name, dtype = request.param
    torch.set_float32_matmul_precision("highest")
    with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext():
        chain = Chain(SPECS[name], dtype)
        with compiling_ahead(usable_cpus()):
            for load in LOADS.values():
                chain.launch(load.bucket, load.has_multi)
        yield chain


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@torch.inference_mode()
def test_a_graph_of_layers(chain, load):
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    first, other = chain.step(load, seed), chain.step(load, seed + 1)
    results = []
    again = [(first, 1), (first, 3)] if ON_GPU else []
    for step, times in ((first, 1), (other, 1), *again):
        chain.poison(load)
        chain.fill(step)
        chain.run(load, times)
        results.append(chain.hidden[: step.num_tokens].clone())
        check_rows(results[-1], step.expected, chain.model.dtype)
    if not ON_GPU:
        return
    chain.launch(load.bucket, load.has_multi)
    results.append(chain.hidden[: first.num_tokens].clone())
    # Sums are cut and merged in an order that the step alone decides, whoever comes first, in a graph or not.
    assert [torch.equal(results[0], result) for result in results] == [True, False, True, True, True]


def check_rows(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Each token by itself, so that one that is wrong does not vanish in the mean."""
    difference = actual.float() - expected
    scale = expected.square().mean(1, keepdim=True).sqrt()
    by_row = (difference.norm(dim=1) / expected.norm(dim=1)).nan_to_num(torch.inf)
    by_element = (difference.abs() / scale).nan_to_num(torch.inf)
    limit = ROW_ERROR[dtype]
    worst = int(by_row.argmax())
    summary = f"worst row {worst} of {len(actual)}: {by_row[worst]:.2e}, worst element {by_element.max():.2e}"
    print(summary)
    assert float(by_row.max()) < limit, f"{summary}; {int((by_row >= limit).sum())} rows beyond {limit:g}"
    assert float(by_element.max()) < ELEMENT_ERROR * limit, f"{summary}; beyond {ELEMENT_ERROR * limit:g}"


@dataclass
class Step:
    """What the buffers hold, and the hidden states that should come of it: [num_tokens, hidden] float32."""

    rows: list[tuple[int, int]]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    row_slots: list[int]
    cache: list[torch.Tensor]
    """By layer the context's [computed tokens of all rows, 2 · KV heads, head size]."""
    cache_slots: torch.Tensor
    expected: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return sum(scheduled for scheduled, _ in self.rows)


class Chain:
    """A model of three layers, the fixed buffers of its steps, and graphs over them."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.width = -(-MAX_CONTEXT // BLOCK_SIZE)
        with contextlib.nullcontext() if ON_GPU else prefer(TRITON):
            self.model = build_model(spec, dtype, DEVICE)
            self.kv = PagedKVCache(spec, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=DEVICE)
            self.attention = DEVICE_ATTENTION.resolve(DEVICE, dtype)(
                AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.head_dim**-0.5),
                max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, max_blocks_per_row=self.width, dtype=dtype, device=DEVICE,
            )  # fmt: skip
        fill_weights(self.model)
        self.reference = Reference(self.model)
        self.token_ids = ints(MAX_TOKENS)
        self.positions = ints(MAX_TOKENS)
        self.slots = ints(MAX_TOKENS).long()
        self.hidden = torch.empty(MAX_TOKENS, spec.hidden_size, dtype=dtype, device=DEVICE)
        self.inputs = AttentionStep(
            ints(MAX_ROWS), ints(MAX_ROWS), ints(MAX_ROWS + 1), ints(1), ints(1), ints(MAX_ROWS, self.width)
        )
        self.graphs = StepGraphs(torch.cuda.current_stream() if ON_GPU else None, enabled=True)

    def launch(self, bucket: int, has_multi: bool) -> None:
        plan = self.attention.plan(self.inputs, min(bucket, MAX_ROWS), bucket, has_multi, may_share=False)
        metadata = AttentionMetadata(bucket, self.slots[:bucket], plan)
        hidden = self.model.forward(self.token_ids[:bucket], self.positions[:bucket], self.kv, metadata)
        self.hidden[:bucket] = hidden

    def run(self, load: Load, times: int = 1) -> None:
        """Launched the first time, captured and replayed from the second. times: one right behind the other."""
        for _ in range(times):
            self.graphs.launch(load[:2], partial(self.launch, load.bucket, load.has_multi))
        if ON_GPU:
            torch.cuda.current_stream().synchronize()

    def poison(self, load: Load) -> None:
        """A step without rows: every tensor between the kernels is NaN, and nothing is left of the one before."""
        self.inputs.num_rows.zero_()
        self.inputs.num_single.zero_()
        self.token_ids.fill_(NAN_TOKEN)
        self.positions.zero_()
        self.slots.fill_(-1)
        self.kv.storage.fill_(torch.nan)
        self.run(load)
        assert bool(self.hidden[: load.bucket].isnan().all())

    def fill(self, step: Step) -> None:
        """Put the step into the buffers; what no row owns stays as the poison left it, or is garbage."""
        inputs, count = self.inputs, step.num_tokens
        self.token_ids[:count] = step.token_ids
        self.positions[:count] = step.positions
        self.slots[:count] = step.slots
        garbage = 1 << 30
        starts = [0]
        for scheduled, _ in step.rows:
            starts.append(starts[-1] + scheduled)
        for target, values in (
            (inputs.row_slot, step.row_slots),
            (inputs.seq_lens, [scheduled + computed for scheduled, computed in step.rows]),
            (inputs.query_start, starts),
        ):
            target.fill_(garbage)
            target[: len(values)] = torch.tensor(values, dtype=torch.int32)
        inputs.num_rows.fill_(len(step.rows))
        inputs.num_single.fill_(sum(scheduled == 1 for scheduled, _ in step.rows))
        inputs.block_tables.copy_(step.tables)
        for layer, context in zip(self.kv.layers, step.cache, strict=True):
            layer[step.cache_slots // BLOCK_SIZE, step.cache_slots % BLOCK_SIZE] = context

    def step(self, load: Load, seed: int) -> Step:
        """Random tokens, contexts, slots and blocks."""
        rng = random.Random(seed)
        rows = [(scheduled, rng.randint(longest // 2, longest)) for scheduled, longest in load.rows]
        rows[0] = (rows[0][0], load.rows[0][1])
        lengths = [scheduled + computed for scheduled, computed in rows]
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, NAN_TOKEN, (len(rows), max(lengths)), generator=generator)
        blocks = list(range(self.kv.num_blocks))
        rng.shuffle(blocks)
        row_slots = rng.sample(range(MAX_ROWS), len(rows))
        tables = torch.full((MAX_ROWS, self.width), 1 << 30, dtype=torch.int32)
        places = []  # of each row's tokens in the cache
        for slot, length in zip(row_slots, lengths, strict=True):
            own, blocks = blocks[: -(-length // BLOCK_SIZE)], blocks[-(-length // BLOCK_SIZE) :]
            tables[slot, : len(own)] = torch.tensor(own, dtype=torch.int32)
            at = torch.arange(length)
            places.append(torch.tensor(own)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        hidden, context = self.reference.run(ids.to(DEVICE), rows)
        return Step(
            rows=rows,
            token_ids=torch.cat(
                [ids[i, computed : computed + n] for i, (n, computed) in enumerate(rows)]
            ).int(),
            positions=torch.cat([torch.arange(computed, computed + n) for n, computed in rows]).int(),
            slots=torch.cat([place[computed:] for place, (_, computed) in zip(places, rows, strict=True)]),
            tables=tables,
            row_slots=row_slots,
            cache=[layer.to(self.model.dtype) for layer in context],
            cache_slots=torch.cat(
                [place[:computed] for place, (_, computed) in zip(places, rows, strict=True)]
            ).to(DEVICE),
            expected=hidden,
        )


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def fill_weights(model: Model) -> None:
    """So that every layer adds about as much as the residual holds, and a query looks at some keys more than at others.

    The last token's embedding is NaN.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, target in model.weight_targets().items():
        wide = torch.empty(target.shape, device=DEVICE)
        if "norm" in name:
            wide.uniform_(0.5, 1.5, generator=generator)
        elif "embed" in name:
            wide.normal_(0.0, 1.0, generator=generator)
            wide[NAN_TOKEN] = torch.nan
        else:
            wide.normal_(0.0, target.shape[1] ** -0.5, generator=generator)
        sharper = "q_norm" in name or ("q_proj" in name and not model.spec.qk_norm)
        target.copy_(wide * SHARPNESS if sharper else wide)


class Reference:
    """The same model on whole sequences, in float32: a few lines of torch that share nothing with the engine."""

    def __init__(self, model: Model) -> None:
        self.spec = model.spec
        self.weights = {name: target.float() for name, target in model.weight_targets().items()}

    def run(self, ids: torch.Tensor, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """ids: [rows, longest], rows padded on the right. The rows' scheduled tokens' hidden states, and by layer the
        computed tokens' keys and values."""
        hidden, context = [], []
        for start in range(0, len(rows), 64):
            some = rows[start : start + 64]
            longest = max(scheduled + computed for scheduled, computed in some)
            out, layers = self._layers(ids[start : start + 64, :longest])
            hidden += [out[i, computed : computed + n] for i, (n, computed) in enumerate(some)]
            context.append(
                [torch.cat([kv[i, :computed] for i, (_, computed) in enumerate(some)]) for kv in layers]
            )
        return torch.cat(hidden), [torch.cat(parts) for parts in zip(*context, strict=True)]

    def _layers(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        spec, weights = self.spec, self.weights
        x, layers = weights["model.embed_tokens.weight"][ids], []
        for index in range(spec.num_layers):
            name = f"model.layers.{index}"
            normed = self._norm(x, f"{name}.input_layernorm")
            queries, keys, values = (
                (normed @ weights[f"{name}.self_attn.{part}_proj.weight"].T).unflatten(2, (-1, spec.head_dim))
                for part in "qkv"
            )
            if spec.qk_norm:
                queries = self._norm(queries, f"{name}.self_attn.q_norm")
                keys = self._norm(keys, f"{name}.self_attn.k_norm")
            queries, keys = self._rotated(queries), self._rotated(keys)
            layers.append(torch.cat((keys, values), 2))
            x = x + self._attended(queries, keys, values) @ weights[f"{name}.self_attn.o_proj.weight"].T
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (normed @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        return x, layers

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, tokens, heads, head_dim]."""
        half = self.spec.head_dim // 2
        powers = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.spec.rope_theta**-powers
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _attended(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)
        scores = torch.einsum("rqhd,rkhd->rhqk", queries, keys) * self.spec.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("rhqk,rkhd->rqhd", weights, values).flatten(2)
