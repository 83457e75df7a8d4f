"""Resident memory of a server with a 512 MB KV cache, all of it touched, above a bare `import torch`.

python -m oneloop_bench.memory
"""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

from oneloop_bench.report import print_result
from oneloop_bench.server import Server, running_server

KV_BYTES = 512 << 20
PROMPT_TOKENS = 500
NUM_AT_ONCE = 16
MIB = 1 << 20


def bare_torch_rss() -> int:
    """Bytes resident in a process that has imported torch and nothing else."""
    code = "import torch, psutil; print(psutil.Process().memory_info().rss)"
    return int(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )


def metric(server: Server, name: str) -> float:
    """One sample of /metrics, whatever its labels."""
    _, text = server.request("GET", "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith(name)]
    return float(lines[0].rsplit(" ", 1)[1])


def touch_all(server: Server) -> int:
    """Send different prompts, sixteen at once, until every block holds something. Returns how many tokens were sent."""
    draw = random.Random(0)
    bytes_per_token = 30 * 2 * 3 * 64 * 4  # layers x (K, V) x KV heads x head_dim x float32 of SmolLM2-135M
    num_prompts = int(1.2 * KV_BYTES / bytes_per_token / PROMPT_TOKENS)
    prompts = [[draw.randrange(100, 49000) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]

    def send(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.8, "top_p": 0.9}
        status, reply = server.request("POST", "/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"status {status}: {reply}")

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(pool.map(send, prompts))
    return num_prompts * PROMPT_TOKENS


def main() -> None:
    bare = bare_torch_rss()
    with running_server("--kv-cache-memory", str(KV_BYTES)) as server:
        server.wait_ready()
        process = psutil.Process(server.process.pid)
        ready = process.memory_info().rss
        sent = touch_all(server)
        full = process.memory_info().rss
        untouched = metric(server, "oneloop:kv_blocks_free")
    print(
        f"bare import torch {bare / MIB:.0f} MiB, ready {ready / MIB:.0f} MiB, {sent} tokens later {full / MIB:.0f} MiB"
    )
    above = (full - bare) / 1e9
    print_result(
        {
            "rss_above_torch_gb": round(above, 3),
            "kv_cache_bytes": KV_BYTES,
            "tokens_sent": sent,
            "kv_blocks_free": untouched,
        }
    )


if __name__ == "__main__":
    main()
