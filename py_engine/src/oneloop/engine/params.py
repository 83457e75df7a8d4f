"""SamplingParams: what a request asks of the sampler and of the stop test. Names as vLLM's users know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from oneloop.engine.structured import read_spec
from oneloop.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from oneloop.engine.structured import GrammarSpec, StructuredOutputsParams
    from oneloop.formats.generation import GenerationDefaults

DEFAULT_MAX_TOKENS = 16
"""New tokens of a request whose maker said nothing of their number, as vLLM has it."""
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PROMPT_ENTRIES = 1 << 21
"""Log-probabilities of one prompt: its tokens times (1 + prompt_logprobs). They are held until they are sent."""
MAX_LOGPROB_ENTRIES = 1 << 22
"""Log-probabilities of one request's answers: n times tokens times those of each. A whole reply holds them all."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Length of one stop string in UTF-8; text is held back by up to this much."""
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
"""More than any vocabulary served has."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 256
"""Of one bad word in UTF-8."""
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_LENGTH_PENALTY = 10.0
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. None means: the model's generation_config, then the usual default.

    Answers are short unless max_tokens says otherwise. Raises RequestError naming the field, from `resolve()`.
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
    """Same seed, same tokens, whatever else is in the batch. Any signed 64-bit number."""
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """New tokens per sequence; more than the context leaves is refused. None: the generation_config's max_new_tokens,
    then what the context leaves."""
    min_tokens: int = 0
    """No stop of any kind before this many tokens."""
    stop: tuple[str, ...] | list[str] | str | None = ()
    """Strings that end the text; not part of it unless include_stop_str_in_output."""
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that leave their text although the others are skipped: marks that a parser must see."""
    detokenize: bool = True
    logprobs: int | None = None
    """Top log-probabilities per output token (0 … 20); None = none."""
    prompt_logprobs: int | None = None
    """The same per prompt token but the first. Then max_tokens may be 0: nothing is generated."""
    logprob_token_ids: tuple[int, ...] | list[int] | None = None
    """Tokens whose log-probabilities are told with every output token, instead of the top ones; at most 128."""
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    """Token id → value in [-100, 100] added to its logit."""
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    """The only tokens that may come; None: all. End tokens are not exempt."""
    bad_words: tuple[str, ...] | list[str] | None = ()
    """Words that are not generated, at the beginning of a word as within one: the last token of each is banned where
    the others stand before it. What comes as other tokens than the tokenizer makes of the word is not banned."""
    structured_outputs: StructuredOutputsParams | GrammarSpec | None = None
    """The form that the answer is to have."""
    deterministic: bool = False
    """The same tokens whatever runs beside, however the prompt is cut or cached. The engine must have been made for it
    (`deterministic_requests`, or `deterministic`, where all requests are)."""
    beam_search: BeamSearch | None = None
    """The n most likely texts instead of n samples; every field that is about sampling must be left open."""

    def resolve(self, defaults: SamplingDefaults, *, vocab_size: int, max_sequences: int) -> ResolvedParams:
        """Every open field filled in and every field checked.

        vocab_size: every token id must be below it. max_sequences: bound of n. Raises RequestError.
        """
        max_tokens = _first(self.max_tokens, defaults.max_tokens)
        if self.beam_search is not None:
            defaults = self._checked_for_beams()
        logprobs = None if self.logprobs is None else integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        picks = _logprob_token_ids(self.logprob_token_ids, vocab_size)
        resolved = ResolvedParams(
            n=integer("n", self.n, 1, max_sequences),
            temperature=number(
                "temperature", _first(self.temperature, defaults.temperature), 0, MAX_TEMPERATURE
            ),
            top_p=_above_zero("top_p", _first(self.top_p, defaults.top_p), 1),
            top_k=max(integer("top_k", _first(self.top_k, defaults.top_k), -1, MAX_INT32), 0),
            min_p=number("min_p", _first(self.min_p, defaults.min_p), 0, 1),
            repetition_penalty=_above_zero(
                "repetition_penalty",
                _first(self.repetition_penalty, defaults.repetition_penalty),
                MAX_REPETITION_PENALTY,
            ),
            presence_penalty=number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            frequency_penalty=number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            seed=None if self.seed is None else integer("seed", self.seed, -(2**63), 2**63 - 1),
            max_tokens=None
            if max_tokens is None
            else integer("max_tokens", max_tokens, 1 if self.prompt_logprobs is None else 0, MAX_INT32),
            max_tokens_is_default=self.max_tokens is None,
            min_tokens=integer("min_tokens", self.min_tokens, 0, MAX_INT32),
            stop=_stop_strings(self.stop),
            stop_token_ids=_token_ids("stop_token_ids", self.stop_token_ids, vocab_size),
            ignore_eos=flag("ignore_eos", self.ignore_eos),
            include_stop_str_in_output=flag("include_stop_str_in_output", self.include_stop_str_in_output),
            skip_special_tokens=flag("skip_special_tokens", self.skip_special_tokens),
            shown_special_ids=_token_ids("shown_special_ids", self.shown_special_ids, vocab_size),
            detokenize=flag("detokenize", self.detokenize),
            logprobs=0 if picks else logprobs,
            logprob_token_ids=picks,
            prompt_logprobs=_prompt_logprobs(self.prompt_logprobs),
            logit_bias=_bias(self.logit_bias, vocab_size),
            grammar=read_spec(self.structured_outputs),
            allowed_token_ids=_allowed_token_ids(self.allowed_token_ids, vocab_size),
            bad_words=_bad_words(self.bad_words),
            deterministic=flag("deterministic", self.deterministic),
            beam_search=None if self.beam_search is None else self.beam_search.checked(),
        )
        if resolved.max_tokens == 0 and resolved.n > 1:
            raise RequestError("n", f"n must be 1 where max_tokens is 0, got {resolved.n}")
        if resolved.max_tokens is not None and resolved.min_tokens > resolved.max_tokens:
            raise RequestError(
                "min_tokens", f"min_tokens ({self.min_tokens}) is above max_tokens ({resolved.max_tokens})"
            )
        if resolved.stop and not resolved.detokenize:
            raise RequestError("stop", "stop strings need detokenize=True")
        return resolved

    def _checked_for_beams(self) -> SamplingDefaults:
        """The defaults of beams, which sample nothing. RequestError naming a field that asks for something else."""
        neutral: Mapping[str, tuple[Any, ...]] = {
            "temperature": (None, 0, 1), "top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0),
            "repetition_penalty": (None, 1), "presence_penalty": (0,), "frequency_penalty": (0,), "min_tokens": (0,),
            "logprobs": (None,),
        }  # fmt: skip
        asked = [name for name, values in neutral.items() if getattr(self, name) not in values]
        asked += [
            name for name in ("stop", "logit_bias", "bad_words", "logprob_token_ids") if getattr(self, name)
        ]
        if asked:
            raise RequestError(asked[0], f"{asked[0]} has no meaning in beam search; leave it out")
        form = read_spec(self.structured_outputs)
        binding = [] if form is None else [form.field]
        binding += [] if self.allowed_token_ids is None else ["allowed_token_ids"]
        if binding:
            raise RequestError(
                binding[0], f"{binding[0]} cannot bind the texts of beam search; leave one of the two out"
            )
        return SamplingDefaults(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """How texts that beam search finds are compared, and when it ends."""

    length_penalty: float = 1.0
    """Log-probabilities are divided by the length to this power, -10 … 10: above 0 longer texts are preferred."""
    early_stopping: bool | Literal["never"] = False
    """Once n texts are finished: True: end; False: end when the best open one, as it is, is no better; "never":
    end only when none can become better."""

    def checked(self) -> tuple[float, Literal["heuristic", "always", "never"]]:
        """As the core takes it. RequestError naming the field."""
        penalty = number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.early_stopping == "never":
            return penalty, "never"
        return penalty, "always" if flag("early_stopping", self.early_stopping) else "heuristic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams:
    """SamplingParams with nothing left open, every value within its range. Fields as there."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    """0 = off."""
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_tokens: int | None
    """None: what the context leaves."""
    max_tokens_is_default: bool
    """Nobody chose max_tokens: where the context leaves less, it is cut instead of refused."""
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    shown_special_ids: tuple[int, ...]
    detokenize: bool
    logprobs: int | None
    logprob_token_ids: tuple[int, ...]
    """Without any the top ones are told; else logprobs is 0."""
    prompt_logprobs: int | None
    logit_bias: tuple[tuple[int, float], ...]
    grammar: GrammarSpec | None
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    deterministic: bool = False
    beam_search: tuple[float, Literal["heuristic", "always", "never"]] | None = None
    """As the core takes it."""
    pooling: Literal["last", "mean"] | None = None
    """The prompt's hidden states as one vector, instead of tokens (engine/pooling.py)."""

    @property
    def bound_by(self) -> str | None:
        """The field that binds the tokens most, if any: named where nothing can come next."""
        if self.grammar is not None:
            return self.grammar.field
        named = ("allowed_token_ids", "bad_words", "min_tokens")
        return next((name for name in named if getattr(self, name)), None)

    def resolve(self, _: SamplingDefaults, *, vocab_size: int, max_sequences: int) -> ResolvedParams:
        """As SamplingParams.resolve(): there is nothing left to do, for the same model.

        vocab_size: unused; the core checks every id. max_sequences: bound of n, checked here.
        """
        integer("n", self.n, 1, max_sequences)
        return self

    @property
    def num_alternatives(self) -> int:
        """Log-probabilities that are told of an output token beside its own."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    def behind(self, num_prompt_tokens: int, max_model_len: int) -> ResolvedParams:
        """The same behind a prompt of so many tokens. RequestError for what a context of max_model_len cannot hold:
        the prompt and one token (the prompt alone for max_tokens 0), the tokens that were asked for, or min_tokens; and
        for more log-probabilities of the prompt than are held.
        """
        room = max_model_len - num_prompt_tokens
        if room < (self.max_tokens != 0):
            raise RequestError(
                "prompt",
                f"this model's maximum context length is {max_model_len} tokens, and the prompt has "
                f"{num_prompt_tokens}" + (", which leaves no room for an answer" if room == 0 else ""),
            )
        if (
            self.prompt_logprobs is not None
            and num_prompt_tokens * (1 + self.prompt_logprobs) > MAX_PROMPT_ENTRIES
        ):
            raise RequestError(
                "prompt_logprobs",
                f"prompt_logprobs ({self.prompt_logprobs}) of {num_prompt_tokens} tokens are more than the "
                f"{MAX_PROMPT_ENTRIES} log-probabilities that one prompt may have; ask for fewer",
            )
        if self.min_tokens > room:
            raise RequestError(
                "min_tokens", f"min_tokens ({self.min_tokens}) is above what the context leaves ({room})"
            )
        if self.max_tokens is not None and self.max_tokens > room and not self.max_tokens_is_default:
            raise RequestError(
                "max_tokens",
                f"this model's maximum context length is {max_model_len} tokens; the prompt has {num_prompt_tokens} "
                f"and max_tokens asks for {self.max_tokens} more; shorten either",
            )
        return self._cut(room)

    def _cut(self, room: int) -> ResolvedParams:
        """The same with a max_tokens that nobody chose cut to the room, and to the log-probabilities that are held."""
        most = room
        if self.logprobs is not None:
            most = min(room, MAX_LOGPROB_ENTRIES // (self.n * (1 + self.num_alternatives)))
        chosen = 0 if self.max_tokens is None or self.max_tokens_is_default else self.max_tokens
        if max(chosen, self.min_tokens) > most:
            raise RequestError(
                "logprobs",
                f"logprobs: one request may have {MAX_LOGPROB_ENTRIES} log-probabilities, which of {self.n} answers "
                f"with {1 + self.num_alternatives} for each token are {most} tokens; ask for fewer of one of these",
            )
        if self.max_tokens is None:
            return self if most == room else replace(self, max_tokens=most)
        return self if self.max_tokens <= most else replace(self, max_tokens=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request's open fields become: the model's generation_config over the usual defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def over(cls, given: GenerationDefaults) -> SamplingDefaults:
        """The usual defaults, with what a model's generation_config.json gives laid over them.

        ConfigError names a value that no request may have either.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        defaults = cls(**values, max_tokens=given.max_new_tokens)
        try:
            SamplingParams(max_tokens=None).resolve(defaults, vocab_size=1, max_sequences=1)
        except RequestError as error:
            raise ConfigError(
                "generation_config", f"{error.message}; --generation-config none ignores the model's"
            ) from None
        return defaults

    def without_params(self) -> SamplingDefaults:
        """What holds for requests that come without any SamplingParams: never as much as the context holds."""
        return self if self.max_tokens is not None else replace(self, max_tokens=DEFAULT_MAX_TOKENS)


def check_token_ids(name: str, token_ids: Collection[Any], vocab_size: int) -> None:
    """RequestError naming the first entry that is no token id."""
    # Nearly all are right, which is found out at C's speed.
    if not token_ids or (
        set(map(type, token_ids)) == {int} and 0 <= min(token_ids) <= max(token_ids) < vocab_size
    ):
        return
    for token_id in token_ids:
        if type(token_id) is not int:
            raise RequestError(name, f"{name} must hold integers, got {shown(token_id)}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                name, f"{name}: token id {shown(token_id)} is out of range (vocabulary: 0 … {vocab_size - 1})"
            )


def encode_utf8(name: str, text: str) -> bytes:
    """UTF-8 bytes. RequestError for lone surrogates, which JSON can smuggle in."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError(name, f"{name} holds a lone surrogate, which is no character") from None


def shown(value: object) -> str:
    """A value as error messages show it: short, and cheap to make, whatever was sent."""
    if isinstance(value, int) and abs(value) > 2**64:
        return "a number of more than 64 bits"
    if isinstance(value, int | float | None):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:40]) + ("…" if len(value) > 40 else "")
    return f"a {type(value).__name__}"


def integer(name: str, value: Any, low: int, high: int) -> int:
    """The value, if it is an integer in low … high; else RequestError."""
    if type(value) is not int:
        raise RequestError(name, f"{name} must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise RequestError(name, f"{name} must be in {low} … {high}, got {shown(value)}")
    return value


def number(name: str, value: Any, low: float, high: float) -> float:
    """The value as a float, if it is a finite number in low … high; else RequestError."""
    if type(value) not in (int, float):
        raise RequestError(name, f"{name} must be a number, got {shown(value)}")
    if not low <= value <= high:  # NaN fails this too
        raise RequestError(name, f"{name} must be in {low:g} … {high:g}, got {shown(value)}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """The value, if it is a boolean; else RequestError."""
    if type(value) is not bool:
        raise RequestError(name, f"{name} must be true or false, got {shown(value)}")
    return value


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _above_zero(name: str, value: Any, high: float) -> float:
    checked = number(name, value, 0, high)
    if checked == 0:
        raise RequestError(name, f"{name} must be above 0 and at most {high:g}, got 0")
    return checked


def _prompt_logprobs(value: Any) -> int | None:
    if value == -1:
        raise RequestError(
            "prompt_logprobs",
            f"prompt_logprobs -1 (the whole vocabulary) is more than is served: at most {MAX_LOGPROBS}",
        )
    return None if value is None else integer("prompt_logprobs", value, 0, MAX_LOGPROBS)


def _collection(name: str, value: Any, kinds: Any, what: str, limit: int) -> Any:
    """The value (None: an empty one), if it is of such a kind (as isinstance takes it) and not too long."""
    if value is None:
        return ()
    if not isinstance(value, kinds):
        raise RequestError(name, f"{name} must be {what}, got {shown(value)}")
    if len(value) > limit:
        raise RequestError(name, f"{name} takes at most {limit} entries, got {len(value)}")
    return value


def _stop_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    strings = tuple(_collection("stop", value, list | tuple, "a string or a list of them", MAX_STOP_STRINGS))
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError("stop", f"stop must hold non-empty strings, got {shown(text)}")
        if len(text) > MAX_STOP_BYTES or len(encode_utf8("stop", text)) > MAX_STOP_BYTES:
            raise RequestError("stop", f"a stop string may have at most {MAX_STOP_BYTES} bytes")
    return strings


def _token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(_collection(name, value, list | tuple, "a list of token ids", MAX_STOP_TOKEN_IDS))
    check_token_ids(name, ids, vocab_size)
    return ids


def _logprob_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    name = "logprob_token_ids"
    ids = tuple(_collection(name, value, list | tuple, "a list of token ids", MAX_LOGPROB_TOKEN_IDS))
    check_token_ids(name, ids, vocab_size)
    return tuple(dict.fromkeys(ids))


def _allowed_token_ids(value: Any, vocab_size: int) -> tuple[int, ...] | None:
    name = "allowed_token_ids"
    if value is None:
        return None
    ids = tuple(_collection(name, value, list | tuple, "a list of token ids", MAX_ALLOWED_TOKEN_IDS))
    check_token_ids(name, ids, vocab_size)
    if not ids:
        raise RequestError(name, f"{name} must not be empty: at least one token must be allowed")
    return tuple(dict.fromkeys(ids))


def _bad_words(value: Any) -> tuple[str, ...]:
    words = tuple(_collection("bad_words", value, list | tuple, "a list of strings", MAX_BAD_WORDS))
    for word in words:
        if not isinstance(word, str) or not word:
            raise RequestError("bad_words", f"bad_words must hold non-empty strings, got {shown(word)}")
        if len(word) > MAX_BAD_WORD_BYTES or len(encode_utf8("bad_words", word)) > MAX_BAD_WORD_BYTES:
            raise RequestError("bad_words", f"a bad word may have at most {MAX_BAD_WORD_BYTES} bytes")
    return words


def _bias(value: Mapping[int, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    entries = dict(_collection("logit_bias", value, Mapping, "token ids with values", MAX_LOGIT_BIAS))
    check_token_ids("logit_bias", entries, vocab_size)
    return tuple(
        (token_id, number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)) for token_id, bias in entries.items()
    )
