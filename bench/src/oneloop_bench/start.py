"""Seconds from the command to the first answer of `oneloop serve` with the model cached.

python -m oneloop_bench.start [runs]
"""

from __future__ import annotations

import statistics
import sys
import time

from oneloop_bench.report import print_result
from oneloop_bench.server import running_server


def first_answer_s() -> float:
    """One cold process: spawn, poll until a chat completion is answered, stop."""
    begin = time.perf_counter()
    with running_server() as server:
        server.wait_ready()
        body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}
        status, reply = server.request("POST", "/v1/chat/completions", body)
        if status != 200:
            raise RuntimeError(f"status {status}: {reply}")
        return time.perf_counter() - begin


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    times = [first_answer_s() for _ in range(runs)]
    for number, seconds in enumerate(times):
        print(f"run {number}: first answer after {seconds:.2f} s")
    print_result({"first_answer_s": round(statistics.median(times), 2), "runs": [round(t, 2) for t in times]})


if __name__ == "__main__":
    main()
