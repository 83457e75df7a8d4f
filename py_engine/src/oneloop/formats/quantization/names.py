"""Which modules an entry of `ignore`, `modules_to_not_convert` and the like means. No torch."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oneloop.formats.json_values import JsonValues

PATTERN: Final = "re:"
"""What begins a regular expression."""
EXCLUDED: Final = "-:"
"""What begins a pattern of modules that are left alone, where others have settings of their own (GPTQModel)."""
_MAX_NAMES: Final = 1 << 16
_MAX_LENGTH: Final = 200
_MAX_PATTERNS: Final = 256
_MAX_REPEATS: Final = 4
"""Of anything, any number of times, in one pattern: matching takes some length ** so many steps."""
_REPEAT: Final = re.compile(r"[*+]|\{\d*,?\d*\}")
_REPEATED_GROUP: Final = re.compile(r"\)(?:[*+]|\{)")


def module_names(config: JsonValues, key: str) -> tuple[str, ...]:
    """A list of module names and patterns, perhaps of lists; nothing where it is absent.

    Patterns are matched by backtracking, so those that might take for ever are refused: a ModelError names them.
    """
    names = [] if config.raw(key) is None else config.raw(key)
    if isinstance(names, list) and all(isinstance(part, list) for part in names):
        names = [name for part in names for name in part]
    return _checked(config, key, names)


def excluded_modules(config: JsonValues, key: str) -> tuple[str, ...]:
    """Patterns of the modules that an object of patterns with settings of their own leaves alone: those after "-:".

    ModelError where it has other settings for some, or as module_names().
    """
    if not config.raw(key):
        return ()
    config.object(key)  # or it is refused
    patterns = list(config.raw(key))
    if any(not pattern.startswith(EXCLUDED) for pattern in patterns):
        config.fail(key, "settings of some modules alone are not supported; supported are those of all")
    return _checked(config, key, [PATTERN + pattern.removeprefix(EXCLUDED) for pattern in patterns])


def _checked(config: JsonValues, key: str, names: object) -> tuple[str, ...]:
    if (
        not isinstance(names, list)
        or len(names) > _MAX_NAMES
        or not all(isinstance(name, str) and 0 < len(name) <= _MAX_LENGTH for name in names)
    ):
        config.fail(key, "is no list of module names")
    patterns = [name.removeprefix(PATTERN) for name in names if name.startswith(PATTERN)]
    if len(patterns) > _MAX_PATTERNS:
        config.fail(key, f"has {len(patterns)} patterns, at most {_MAX_PATTERNS} are allowed; name modules")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            config.fail(key, f"{pattern!r} is no regular expression: {error}")
        if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > _MAX_REPEATS:
            message = (
                f"{pattern!r} may take too long to match; at most {_MAX_REPEATS} repeats, and none of groups"
            )
            config.fail(key, message)
    return tuple(names)


def is_named(module: str, entries: tuple[str, ...]) -> bool:
    """Whether an entry has the module's name, or a part of it between dots, or is a pattern its beginning matches."""
    names, patterns = _sorted_out(entries)
    if any(pattern.match(module) for pattern in patterns):
        return True
    parts = module.split(".")
    return any(
        ".".join(parts[first:end]) in names
        for first in range(len(parts))
        for end in range(first + 1, len(parts) + 1)
    )


@cache
def _sorted_out(entries: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Names and patterns. Kept: a model with experts has tens of thousands of modules."""
    patterns = tuple(
        re.compile(entry.removeprefix(PATTERN)) for entry in entries if entry.startswith(PATTERN)
    )
    return frozenset(entry.strip(".") for entry in entries if not entry.startswith(PATTERN)), patterns
