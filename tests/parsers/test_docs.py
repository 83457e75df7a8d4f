"""docs/tools-and-reasoning.md says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oneloop.parsers.formats import Format
from oneloop.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

PAGE = (Path(__file__).parents[2] / "docs/tools-and-reasoning.md").read_text()


@pytest.mark.parametrize(
    ("option", "formats"), [("tool-call-parser", TOOL_FORMATS), ("reasoning-parser", REASONING_FORMATS)]
)
def test_every_format_and_its_names(option: str, formats: tuple[Format, ...]) -> None:
    table = PAGE.split(f"| `--{option}` |", 1)[1].split("\n\n", 1)[0]
    documented = {}
    for row in table.splitlines()[2:]:
        name, aliases = row.split("|")[1:3]
        documented[name.strip().strip("`")] = set(re.findall(r"`([^`]+)`", aliases))
    assert documented == {each.name: set(each.aliases) for each in formats}
