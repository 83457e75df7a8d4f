"""What binds a request's tokens beside its SamplingParams: a grammar, and how long it may think."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneloop_core import Grammar

MAX_MARKER_TOKENS = 64
"""Most tokens of a marker (the core's bound)."""

UNLIMITED_THINKING = 2**31 - 1
"""A budget that is never used up: the end of the thinking is looked for all the same, so that it can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConstraints:
    """Made by who knows the output's format. The core checks it; RequestError names the field."""

    grammar: Grammar | None = None
    """What the tokens must be."""
    grammar_after: tuple[int, ...] = ()
    """The grammar holds once these were generated, as at the end of the thinking; empty: from the first token."""
    thinking_budget: int | None = None
    """After so many tokens without thinking_end, these are forced."""
    thinking_end: tuple[int, ...] = ()
    """What ends the thinking."""

    @property
    def binds(self) -> bool:
        """Whether any token may be refused."""
        return self.grammar is not None or self.thinking_budget is not None

    @property
    def knows_thinking(self) -> bool:
        """Whether they say what ends the thinking, so that it can be ended from outside."""
        return bool(self.thinking_end or self.grammar_after)


NO_CONSTRAINTS = TokenConstraints()
