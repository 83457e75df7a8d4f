"""SmolLM2 in float32 on the CPU: oneloop beside transformers' generate (and llama.cpp where installed), one run.

python -m oneloop_bench.cpu

One stream of 256 tokens, then sixteen requests at once. Rounds alternate between the engines, so that a machine whose
speed drifts treats both alike; the best round of each counts. llama.cpp reads the quantised file itself: a yardstick
for what a quantised CPU path could reach, not a like-for-like figure. torch is imported after the engine has set how
OpenMP's threads wait, so that both run under the same policy.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from oneloop import LLM, SamplingParams
from oneloop.loader.embedded import fetch_embedded
from oneloop_bench.report import print_result

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
NUM_REQUESTS = 16
STREAM_TOKENS = 256
STATIC_BATCH_SIZES = (16, 8, 4)

Request = tuple[list[int], int]
"""(prompt token ids, tokens to generate)"""


def workload() -> list[Request]:
    """Sixteen seeded requests: prompts of 8-256 tokens, outputs of 16-128."""
    draw = random.Random(1)
    return [
        ([draw.randrange(100, 49000) for _ in range(draw.randint(8, 256))], draw.randint(16, 128))
        for _ in range(NUM_REQUESTS)
    ]


class Oneloop:
    """The whole engine through its Python API: scheduler, detokenizer and loop included."""

    def __init__(self) -> None:
        self._llm = LLM(
            "smollm2", dtype="float32", kv_cache_memory_bytes=512 << 20, enable_prefix_caching=False
        )

    def run(self, requests: list[Request]) -> None:
        """All requests at once; each gets exactly its number of tokens."""
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
        results = self._llm.generate(prompts, params, use_tqdm=False)
        assert [len(r.outputs[0].token_ids) for r in results] == [n for _, n in requests]


class Transformers:
    """generate() with left padding; a batch runs as long as its longest answer."""

    def __init__(self) -> None:
        from oneloop_bench.reference import transformers_llama

        self._model = transformers_llama(fetch_embedded())

    def run(self, requests: list[Request], batch_size: int) -> None:
        """Static batches in order of answer length, which wastes the least."""
        ordered = sorted(requests, key=lambda request: request[1])
        for start in range(0, len(ordered), batch_size):
            self._batch(ordered[start : start + batch_size])

    def _batch(self, requests: list[Request]) -> None:
        import torch

        longest = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
        num_new = max(n for _, n in requests)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=0
            )
        assert out.shape[1] == longest + num_new


def llama_cpp_tok_s(prompt: list[int]) -> float | None:
    """Tokens/s of llama.cpp on the quantised file, one stream; None where it is not installed."""
    import torch

    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    llama = Llama(str(fetch_embedded()), n_ctx=1024, n_threads=torch.get_num_threads(), verbose=False)

    def run() -> None:
        for count, _ in enumerate(llama.generate(prompt, temp=0.0)):
            if count + 1 == STREAM_TOKENS:
                return

    return STREAM_TOKENS / min(timed(run) for _ in range(ROUNDS))


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def best_of_rounds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Shortest of ROUNDS alternating rounds, in seconds, by name. Says what it is at."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(1, ROUNDS + 1):
        for name, run in runs.items():
            seconds = timed(run)
            print(f"  round {number} of {ROUNDS}, {name}: {seconds:.1f} s", flush=True)
            best[name] = min(best[name], seconds)
    return best


def main() -> None:
    print(
        f"{ROUNDS} rounds of one stream, then {ROUNDS} of sixteen: some ten minutes on two idle cores",
        flush=True,
    )
    ours, theirs = Oneloop(), Transformers()
    import torch

    prompt = workload()[0][0][:32]
    ours.run([(prompt, 8)])
    theirs.run([(prompt, 8)], 1)

    single = [(prompt, STREAM_TOKENS)]
    one = best_of_rounds({"ours": lambda: ours.run(single), "theirs": lambda: theirs.run(single, 1)})
    print(
        f"one stream, {STREAM_TOKENS} tokens: oneloop {STREAM_TOKENS / one['ours']:.1f} tok/s, "
        f"transformers {STREAM_TOKENS / one['theirs']:.1f} tok/s"
    )

    requests = workload()
    useful = sum(n for _, n in requests)
    runs: dict[str, Callable[[], Any]] = {"ours": lambda: ours.run(requests)}
    for size in STATIC_BATCH_SIZES:
        runs[f"static {size}"] = partial(theirs.run, requests, size)
    many = best_of_rounds(runs)
    for name, seconds in many.items():
        print(f"sixteen at once, {useful} useful tokens: {name} {useful / seconds:.1f} tok/s")
    static = min(seconds for name, seconds in many.items() if name != "ours")

    yardstick = llama_cpp_tok_s(prompt)
    print(
        f"llama.cpp, quantised file, one stream: {f'{yardstick:.1f} tok/s' if yardstick else 'not installed'}"
    )
    print_result({
        "ratio_1": round(one["theirs"] / one["ours"], 2),
        "ratio_16": round(static / many["ours"], 2),
        "tok_s_1": round(STREAM_TOKENS / one["ours"], 1),
        "tok_s_16": round(useful / many["ours"], 1),
        "transformers_tok_s_1": round(STREAM_TOKENS / one["theirs"], 1),
        "transformers_tok_s_16": round(useful / static, 1),
        "llama_cpp_tok_s_1": round(yardstick, 1) if yardstick else None,
        "threads": torch.get_num_threads(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
