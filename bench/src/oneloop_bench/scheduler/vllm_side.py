"""The peer's side: vLLM's Scheduler with its KVCacheManager. Runs in the peer's environment, which has none of ours.

A child process of the bench: reads commands from its input, a JSON object a line, and answers each with one on the
descriptor that its only argument names; vLLM prints to the others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import thread_time_ns
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from oneloop_bench.scheduler.workload import Mix, Steps, place


def vllm_config(mix: Mix, folder: Path) -> VllmConfig:
    """Defaults but for the sizes, and for scheduling ahead of results, which only costs more time per step."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": mix.vocab_size,
        "max_position_embeddings": mix.max_model_len,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(model))
    cache = CacheConfig(block_size=mix.block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = mix.num_blocks + 1  # its first block is never used
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, max_model_len=mix.max_model_len, dtype="bfloat16"
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=mix.max_num_seqs,
            max_num_batched_tokens=mix.max_num_batched_tokens,
            max_model_len=mix.max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )


class VllmSide:
    """See Side."""

    def load(self, mix: Mix) -> None:
        """See Side."""
        self._mix = mix
        with tempfile.TemporaryDirectory() as folder:
            config = vllm_config(mix, Path(folder))
        spec = FullAttentionSpec(
            block_size=mix.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        kv_cache = KVCacheConfig(
            num_blocks=mix.num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(mix.block_size, hash_function)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=mix.block_size,
            log_stats=False,
        )
        self._next_step = self._next_request = 0
        freeze_gc_heap()  # as its engine does when it starts

    def run(self, num_steps: int) -> Steps:
        """See Side."""
        steps = Steps.none()
        for _ in range(num_steps):
            steps.submit.append(self._submit())
            began = thread_time_ns()
            scheduled = self._scheduler.schedule()
            steps.schedule.append(thread_time_ns() - began)
            steps.rows.append(schedule_rows(scheduled))
            output = self._sample(scheduled)
            began = thread_time_ns()
            self._scheduler.update_from_output(scheduled, output)
            steps.update.append(thread_time_ns() - began)
            self._next_step += 1
        return steps

    def _submit(self) -> int:
        """Make and add the requests that come before the next step; ns."""
        arrivals = [
            (str(number), prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
            for number, prompt, max_tokens in self._mix.arrivals(self._next_request, self._next_step)
        ]
        self._next_request += len(arrivals)
        began = thread_time_ns()
        for request_id, prompt, sampling in arrivals:
            self._scheduler.add_request(
                Request(request_id, prompt, sampling, None, block_hasher=self._hasher)
            )
        return thread_time_ns() - began

    def _sample(self, scheduled: Any) -> ModelRunnerOutput:
        """What a model runner tells: a token for each request whose known tokens are computed, else none."""
        request_ids = list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in request_ids:
            request = self._scheduler.requests[request_id]
            if request.num_computed_tokens < request.num_tokens:  # counted up already when it was scheduled
                sampled.append([])
                continue
            at = place(int(request_id), request.num_output_tokens, len(self._mix.text))
            sampled.append([self._mix.text[at]])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )


def schedule_rows(scheduled: Any) -> list[int]:
    """As Steps.rows, of one SchedulerOutput."""
    cached = scheduled.scheduled_cached_reqs
    num_computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    num_computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    rows: list[int] = []
    # No object per row that lives on: they would make the collector run amid what is measured.
    for request_id in sorted(scheduled.num_scheduled_tokens, key=int):
        rows += (int(request_id), num_computed[request_id], scheduled.num_scheduled_tokens[request_id])
    return rows


def main() -> None:
    """Serve commands until the pipe is closed."""
    side = VllmSide()
    answers = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            side.load(Mix.from_json(command["load"]))
            answer: dict[str, Any] = {}
        else:
            answer = asdict(side.run(command["run"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
