"""A thinking model's stream: the parser takes it apart up to the end of the thinking, and the relay writes the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oneloop.engine.stream import RequestStream

TEXT = 'I think "so"\n… 日本 🙂 </think>\n\nAnd this is what I say, with 👩‍🚀, naïve \\ and more of it. '


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
async def test_stream_equals_whole(
    serve: Any, null_engine_type: Any, monkeypatch: pytest.MonkeyPatch, logprobs: dict[str, Any]
) -> None:
    relayed = []
    relay_text = RequestStream.relay_text

    def spy(self: RequestStream, *args: Any, **options: Any) -> bool:
        relayed.append(relay_text(self, *args, **options))
        return relayed[-1]

    monkeypatch.setattr(RequestStream, "relay_text", spy)
    engine = null_engine_type(
        tokens=list(TEXT.encode()), max_model_len=8192, max_num_seqs=64, enable_prefix_caching=False
    )
    async with serve(engine, reasoning_parser="deepseek_r1") as server:
        for seed in range(12):
            body = {
                "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "seed": seed, "ignore_eos": True,
                **logprobs,
            }  # fmt: skip
            _, whole = await server.post("/v1/chat/completions", body)
            options = {"stream_options": {"include_usage": True}}
            events = await server.stream("/v1/chat/completions", {**body, **options})
            chunks = [json.loads(event) for event in events[:-1]]
            parts = [part for chunk in chunks for part in chunk["choices"]]
            choice = whole["choices"][0]
            for name in ("reasoning", "content"):
                assert "".join(part["delta"].get(name, "") for part in parts) == choice["message"][name]
            if logprobs:
                listed = [
                    entry for part in parts for entry in (part.get("logprobs") or {}).get("content", [])
                ]
                assert listed == choice["logprobs"]["content"]
            assert chunks[-1]["usage"] == whole["usage"]
            thinking = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < thinking < len(TEXT.encode())
    assert sum(relayed) >= 12
