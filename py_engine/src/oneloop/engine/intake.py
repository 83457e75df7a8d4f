"""The front door: text becomes ids in a thread, and everything is checked before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from oneloop.engine.constraints import NO_CONSTRAINTS
from oneloop.engine.params import MAX_INT32, SamplingParams, check_token_ids, encode_utf8, integer
from oneloop.errors import RequestError

if TYPE_CHECKING:
    from oneloop.engine.constraints import TokenConstraints
    from oneloop.engine.grammars import Grammars
    from oneloop.engine.params import ResolvedParams, SamplingDefaults
    from oneloop.engine.texts import Texts
    from oneloop.executor.base import ModelInfo

MAX_SALT_CHARS = 128


Prompt: TypeAlias = "str | Mapping[str, object] | Sequence[int]"
"""Text, token ids, or a dictionary with one of them: {"prompt": …}, {"prompt_token_ids": …}."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that can be queued."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: ResolvedParams
    """They fit the context behind the prompt."""
    cache_salt: bytes
    priority: int
    bad_words: list[list[int]]
    """Token ids of what must not come."""
    constraints: TokenConstraints
    fixed_order: bool = False
    """The steps that compute it are to take their sums in the fixed order: where not all steps do."""


class Intake:
    """Turns what callers give into `Accepted`, or raises RequestError naming the field."""

    def __init__(
        self,
        texts: Texts,
        info: ModelInfo,
        defaults: SamplingDefaults,
        grammars: Grammars,
        *,
        max_sequences: int,
        takes_priority: bool,
        orders: tuple[bool, ...] = (False,),
    ) -> None:
        """max_sequences: bound of n. takes_priority: whether a priority other than 0 means something. orders: of sums,
        that steps may have; True: the fixed one.
        """
        self._orders = orders
        self.grammars = grammars
        self._info = info
        self._defaults = defaults
        self._max_sequences = max_sequences
        self._takes_priority = takes_priority
        self._texts = texts

    async def accept(
        self,
        prompt: Prompt,
        params: SamplingParams | ResolvedParams | None,
        *,
        priority: int,
        cache_salt: str,
        add_special_tokens: bool,
        constraints: TokenConstraints = NO_CONSTRAINTS,
    ) -> Accepted:
        """Check everything; tokenise text; compile the grammar that params ask for. params: None means the model's
        defaults. Raises RequestError, and OverloadedError where too many grammars are being compiled.
        """
        resolved = self._resolve(params)
        if resolved.deterministic and True not in self._orders:
            raise RequestError(
                "deterministic",
                "deterministic needs a server started with --deterministic-requests, or with --deterministic for all",
            )
        if resolved.beam_search is not None and (constraints.binds or resolved.grammar is not None):
            raise RequestError(
                "use_beam_search",
                "use_beam_search goes not with what binds the answer's tokens, as a tool call that must come or a "
                "bounded thinking does; leave it out",
            )
        salt = self._checked_salt(cache_salt)
        self._check_priority(priority)
        text, token_ids = _parts(prompt)
        if token_ids is None:
            assert text is not None
            # The begin token alone is no question: what a model says behind it is nobody's answer.
            token_ids = await self._texts.encode(text, add_special_tokens=add_special_tokens) if text else ()
        if not token_ids:
            raise RequestError("prompt", "the prompt is empty")
        # Length first, so that a huge list costs nothing.
        resolved = resolved.behind(len(token_ids), self._info.max_model_len)
        check_token_ids("prompt", token_ids, self._info.vocab_size)
        bad_words = await self._encode_bad_words(resolved.bad_words) if resolved.bad_words else []
        if resolved.grammar is not None:
            constraints = replace(constraints, grammar=await self.grammars.get(resolved.grammar))
        fixed_order = resolved.deterministic and False in self._orders
        return Accepted(
            text, list(token_ids), resolved, salt, priority, bad_words, constraints, fixed_order=fixed_order
        )

    async def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word as it stands behind other text and, where that makes other tokens, behind a space."""

        def encode() -> list[list[int]]:
            texts = [text for word in words for text in (word, " " + word.lstrip())]
            encoded = self._texts.tokenizer.encode_batch(texts, add_special_tokens=False)
            # Ids that the model has no row for cannot come.
            possible = [ids for ids in encoded if ids and max(ids) < self._info.vocab_size]
            return [list(ids) for ids in dict.fromkeys(map(tuple, possible))]

        return await self._texts.in_thread(encode)

    def _resolve(self, params: SamplingParams | ResolvedParams | None) -> ResolvedParams:
        defaults = self._defaults
        if params is None:
            params, defaults = SamplingParams(max_tokens=None), defaults.without_params()
        return params.resolve(defaults, vocab_size=self._info.vocab_size, max_sequences=self._max_sequences)

    def _check_priority(self, priority: int) -> None:
        if integer("priority", priority, -MAX_INT32, MAX_INT32) != 0 and not self._takes_priority:
            raise RequestError(
                "priority", "priority needs a server started with --scheduling-policy priority"
            )

    @staticmethod
    def _checked_salt(cache_salt: str) -> bytes:
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARS:
            raise RequestError(
                "cache_salt", f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters"
            )
        return encode_utf8("cache_salt", cache_salt)


def _parts(prompt: Any) -> tuple[str | None, Sequence[int] | None]:
    """(text, ids) of a prompt; one of them may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if ids is not None and _is_list(ids) and (text is None or isinstance(text, str)):
            return text, ids
        if ids is None and isinstance(text, str):
            return text, None
    elif _is_list(prompt):
        return None, prompt
    raise RequestError(
        "prompt", 'a prompt is a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}'
    )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
