"""What a load test asks a server before the run."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from dataclasses import dataclass
from typing import Any, Final

FIRST_LOOK_S: Final = 30.0
"""How long one question may take."""
ASK_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What /v1/models says of one."""

    name: str
    vocab_size: int | None = None
    """Where the server tells: ours does."""


def served_model(
    url: str, headers: dict[str, str], name: str | None = None, *, insecure: bool = False
) -> ServedModel:
    """The model of this name, of which a server may tell nothing. None: the first; RuntimeError when none is told."""
    try:
        found = _get(f"{url.rstrip('/')}/v1/models", headers, insecure=insecure)
        return _read_models(json.loads(found), name)
    except (OSError, ValueError, LookupError, TypeError) as error:
        if name is not None:
            return ServedModel(name)
        raise RuntimeError(
            f"{url} does not tell its model ({error}); is it running? Else give --model"
        ) from None


def _read_models(found: Any, name: str | None) -> ServedModel:
    """ValueError, LookupError, TypeError for what is no list of models.

    A model that is not in it has the first one's vocabulary: it is an adapter of it, or there is none of this name, and
    then the server shall say that and not that its ids are too large.
    """
    cards = found["data"]
    card = next((card for card in cards if card["id"] == name), cards[0])
    size = card.get("vocab_size")
    return ServedModel(
        card["id"] if name is None else name, size if isinstance(size, int) and size > 0 else None
    )


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
