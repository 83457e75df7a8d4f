"""What a request gives back: an Added per sequence and step, RequestOutput for the Python API (names as vLLM's)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from oneloop.collector import no_collections
from oneloop.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from oneloop.engine.stream import RequestStream

FinishReason = Literal["stop", "length", "abort", "error"]

TokenLogprobs: TypeAlias = "tuple[int, list[tuple[int, float]]]"
"""(rank of the sampled token, [(sampled id, logprob), (top id, logprob), …]); the sampled id always comes first."""


class Added(Protocol):
    """What was added to one sequence since its consumer last looked: the core's Delta of one step, or several merged.

    Take a field once: the core's Delta makes it anew at every look.
    """

    @property
    def index(self) -> int:
        """Which of the request's n sequences."""

    @property
    def text(self) -> str:
        """New text; may be empty while a character or a stop string is held back."""

    @property
    def token_ids(self) -> list[int]:
        """New tokens."""

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One entry per new token; None when the request asked for none."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended, if it did."""

    @property
    def stop_reason(self) -> int | str | None:
        """Stop token id or stop string that matched; None for EOS and everything else."""

    @property
    def error(self) -> str | None:
        """One line, when finish_reason is "error"."""

    @property
    def is_request_at_fault(self) -> bool:
        """Whether what the request asks for cannot be, when finish_reason is "error"."""


@dataclass(slots=True)
class SequenceDelta:
    """An Added that can grow: several steps merged, or an end that the core did not tell."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    error: str | None = None
    is_request_at_fault: bool = False

    @classmethod
    def of(cls, added: Added) -> SequenceDelta:
        """The same, to be merged with what comes later."""
        if isinstance(added, SequenceDelta):
            return added
        logprobs = added.logprobs
        return cls(
            added.index,
            added.text,
            list(added.token_ids),
            None if logprobs is None else list(logprobs),
            added.finish_reason,
            added.stop_reason,
            added.error,
            added.is_request_at_fault,
        )

    def merge(self, later: Added) -> None:
        """Append what came after this delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        logprobs = later.logprobs
        if self.logprobs is None:
            self.logprobs = logprobs
        elif logprobs is not None:
            self.logprobs += logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.is_request_at_fault = later.is_request_at_fault


@dataclass(slots=True)
class Logprob:
    """One entry of a top list, as vLLM's users know it."""

    logprob: float
    rank: int | None
    """1 is the likeliest; None for a token that the request named."""
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with everything generated so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, None for the first; where asked for."""


class OutputBuilder:
    """Adds a stream's deltas up to RequestOutputs."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_sequences: int,
        token_text: Callable[[int], str],
        *,
        is_ranked: bool = True,
    ) -> None:
        """token_text: text of one token id, for the entries of log-probability lists. is_ranked: as RequestStream's."""
        self._is_ranked = is_ranked
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._token_text = token_text
        self._outputs = [CompletionOutput(index) for index in range(num_sequences)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, deltas: Iterable[Added]) -> None:
        """Take in what was added. GenerationError when a sequence failed."""
        for delta in deltas:
            if delta.finish_reason == "error":
                raise GenerationError(delta.error or "the request failed")
            output = self._outputs[delta.index]
            output.text += delta.text
            output.token_ids.extend(delta.token_ids)
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason
            logprobs = delta.logprobs
            if logprobs is not None:
                self._add_logprobs(output, logprobs)

    def add_told_once(self, stream: RequestStream) -> None:
        """Take in what a stream tells beside its deltas: of the prompt, and of texts that beam search found."""
        logprobs = stream.take_prompt_logprobs()
        if logprobs is not None:
            # Of a prompt of 1,000 tokens thousands of objects: the collector would take longer than all the rest.
            with no_collections():
                self._prompt_logprobs = [None, *map(self._entry, logprobs.tokens())]
        for index, logprob in stream.cumulative_logprobs.items():
            self._outputs[index].cumulative_logprob = logprob

    def snapshot(self, num_cached_tokens: int) -> RequestOutput:
        """Everything so far, independent of what is added later."""
        outputs = [
            replace(
                output,
                token_ids=output.token_ids.copy(),
                logprobs=None if output.logprobs is None else output.logprobs.copy(),
            )
            for output in self._outputs
        ]
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            all(output.finished() for output in outputs),
            num_cached_tokens,
            self._prompt_logprobs,
        )

    def _add_logprobs(self, output: CompletionOutput, logprobs: list[TokenLogprobs]) -> None:
        if output.logprobs is None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        assert output.cumulative_logprob is not None
        for token in logprobs:
            output.logprobs.append(self._entry(token, is_ranked=self._is_ranked))
            output.cumulative_logprob += token[1][0][1]

    def _entry(self, token: TokenLogprobs, *, is_ranked: bool = True) -> dict[int, Logprob]:
        rank, entries = token
        own_id, own = entries[0]
        tops = {
            token_id: Logprob(value, place if is_ranked else None, self._token_text(token_id))
            for place, (token_id, value) in enumerate(entries[1:], start=1)
        }
        tops[own_id] = Logprob(own, rank, self._token_text(own_id))
        return tops
