"""oneloop as an engine of the anchors' offline driver: `--engine oneloop_bench.anchors:OneloopEngine`."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

_BEGIN = time.perf_counter()

import torch  # noqa: E402  (its import is part of what is measured)

from oneloop import LLM, SamplingParams, __version__  # noqa: E402
from oneloop_bench.variants import SETTINGS_VARIABLE  # noqa: E402

_IMPORT_S = time.perf_counter() - _BEGIN

if TYPE_CHECKING:
    from collections.abc import Sequence


class OneloopEngine:
    """Dummy weights in bfloat16, everything else at its default, or as the environment's variable says."""

    def __init__(self, model_dir: str, max_model_len: int, mem_fraction: float, **settings: Any) -> None:
        """mem_fraction: part of the card's memory that the engine may take. settings: more of LLM's."""
        begin = time.perf_counter()
        settings = json.loads(os.environ.get(SETTINGS_VARIABLE, "{}")) | settings
        self._llm = LLM(
            model_dir,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max_model_len,
            gpu_memory_utilization=mem_fraction,
            use_tqdm=False,
            **settings,
        )
        self._load_s = time.perf_counter() - begin

    def generate(
        self, prompts: Sequence[list[int]], n_out: int, temperature: float = 0.0, detokenize: bool = True
    ) -> list[list[int]]:
        """Ids of exactly n_out new tokens per prompt."""
        params = SamplingParams(
            temperature=temperature, max_tokens=n_out, ignore_eos=True, detokenize=detokenize
        )
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def reset_cache(self) -> bool:
        """Forget cached prefixes. RuntimeError when that is refused: the next figure would be of another workload."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: blocks are still held")
        return True

    def info(self) -> dict[str, Any]:
        """Versions, seconds of import and load, sizes, counters."""
        stats = self._llm.stats()
        return {
            "engine": "oneloop",
            "version": __version__,
            "torch": torch.__version__,
            "import_s": round(_IMPORT_S, 3),
            "load_s": round(self._load_s, 3),
            "model": asdict(self._llm.model_info),
            "config": asdict(self._llm.config.resolved),
            "preemptions": stats.num_preemptions,
        }
