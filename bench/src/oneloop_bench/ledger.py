"""The memory ledger beside what one GPU gives: every item as planned and as measured.

    python -m oneloop_bench.ledger MODEL_DIR [--max-num-seqs N] [--max-num-batched-tokens N] [--max-model-len N]
        [--enforce-eager] [--json FILE]

Dummy weights. The largest step's memory stays in the allocator after the warm-up. The KV cache is 1 GiB, since its size
needs no measuring. The constants of `oneloop.worker.memory.gpu` are set from what this prints. One model a run, since
the driver's share never shrinks. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oneloop.config import EngineConfig
from oneloop.engine.loop import NUM_SLABS
from oneloop.executor.loading import ModelLoading
from oneloop.start_times import StartTimes
from oneloop.worker.gpu.runner import GpuModelRunner
from oneloop.worker.gpu.slab import HostSlab
from oneloop.worker.memory.free import gpu_memory
from oneloop_bench.report import BenchError, print_result, run_bench, save_result
from oneloop_core import Core, CoreConfig, Vocabulary

if TYPE_CHECKING:
    from oneloop.executor.loading import LoadedModel
    from oneloop.worker.gpu.sampler import SampleVariant

MIB = 1 << 20
KV_BYTES = 1 << 30


def nvml_free() -> int:
    """Bytes of the GPU that nobody has, by the driver's count."""
    memory = gpu_memory()
    if memory is None:
        raise BenchError("this bench needs an NVIDIA GPU whose driver tells its memory (NVML)")
    return memory.free


def tensor_bytes(group: Any) -> int:
    """Of all tensors that are fields of a dataclass (or an object with slots)."""
    names = [item.name for item in fields(group)]
    values = (getattr(group, name) for name in names)
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


class Measured(GpuModelRunner):
    """Notes the most that a forward pass and a sampling take above what is allocated before."""

    forward_peak = 0
    sample_peak = 0
    outside_before_graphs = 0
    reserved_before_graphs = 0
    free_at_start = 0

    def outside(self) -> int:
        """Bytes taken that are not the allocator's: context, code, graphs."""
        return self.free_at_start - nvml_free() - torch.cuda.memory_reserved()

    def _launch_forward(self, num_tokens: int, has_multi: bool, may_share: bool) -> torch.Tensor:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        hidden = super()._launch_forward(num_tokens, has_multi, may_share)
        self.forward_peak = max(self.forward_peak, peak_above(before))
        return hidden

    def _launch_sample(self, num_samples: int, variant: SampleVariant) -> None:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        super()._launch_sample(num_samples, variant)
        self.sample_peak = max(self.sample_peak, peak_above(before))

    def _capture_first(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.outside_before_graphs = self.outside()
        self.reserved_before_graphs = torch.cuda.memory_reserved()
        super()._capture_first()


def peak_above(before: int) -> int:
    """Bytes allocated at most since the peak was reset, less what was there before or has come to stay (workspaces)."""
    return torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())


def pool_bytes() -> int:
    """Memory that the allocator keeps for graphs."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def make_core(config: EngineConfig, loaded: LoadedModel) -> Core:
    """For the layout of its slabs."""
    info, resolved = loaded.info, config.resolved
    return Core(
        CoreConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.step_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        ),
        Vocabulary([b""] * info.vocab_size),
    )


def measure(config: EngineConfig) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Planned and measured bytes by item, and what else is worth knowing."""
    free_at_start = nvml_free()
    torch.zeros(1, device="cuda")
    context = free_at_start - nvml_free() - torch.cuda.memory_reserved()
    memory = gpu_memory()
    assert memory is not None
    loading = ModelLoading(config, StartTimes())
    loading.locate(None)
    loaded = loading.load(torch.device("cuda", 0), memory, None)
    weights = torch.cuda.memory_allocated()
    layout = make_core(config, loaded).layout
    slabs = [HostSlab(layout, pinned=True) for _ in range(NUM_SLABS)]
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        runner = Measured(
            loaded.model, loaded.plan, layout, slabs,
            max_num_seqs=config.resolved.max_num_seqs,
            max_num_tokens=config.resolved.step_tokens,
            enforce_eager=config.worker.enforce_eager,
        )  # fmt: skip
        runner.free_at_start = free_at_start
        made = torch.cuda.memory_allocated() - weights
        runner.warm_up()
        while runner.prepare_in_idle():
            pass
        torch.cuda.synchronize()
    kv = runner.kv.storage.nbytes
    attention = tensor_bytes(runner._attention._space)  # type: ignore[attr-defined]  # Triton's, on a GPU
    sampler = tensor_bytes(runner._sampler._slots) + tensor_bytes(runner._sampler._scratch)
    products = torch.cuda.memory_allocated() - weights - made
    outside = runner.outside()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - pool_bytes()
    graphs = 0 if config.worker.enforce_eager else outside - runner.outside_before_graphs
    measured = {
        "context": outside - graphs,
        "weights": weights,
        "activations": runner.forward_peak,
        "logits": runner.sample_peak,
        "workspaces": attention + products,
        "step_buffers": made - kv - attention - sampler,
        "sampler": sampler + 2 * config.resolved.max_num_seqs * loaded.info.vocab_size * 4,
        "graphs": graphs + pool_bytes(),
        "slack": unused - runner.forward_peak - runner.sample_peak,
        "kv_cache": kv,
    }
    planned = {**loaded.plan.ledger.reserved.items(), "kv_cache": loaded.plan.ledger.kv_cache}
    notes = {
        "context before any kernel": context,
        "graphs: driver": graphs,
        "graphs: pool": pool_bytes(),
        "graphs: number": len(runner.graphs._graphs),
        "workspaces: attention": attention,
        "workspaces: products, left after the warm-up": products,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "taken after the warm-up, by NVML": free_at_start - nvml_free(),
    }
    return planned, measured, notes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = vars(parser.parse_args())
    model, file = arguments.pop("model"), arguments.pop("json")
    given = {name: value for name, value in arguments.items() if value is not None}
    config = EngineConfig.from_flat(
        {
            "model": model, "device": "cuda", "dtype": "bfloat16", "load_format": "dummy",
            "kv_cache_memory_bytes": KV_BYTES, **given,
        }
    )  # fmt: skip
    planned, measured, notes = measure(config)
    print(f"{model}, MiB: {'planned':>24} {'measured':>10}")
    for name, value in planned.items():
        print(f"  {name:40} {value / MIB:10.1f} {measured[name] / MIB:10.1f}")
    print(f"  {'all':40} {sum(planned.values()) / MIB:10.1f} {sum(measured.values()) / MIB:10.1f}")
    for name, value in notes.items():
        print(f"  {name:40} {value if 'number' in name else round(value / MIB, 1)}")
    result = {
        "bench": "ledger", "model": Path(model).name, "settings": given,
        "planned": planned, "measured": measured, "notes": notes,
        "utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "gpu": torch.cuda.get_device_name(),
    }  # fmt: skip
    if file is not None:
        save_result(file, result)
    print_result(result)


if __name__ == "__main__":
    run_bench(main)
