"""docs/http-api.md says what is true."""

from __future__ import annotations

import re
from pathlib import Path

from oneloop.api.app import ROUTES
from oneloop.api.errors import ErrorKind
from oneloop.api.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOOLS_BYTES
from oneloop.api.protocol import strict_json, unsupported

PAGE = (Path(__file__).parents[2] / "docs/http-api.md").read_text()


def test_routes() -> None:
    table = PAGE.split("|---|---|---|", 1)[1].split("\n\n", 1)[0]
    documented = set(re.findall(r"`(/[^`]+)`", table.replace("(`/ping` also POST)", "")))
    assert documented == {path.replace(":.+", "") for _, path, _ in ROUTES}


def test_unsupported_fields() -> None:
    section = PAGE.split("**Refused", 1)[1].split("**Without", 1)[0]
    missing = {
        name
        for name in {**unsupported.CHAT, **unsupported.COMPLETION}
        if f"`{name}`" not in section and not name.startswith(("guided_", "return_"))
    }
    assert not missing


def test_errors() -> None:
    section = PAGE.split("## Errors", 1)[1]
    for kind in ErrorKind:
        assert str(kind.status) in section
        assert kind is ErrorKind.UNAUTHORIZED or kind.type in section


def test_limits() -> None:
    assert f"{strict_json.MAX_JSON_COMMAS:,} commas" in PAGE
    assert f"{strict_json.MAX_JSON_BRACKETS:,} brackets" in PAGE
    assert f"{strict_json.MAX_JSON_COLONS:,} colons" in PAGE
    assert (
        f"{MAX_MESSAGES:,} messages, {MAX_CONTENT_PARTS:,} content parts and {MAX_TOOL_CALLS:,} tool calls"
        in PAGE
    )
    assert f"{MAX_TOOLS:,} tools of {MAX_TOOLS_BYTES >> 20} MiB in all" in PAGE
