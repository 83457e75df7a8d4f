"""Run as a program by test_kernels_of_a_start.py: a GPU's start, then every step there can be, with nothing launched.

Prints a JSON object: how many kernels the start compiles, and those that a step would still have to.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch

import oneloop.worker.gpu.runner as gpu_runner
from oneloop.config import EngineConfig
from oneloop.formats.model_spec import ModelSpec, MoeSpec
from oneloop.formats.quantization.config import WHILE_LOADING
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.models.registry import build_model
from oneloop.worker.buckets import token_buckets
from oneloop.worker.gpu.slab import HostSlab
from oneloop.worker.memory.ledger import DeviceMemory
from oneloop.worker.memory.plan import plan_memory
from oneloop_core import Core, CoreConfig, Vocabulary
from oneloop_kernels.order import fixed_order
from oneloop_kernels.registry import TRITON, prefer
from oneloop_kernels.testing.recorded import names, record_compilations

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, NUM_SLABS = 256, 16, 2048, 3
SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM", hidden_size=64, intermediate_size=128, num_layers=2, num_heads=16, num_kv_heads=8,
    head_dim=128, vocab_size=0, max_position=4096, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
    tie_word_embeddings=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=True, dtype="bfloat16",
)  # fmt: skip
EXPERTS = MoeSpec(
    num_experts=16, top_k=4, intermediate_size=64, renormalised=True, dense_layers=(0,), layout="qwen"
)
SPARSE = replace(SPEC, architecture="Qwen3MoeForCausalLM", moe=EXPERTS)
EIGHT_BITS = QuantizationSpec(method="fp8-block", scheme=WHILE_LOADING["fp8-block"])
MODELS = {"dense": SPEC, "sparse": SPARSE, "sparse, 8 bits": replace(SPARSE, quantization=EIGHT_BITS)}


def make_runner(
    vocab_size: int,
    max_num_seqs: int,
    step_tokens: int,
    *,
    spec: ModelSpec = SPEC,
    block_size: int = BLOCK_SIZE,
    orders: tuple[bool, ...] = (False,),
    kv_cache_dtype: str = "auto",
) -> gpu_runner.GpuModelRunner:
    spec = replace(spec, vocab_size=vocab_size)
    settings = {
        "num_gpu_blocks_override": NUM_BLOCKS, "block_size": block_size, "max_model_len": MAX_MODEL_LEN,
        "device": "cpu", "kv_cache_dtype": kv_cache_dtype,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": step_tokens,
    }  # fmt: skip
    memory = DeviceMemory(total=1 << 36, free=1 << 36)
    core = Core(
        CoreConfig(
            num_blocks=NUM_BLOCKS, block_size=block_size, max_num_seqs=max_num_seqs, vocab_size=vocab_size,
            max_num_batched_tokens=step_tokens, max_model_len=MAX_MODEL_LEN,
        ),
        Vocabulary([b""] * vocab_size),
    )  # fmt: skip
    return gpu_runner.GpuModelRunner(
        build_model(spec, getattr(torch, spec.dtype), torch.device("cpu")),
        plan_memory(spec, spec.dtype, EngineConfig.from_flat(settings), memory),
        core.layout,
        [HostSlab(core.layout, pinned=False) for _ in range(NUM_SLABS)],
        max_num_seqs=max_num_seqs,
        max_num_tokens=step_tokens,
        enforce_eager=True,
        orders=orders,
    )


@torch.inference_mode()
def launch_everything(runner: gpu_runner.GpuModelRunner) -> None:
    """Every bucket in every variant, and admissions of different numbers."""
    for slab_index in range(NUM_SLABS):
        runner._launch_fetch(slab_index)
        runner._launch_fetch_masks(slab_index)
        for logprobs in (False, True):
            runner._launch_publish(slab_index, logprobs)
    for fixed in runner._orders:
        with fixed_order(fixed):
            for may_share in (False,) if fixed else (False, True):
                for bucket in token_buckets(runner._inputs.token_ids.shape[0]):
                    runner._launch_forward(bucket, True, may_share)
                for bucket in runner._row_buckets:
                    runner._launch_forward(bucket, False, may_share)
            for bucket in runner._row_buckets:
                for variant in runner._sampler.all_variants():
                    runner._launch_sample(bucket, variant)
    for count in (1, 2, 3, 16, 17):
        header = replace(
            runner._views[0].header(), num_admitted=count, num_history=5, num_forks=count, num_cow=count
        )
        runner._sampler.admit(header)
        runner._sampler.fork(header)
        runner._ops.fork(runner._slab.fields, runner._slab.header_index, runner._tables)


def main() -> None:
    spec = MODELS[sys.argv[1]]
    sizes = [int(argument) for argument in sys.argv[2:]]
    recorded = record_compilations()
    gpu_runner.compiling_ahead = lambda *_arguments: nullcontext()
    with prefer(TRITON):
        runner = make_runner(*sizes, spec=spec, orders=(False, True))
        runner.warm_up()
        num_at_start = len(recorded)
        launch_everything(runner)
    print(json.dumps({"at_start": names(recorded[:num_at_start]), "late": recorded[num_at_start:]}))


if __name__ == "__main__":
    main()
