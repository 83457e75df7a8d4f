"""The commands that the pages print work as printed, on the model that a newcomer has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
HOST = "http://127.0.0.1:8000"
BLOCKS = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CURL = re.compile(r"^curl (?:-N )?(\S+) -H 'Content-Type: application/json' -d '([^']*)'$", re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return BLOCKS.findall(page.read_text())


def commands() -> list[Any]:
    found = []
    for page in PAGES:
        for block in blocks(page):
            calls = CURL.findall(block)
            assert len(calls) == block.count("curl "), f"{page.name}: a command of another form: {block}"
            found += [pytest.param(url, body, id=f"{page.name} {url[len(HOST) :]}") for url, body in calls]
    return found


def test_there_are_commands() -> None:
    pages = {param.id.split()[0] for param in commands()}
    assert pages >= {"README.md", "apis.md", "render.md", "structured-output.md", "tools-and-reasoning.md"}


@pytest.mark.parametrize(("url", "body"), commands())
def test_a_command(live: Any, url: str, body: str) -> None:
    assert url.startswith(HOST)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {live.key}"}
    request = urllib.request.Request(live.url + url[len(HOST) :], body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers.get("X-Oneloop-Ignored") is None
        text = reply.read().decode()
    if '"response_format"' in body:
        content = json.loads(text)["choices"][0]["message"]["content"]
        assert json.loads(content) == {"capital": "Paris", "country": "France"}
    if '"tool_choice"' in body:
        [call, *_] = json.loads(text)["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert set(json.loads(call["function"]["arguments"])) == {"city"}
    if "capital of France" in body and "/render" not in url:
        assert "Paris" in text


def test_the_socket(live: Any) -> None:
    [script] = [block for block in blocks(ROOT / "docs/websocket.md") if "import asyncio" in block]
    place = f'"{HOST}/v1/stream"'
    assert place in script
    there = f'"{live.url}/v1/stream", headers={{"Authorization": "Bearer {live.key}"}}'
    script = script.replace(place, there)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
