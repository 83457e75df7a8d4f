"""What a load test asks a server before the run."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from typing import Final

FIRST_LOOK_S: Final = 30.0
"""How long one question may take."""
ASK_EVERY_S: Final = 0.1


def first_model(url: str, headers: dict[str, str], *, insecure: bool = False) -> str:
    """The first model of /v1/models. RuntimeError when the server does not tell."""
    try:
        found = _get(f"{url.rstrip('/')}/v1/models", headers, insecure=insecure)
        name: str = json.loads(found)["data"][0]["id"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RuntimeError(
            f"{url} does not tell its model ({error}); is it running? Else give --model"
        ) from None
    return name


def wait_ready(url: str, headers: dict[str, str], limit_s: float, *, insecure: bool = False) -> None:
    """Until /v1/models answers. RuntimeError when it does not within limit_s."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            _get(f"{url.rstrip('/')}/v1/models", headers, insecure=insecure)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} was not ready within {limit_s:g} s: {error}") from None
        time.sleep(ASK_EVERY_S)


def _get(url: str, headers: dict[str, str], *, insecure: bool) -> bytes:
    context = ssl._create_unverified_context() if insecure else None
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=FIRST_LOOK_S, context=context
    ) as reply:
        data: bytes = reply.read()
        return data
