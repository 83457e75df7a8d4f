"""The scheduler, block pool and detokenizer of oneloop, written in Rust (see docs/architecture.md)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, final

from typing_extensions import Buffer

from oneloop_core import snapshot as snapshot
from oneloop_core.snapshot import Snapshot

__all__ = [
    "BUILD_PROFILE",
    "MAX_LOGPROBS",
    "AuditError",
    "CompletionWatcher",
    "ConfigError",
    "Core",
    "CoreConfig",
    "CoreError",
    "CorePoisonedError",
    "Delta",
    "Deltas",
    "Field",
    "FinishReason",
    "Grammar",
    "GrammarBusyError",
    "GrammarCompiler",
    "GrammarError",
    "GrammarMatcher",
    "LogprobsEncoder",
    "PromptLogprobs",
    "RequestError",
    "SlabError",
    "SlabLayout",
    "Stats",
    "StreamDecoder",
    "StreamRelay",
    "TraceDifference",
    "TraceError",
    "TraceReplay",
    "TraceWriter",
    "Vocabulary",
    "__version__",
    "snapshot",
]

__version__: Final[str]
BUILD_PROFILE: Final[str]
"""Cargo profile this module was built with: "release" or "debug"."""

MAX_LOGPROBS: Final[int]
"""Most top log-probabilities a request may ask for per token (20)."""

FinishReason = Literal["stop", "length", "abort", "error"]

class CoreError(Exception):
    """Base of every error the core raises."""

@final
class RequestError(CoreError):
    """A request the core refuses. ``args`` is ``(message,)``."""

    field: str
    """Name of the offending argument of :meth:`Core.submit`."""
    message: str

@final
class ConfigError(CoreError):
    """A :class:`CoreConfig` that cannot work; the message names the field and the remedy."""

@final
class SlabError(CoreError):
    """A slab buffer of the wrong size or alignment, or a step out of order."""

@final
class TraceError(CoreError):
    """A schedule trace that cannot be read: no trace, of another version, cut off or damaged."""

@final
class AuditError(CoreError):
    """A conservation law does not hold (always a bug of ours)."""

@final
class CorePoisonedError(CoreError):
    """A panic was caught, in this call or an earlier one; every request has ended and the core accepts no more."""

@final
class Vocabulary:
    """Bytes of every token, made once per tokenizer and shared by all requests.

    pieces: bytes of token i (empty for ids that stand for nothing).
    special_ids: ids dropped when skip_special_tokens is set.
    strip_leading_space: SentencePiece-style vocabularies: a *whole text* loses one leading space (streams keep it).
    Raises ValueError for a special id out of range.
    """

    def __new__(
        cls, pieces: Sequence[bytes], special_ids: Sequence[int] = (), *, strip_leading_space: bool = False
    ) -> Vocabulary: ...
    def __len__(self) -> int: ...
    def piece(self, token_id: int) -> bytes:
        """Bytes of one token. IndexError when out of range."""
    def decode(self, token_ids: Buffer | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; malformed UTF-8 becomes U+FFFD as in Python's ``errors="replace"``.

        IndexError for an id out of range.
        """

