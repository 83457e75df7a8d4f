"""SamplingParams: what a request asks of the sampler and of the stop test. Names as vLLM's users know them."""

from __future__ import annotations

from dataclasses import dataclass, field

from oneloop.errors import RequestError  # noqa: F401  (raised by validate)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. None means: the model's generation_config, then the usual default.

    Raises RequestError naming the field, from `resolve()`.
    """

    n: int = 1
    """Sequences to generate from the prompt."""
    temperature: float | None = None
    """0 = greedy; default 1.0."""
    top_p: float | None = None
    """Nucleus mass in (0, 1]; default 1.0."""
    top_k: int | None = None
    """Keep the k most likely; 0 or -1 = off (default)."""
    min_p: float | None = None
    """Drop tokens below min_p x the most likely one's probability; default 0."""
    repetition_penalty: float | None = None
    """> 0; 1.0 = off (default). Applies to prompt and output tokens."""
    presence_penalty: float = 0.0
    """-2 … 2, on output tokens."""
    frequency_penalty: float = 0.0
    """-2 … 2, on output tokens."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch."""
    max_tokens: int | None = None
    """New tokens per sequence; None fills the context."""
    min_tokens: int = 0
    """No stop of any kind before this many tokens."""
    stop: tuple[str, ...] | list[str] | str = ()
    """Strings that end the text; not part of it unless include_stop_str_in_output."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    """Top log-probabilities per output token (0 … 20); None = none."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id → value in [-100, 100] added to its logit."""
