"""What the engine measures of its requests. Plain numbers: the API turns them into Prometheus text.

Gauges and token counters come from the core (`Core.stats`); here are the times and sizes that only the engine sees.
Counted per sequence or per request as each field says; an aborted request counts what it had generated so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.engine.histogram import Histogram
from oneloop.engine.loop_times import LoopTimes

if TYPE_CHECKING:
    from oneloop.engine.outputs import FinishReason
    from oneloop.engine.params import ResolvedParams
    from oneloop.engine.stream import RequestStream

SHORT_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
LONG_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)


class EngineMetrics:
    """Histograms and counters since the engine was made."""

    def __init__(self, loop_times: LoopTimes | None = None) -> None:
        """loop_times: where the event loop's turns are counted; None: nowhere."""
        self.loop = loop_times or LoopTimes()
        self.time_to_first_token_seconds = Histogram(LONG_S)
        self.inter_token_latency_seconds = Histogram(SHORT_S)
        """Between two tokens of one sequence, one observation per token after the first."""
        self.e2e_request_latency_seconds = Histogram(LONG_S)
        self.request_queue_time_seconds = Histogram(LONG_S)
        self.request_prefill_time_seconds = Histogram(LONG_S)
        """From admission to the first token."""
        self.request_decode_time_seconds = Histogram(LONG_S)
        """From the first token to the last."""
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        """Over all sequences of the request."""
        self.request_params_n = Histogram(SEQUENCES)
        self.request_params_max_tokens = Histogram(TOKENS)
        self.iteration_tokens = Histogram(STEP_TOKENS)
        """Tokens a step computed, prompt and output together."""
        self.request_success: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        """Finished requests by reason; of several sequences the most severe counts (error, abort, length, stop)."""
        self.rejected: dict[str, int] = dict.fromkeys(("invalid", "overloaded"), 0)
        """Requests that were never queued."""

    def submitted(self, stream: RequestStream, params: ResolvedParams) -> None:
        """A request was queued."""
        self.request_prompt_tokens.observe(len(stream.prompt_token_ids))
        self.request_params_n.observe(params.n)
        if params.max_tokens is not None:
            self.request_params_max_tokens.observe(params.max_tokens)

    def finished(self, stream: RequestStream, reason: FinishReason) -> None:
        """A request ended, in whatever way (its `times` are final)."""
        times = stream.times
        self.request_success[reason] += 1
        self.request_generation_tokens.observe(stream.num_generated_tokens)
        if times.finished is not None:
            self.e2e_request_latency_seconds.observe(times.finished - times.arrived)
        if times.queue_s is not None:
            self.request_queue_time_seconds.observe(times.queue_s)
        if times.first_token is not None and times.last_token is not None:
            prefill_s = times.first_token - times.arrived - (times.queue_s or 0.0)
            self.request_prefill_time_seconds.observe(max(prefill_s, 0.0))
            self.request_decode_time_seconds.observe(times.last_token - times.first_token)
