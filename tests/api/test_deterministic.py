"""`deterministic` in requests: taken by servers that are made for it, refused by others."""

from __future__ import annotations

from typing import Any

import pytest

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 4, "seed": 1, "deterministic": True}


async def test_others_say_how_to_start_one(serve: Any, null_engine_type: Any) -> None:
    async with serve(null_engine_type()) as server:
        status, reply = await server.post(COMPLETIONS, BODY)
        assert status == 400
        assert reply["error"]["param"] == "deterministic"
        assert "--deterministic-requests" in reply["error"]["message"]
        assert (await server.post(COMPLETIONS, {**BODY, "deterministic": False}))[0] == 200


@pytest.mark.parametrize("setting", ["deterministic", "deterministic_requests"])
async def test_those_made_for_it_answer(serve: Any, null_engine_type: Any, setting: str) -> None:
    async with serve(null_engine_type(**{setting: True})) as server:
        first, second = [await server.post(COMPLETIONS, BODY) for _ in range(2)]
        assert first[0] == 200
        assert first[1]["choices"] == second[1]["choices"]