@final
class StreamDecoder:
    """The incremental detokenizer alone: push ids, get text.

    stop: the text ends at the first position where one of them ends; of several that end there the longest counts.
    Text is held back only as long as it can still become a stop string. min_tokens: a stop string counts only when a
    later token than that many completes it. shown_special_ids: special tokens that leave their text all the same.
    ValueError for an empty stop string.
    """

    def __new__(
        cls,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> StreamDecoder: ...
    def push(self, token_id: int) -> str:
        """Text that became final with this token (may be empty). After a stop string matched: always empty.

        IndexError for an id out of range.
        """
    def flush(self) -> str:
        """What was held back (incomplete characters as U+FFFD, stop-string candidates)."""
    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if any."""

@final
class CoreConfig:
    """Sizes and policies. Raises ConfigError naming the field. All sizes are counts unless the name says otherwise."""

    def __new__(
        cls,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        mixed_step_tokens: int | None = None,
        max_model_len: int = 2048,
        vocab_size: int,
        hidden_size: int = 0,
        enable_prefix_caching: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        max_steps_in_flight: int = 2,
        seed: int = 0,
        hash_key: bytes | None = None,
    ) -> CoreConfig:
        """mixed_step_tokens: tokens of a step in which streams decode; prefill gets at least half of it.

        None: max_num_batched_tokens. hidden_size: numbers of a pooled hidden state; 0: pooling is refused.
        seed: source of the seeds of requests that bring none. hash_key: 16 bytes; None draws them at random.
        """
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def mixed_step_tokens(self) -> int | None: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def policy(self) -> Literal["fcfs", "priority"]: ...
    @property
    def max_steps_in_flight(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def hash_key(self) -> bytes | None: ...

@final
class Field:
    """One array of the slab."""

    name: str
    dtype: Literal["i32", "i64", "f32"]
    offset: int
    """Bytes from the start of the slab; a multiple of 64."""
    length: int
    """Elements."""

@final
class SlabLayout:
    fields: tuple[Field, ...]
    num_bytes: int
    """Size of the whole slab."""
    input_bytes: int
    """The input part is [0, input_bytes)."""
    mask_offset: int
    """The output part is [input_bytes, mask_offset), the part of the masks the rest."""
    header: dict[str, int]
    """Name → index into the ``header`` field."""

@final
class Delta:
    """What one step added to one sequence."""

    @property
    def request(self) -> int:
        """Handle that submit() returned."""
    @property
    def index(self) -> int:
        """Which of the request's n sequences."""
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that matched; None for EOS and for everything else."""
    @property
    def logprobs(self) -> list[tuple[int, list[tuple[int, float]]]] | None:
        """Per token: (rank of the sampled token, [(sampled id, logprob), (top id, logprob)…]); None when not asked."""
    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of the prompt's tokens, where asked for; only in the first delta of the request's sequence 0."""
    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of a text that beam search found."""
    @property
    def pooled(self) -> bytes | None:
        """The pooled hidden state, where asked for: hidden_size 32-bit floats in the machine's byte order."""
    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache at the first admission."""
    @property
    def queue_s(self) -> float | None:
        """Seconds from submit to first admission; only in a sequence's first delta."""
    @property
    def error(self) -> str | None:
        """Message, when finish_reason is "error"."""
    @property
    def is_request_at_fault(self) -> bool:
        """Whether that is because what the request asks for contradicts itself, or is too much work for one token."""

@final
class PromptLogprobs:
    """Log-probabilities of each prompt token but the first, in order."""

    def __len__(self) -> int: ...
    def tokens(self, start: int = 0, stop: int = ...) -> list[tuple[int, list[tuple[int, float]]]]:
        """Of the prompt's tokens start + 1 to stop, as Delta.logprobs has them: (rank, [(id, logprob), top…])."""
    def json(self, vocabulary: Vocabulary, num_top: int) -> bytes:
        """The value of a reply's field ``prompt_logprobs``. Without the GIL; takes as long as it is."""

@final
class Deltas:
    """All deltas of one commit, in the order of the step's samples. Iterating creates the Delta objects lazily."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Delta]: ...

@final
class Stats:
    """A snapshot. Gauges first, then counters since the core was made."""

    num_running: int
    num_waiting: int
    num_total_blocks: int
    num_free_blocks: int
    """Never used, or evicted: no content."""
    num_cached_blocks: int
    """Unreferenced but findable content; taken when free ones run out."""
    num_used_blocks: int
    """Referenced by a block table. free + cached + used = total."""
    num_steps_in_flight: int
    num_steps: int
    num_preemptions: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    """Prompt tokens computed or taken from the cache (first admission only)."""
    num_generation_tokens: int
    num_submitted: int
    """Sequences, as all below: submitted = finished_stop + finished_length + aborted + errored + running + waiting."""
    num_finished_stop: int
    num_finished_length: int
    num_aborted: int
    num_errored: int

@final
class Grammar:
    """What the tokens of a sequence must be, compiled. Any number of requests may use one."""

    @staticmethod
    def from_automaton(states: Sequence[Mapping[int, int]]) -> Grammar:
        """A grammar by table: states[s] maps the tokens that may come in state s to the state after them.

        It begins in state 0; where nothing may come it is over. ValueError for no state, a state that is not there, or
        a beginning in which nothing may come.
        """
    def matcher(self) -> GrammarMatcher:
        """The state before the first token, for tests and tools. ValueError for a grammar by table."""

@final
class Core:
    """Owns requests, block tables and batch rows. Belongs to the engine's loop thread.

    submit() and abort() may be called from any thread at any moment (they post to a queue that schedule() drains);
    all other methods from one thread. Every long method releases the GIL.
    """

    def __new__(cls, config: CoreConfig, vocabulary: Vocabulary | None = None) -> Core:
        """vocabulary None: deltas carry ids and no text; stop strings are refused."""
    @property
    def config(self) -> CoreConfig: ...
    @property
    def layout(self) -> SlabLayout: ...
    def submit(
        self,
        prompt_token_ids: Buffer | Sequence[int],
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        n: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        logprobs: int | None = None,
        logprob_token_ids: Sequence[int] = (),
        prompt_logprobs: int | None = None,
        pooling: Literal["last", "mean"] | None = None,
        beam_search: tuple[float, Literal["heuristic", "always", "never"]] | None = None,
        logit_bias: Sequence[tuple[int, float]] = (),
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown_special_ids: Sequence[int] = (),
        detokenize: bool = True,
        final_only: bool = False,
        grammar: Grammar | None = None,
        grammar_after: Sequence[int] = (),
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        thinking_budget: int | None = None,
        thinking_end: Sequence[int] = (),
        priority: int = 0,
        cache_salt: bytes = b"",
        adapter: int = -1,
        deterministic: bool = False,
    ) -> int:
        """Queue a request; returns its handle (never reused, > 0).

        prompt_token_ids: 4-byte signed buffer (array("i"), int32 numpy) or a sequence of ints, each in [0, vocab_size).
        max_tokens: new tokens per sequence; None fills the context. 0 only with prompt_logprobs or pooling, for
        n = 1: the sequence ends with its prompt.
        prompt_logprobs: 0 … MAX_LOGPROBS top entries per prompt token but the first. pooling: the prompt's hidden
        states as one vector. For both (but not "last") the whole prompt is computed, whatever is cached.
        beam_search: (length_penalty, when it ends): the n sequences are beams, and what is told are the n best texts,
        best first, at the end; every sampling field must be neutral, and nothing may bind the tokens.
        final_only: each sequence gets one delta, at its end, with all that its deltas would have said.
        shown_special_ids: special tokens whose text is shown though skip_special_tokens hides the others.
        grammar: what the tokens must be; from the first one on, or once grammar_after (at most 64
        token ids) was generated. allowed_token_ids: the only ones that may come. bad_words: at most 1,024
        sequences of ids of which none may come. thinking_budget: after so many tokens without thinking_end (token ids),
        these are forced; with a grammar it needs grammar_after.
        deterministic: steps that hold a row of it have the flag for sums in the fixed order; cached prefixes are
        shared among such requests only.
        top_k: 0 = off. temperature 0 = greedy. seed: any i64. logprobs: 0 … MAX_LOGPROBS top entries per token.
        logprob_token_ids: with logprobs, at most 128 tokens whose log-probabilities are told behind these.
        Raises RequestError naming the argument: empty prompt, id out of range, prompt + 1 > max_model_len, a
        sequence that could never fit the pool, n > max_num_seqs, non-finite or out-of-range numbers.
        """
    def abort(self, request: int) -> bool:
        """End a request at once, in whatever state. Idempotent; False when the handle is unknown or has ended.

        Its blocks are free after the next schedule() or drain(); no delta follows.
        """
    def end_thinking(self, request: int, token_ids: Sequence[int]) -> bool:
        """The request's next tokens are these (at most 64), then it goes on; a grammar that waited holds then.

        Tokens that are being sampled come first. Nothing happens where the thinking has ended, as far as
        `grammar_after` or `thinking_end` tell. False when the handle is unknown or has ended. Any thread, at any
        moment. RequestError (token_ids) for none, too many, an id out of range, or a request for beams.
        """
    def drain(self) -> None:
        """Apply what submit() and abort() queued without scheduling a step (abort while no step is due)."""
    def schedule(self, slab: Buffer) -> int | None:
        """Write the next step into the slab (a writable buffer of layout.num_bytes, 64-byte aligned).

        Returns the step id, or None when nothing can run now (no work, or max_steps_in_flight reached).
        May be called again before the last step's commit().
        """
    def commit(self, step_id: int, slab: Buffer) -> Deltas:
        """Read the results of the oldest step in flight, append tokens, test stops, detokenise.

        A sampled id outside the vocabulary (−1: the logits hold NaN or +∞) ends its sequence with finish_reason
        "error".
        Steps are committed in the order they were scheduled; another step_id is a SlabError.
        """
    def fill_masks(self, step_id: int, slab: Buffer) -> int:
        """Write the masks of a step in flight into its slab; returns how many samples have one that binds.

        Due where the header's num_masked is not 0, once, before the step is sampled. Where its masks_wait is set, they
        depend on the tokens of the step before it: after that one's commit. SlabError before, and for a step that is
        not in flight. Many masks are computed on several threads. A constraint that fails ends its sequence with
        finish_reason "error", when the step is committed.
        """
    def fail(self, step_id: int, message: str) -> Deltas:
        """The oldest step in flight failed: its requests end with finish_reason "error", its blocks are forgotten."""
    def set_priority(self, request: int, priority: int) -> bool:
        """Give a live request another priority (lower is sooner), from the next step on; for the loop's thread.

        False, and nothing is done, when it has ended, or where the policy has no priorities.
        """
    def has_work(self) -> bool:
        """Whether anything is queued, waiting, running or in flight."""
    def stats(self) -> Stats: ...
    def snapshot(self, max_sequences: int = 100, max_letters: int = 1024) -> Snapshot:
        """What runs, what waits and why, the last steps and the blocks, for a person to look at.

        At most max_sequences running and as many waiting sequences, and max_letters letters of the map: the time it
        takes is bounded by these and the length of the queue.
        """
    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False (and nothing done) while blocks are referenced."""
    def record_trace(self, path: str | Path) -> TraceWriter:
        """Record everything from here on (docs/schedule-trace.md); a thread that runs the writer puts it into the file.

        An older file is replaced; only its owner may read the new one. Recording never waits for the writer: when more
        than 64 MiB of events wait for it, the trace ends. OSError when the file cannot be made, ConfigError when
        something happened in the core before.
        """
    def close_trace(self) -> None:
        """End the trace, if one is recorded: the writer writes the rest and returns. Idempotent."""
    def audit(self) -> None:
        """Check every conservation law; AuditError names the one that broke. O(state): for tests."""

@final
class TraceWriter:
    """Writes what a core records."""

    def run(self) -> tuple[int, int, str | None]:
        """Write until the trace ends; blocks without the GIL, so give it a thread. Once only.

        (steps, bytes, what went wrong or None). Whatever it was, the file holds a sound trace up to there.
        """

@final
class TraceDifference:
    """Where a replay first decided otherwise than the recorded core."""

    step_id: int
    """The step that was being decided, or whose results were taken."""
    field: str
    """What differs: a field of the slab with its index, or what else is compared."""
    expected: str
    """As recorded."""
    got: str
    """As replayed."""

@final
class TraceReplay:
    """A trace's file, run through a core of its own: each decision is compared with the recorded one.

    Its counts are those of what was replayed so far. TraceError for a file that is no trace (OSError when there is
    none); the same from `run` and `advance` where it is cut off or damaged, after all that comes before was replayed.
    """

    def __new__(cls, path: str | Path) -> TraceReplay: ...
    def run(self, until: int | None = None) -> None:
        """Replay until so many steps were scheduled, or to the end, or to the first difference. Without the GIL."""
    def advance(self) -> str | None:
        """Replay the next event and describe it in a line; None at the end of the trace and after a difference."""
    @property
    def release(self) -> str:
        """Version of the core that wrote the trace."""
    @property
    def num_events(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Computed by the steps."""
    @property
    def num_preemptions(self) -> int: ...
    @property
    def end(self) -> str | None:
        """Why the trace ends; None before its end, and where it has no end mark: the process was killed."""
    @property
    def poisoned_during(self) -> str | None:
        """In which call the recorded core panicked."""
    @property
    def difference(self) -> TraceDifference | None: ...

@final
class CompletionWatcher:
    """A native thread that watches a 64-bit integer in host memory and writes a descriptor whenever it grows.

    A device writes the number of the last finished step into the word (pinned memory, numbers that only grow); the
    event loop watches the descriptor. The thread needs no GIL and no driver. It polls only while a step is expected:
    naps of a 64th of the wait so far, up to max_nap_us (longer ones after 50 ms), cost little and see a step's end
    within about that time. Expecting nothing, it is parked.

    word: a buffer over one aligned 64-bit integer; its export is held until the watcher is gone, so a numpy view of a
    pinned tensor stays valid. fd: an eventfd, or a pipe's end, best non-blocking; it is duplicated, so the caller may
    close its own at any time. max_nap_us: 0 spins on a core instead. ValueError for a buffer of another kind, OSError
    for a descriptor that is not open.
    """

    def __new__(cls, word: Buffer, fd: int, *, max_nap_us: int = 20) -> CompletionWatcher: ...
    def expect(self, number: int) -> None:
        """A step with this number was launched. One write follows for every time the word was seen to have grown.

        ValueError after close().
        """
    @property
    def completed(self) -> int:
        """The word now. What the device wrote before it is visible after this."""
    def close(self) -> None:
        """End the thread, whatever is expected. Idempotent; also done when the object goes."""

@final
class LogprobsEncoder:
    """One choice's log-probabilities as JSON; what was added is taken once.

    form: "chat": ``{"content": [...]}``, an object per token, its bytes joining up to the text's. "completion": four
    parallel lists; ``text_offset`` counts characters and runs on from take to take. num_top: most alternatives shown
    per token. skip_special_tokens: special tokens add nothing to the text. ValueError for another form.

    A token's text comes from its bytes; of a part of a character it is ``bytes:\\xe2\\x82``, of ids beyond the
    vocabulary nothing. Numbers are written as ``repr`` writes them; what JSON cannot say (infinities, NaN), and less,
    is -9999.0.
    """

    def __new__(
        cls,
        vocabulary: Vocabulary,
        form: Literal["chat", "completion"],
        *,
        num_top: int,
        skip_special_tokens: bool,
    ) -> LogprobsEncoder: ...
    def add(self, tokens: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> None:
        """Encode the next tokens, as `Delta.logprobs` has them. ValueError for one without the sampled token."""
    def add_prompt(self, prompt_token_ids: Sequence[int], logprobs: PromptLogprobs, num_hidden: int) -> None:
        """Encode an echoed prompt, before anything else; its first token has no log-probability. Not for chat.

        num_hidden: tokens at its start that are no part of the echoed text. Without the GIL; takes as long as it is.
        """
    def take(self) -> bytes:
        """JSON of all tokens since the last take."""

@final
class StreamRelay:
    """Encodes the text of streamed replies and sends it to their sockets, many per call and without the GIL.

    A lane is a request's only sequence and a socket. What a `deliver` adds to it is one server-sent event (`before`,
    the text as a JSON string, log-probabilities where they are shown, `after`, the usage where it is shown); tokens
    without text go with the next. `send` sends those that wait in one write, or some 16 KB of them. A lane whose
    socket takes no more sends nothing from then on, until whoever opened it detaches it and goes on by itself; what
    has come meanwhile is merged into one event.

    Whoever attaches a socket that a transport writes to sees to it that the transport's buffer is empty then, and that
    nobody writes there while it is attached; else bytes overtake each other.

    gap_bounds: upper bounds (inclusive, ascending) of the buckets for times between tokens. ValueError for others.
    All methods belong to one thread.
    """

    def __new__(cls, gap_bounds: Sequence[float]) -> StreamRelay: ...
    def attach(
        self,
        request: int,
        fd: int,
        before: bytes,
        after: bytes,
        *,
        chunked: bool,
        last_token_at: float,
        logprobs: tuple[bytes, LogprobsEncoder] | None = None,
        usage: tuple[bytes, bytes, int, int] | None = None,
    ) -> None:
        """Open a lane.

        fd: the socket, which is duplicated: a number that comes to mean another connection misleads nothing, and the
        connection ends when both are closed. chunked: whether each event goes as a chunk of HTTP/1.1. last_token_at:
        when the sequence's last token came, on the clock of `deliver`'s now. logprobs: what goes before the JSON value
        of the log-probabilities, and their encoder, which nobody else uses until the lane is closed. usage: behind
        `after` go the number of all tokens so far, the first of these, the number of output tokens so far, and the
        second; then the tokens of the prompt, and those of the output before the lane. ValueError when the request has
        a lane. OSError when there is no descriptor to be had.
        """
    def deliver(self, deltas: Deltas, now: float) -> list[Delta]:
        """Take the deltas of lanes; return the others, each sequence's last, and those with more than a lane shows."""
    def send(self, max_s: float) -> tuple[list[int], bool]:
        """Send what waits, for about that long, at least one event; never waits for a socket.

        (requests whose sockets have just taken no more, whether something still waits). ValueError for a negative time.
        """
    def detach(self, request: int) -> tuple[bytes, int, float] | None:
        """Close a lane: (what was not sent, as it goes on the wire; tokens it took; when the last came).

        Log-probabilities of tokens that are in no event are then in the encoder.
        None when the request has none.
        """
    def take_gaps(self) -> tuple[list[int], float]:
        """(observations per bucket, their sum) of the times between tokens since the last call."""

class GrammarBusyError(CoreError):
    """A grammar was not looked at, as others take too much time; the same may be asked again."""

class GrammarError(CoreError):
    """A grammar that is refused, or that cannot go on.

    Refused ones have `path` (where in it: a JSON pointer into a schema, a line, or empty) and `problem`.
    """

    path: str
    problem: str

@final
class GrammarCompiler:
    """Compiles grammars for one vocabulary; made once (some 100 ms). compile() may run in several threads at once.

    eos_token_ids: what may follow where a grammar may end. Special tokens and these are never part of a text: only the
    fixed parts of a structural tag lead to special tokens. GrammarError for a vocabulary that cannot be used.
    """

    def __new__(cls, vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> GrammarCompiler: ...
    def compile(
        self,
        kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"],
        source: str | Sequence[str],
        *,
        compact: bool = False,
        whitespace_pattern: str | None = None,
        closed_objects: bool = False,
    ) -> Grammar:
        """Compile within 2 s, without the GIL, in a thread of its own. GrammarError (see docs/structured-output.md);
        GrammarBusyError while too many compilations have not noticed that their time is over.

        source: JSON text (json_schema, structural_tag), a pattern, texts (choice), a grammar in Lark or GBNF, or
        nothing (json_object). The rest is about JSON: no white space between tokens; a pattern for it; objects that say
        nothing of additional properties have none. ValueError for an unknown kind, or a source of another type.
        """

@final
class GrammarMatcher:
    """A grammar's state in one sequence, for tests and tools; engines hand the Grammar to the core."""

    def mask(self) -> bytes:
        """Which tokens may come next: bit i % 32 of the little-endian 32-bit word i // 32. GrammarError: none may."""
    def advance(self, token_id: int) -> None:
        """Go on with a token that the mask allows. GrammarError for others; the matcher is then done with."""
    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on with the tokens as far as they are allowed; returns how many were."""
    def may_end(self) -> bool:
        """Whether the text may end here."""
    def is_over(self) -> bool:
        """Whether nothing may follow."""
    def fork(self) -> GrammarMatcher:
        """The same state again."""
