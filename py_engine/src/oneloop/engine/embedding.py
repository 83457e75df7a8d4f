"""Vectors of prompts as results: names as vLLM's users know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop.errors import GenerationError

if TYPE_CHECKING:
    import numpy.typing as npt

    from oneloop.engine.stream import RequestStream


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt with its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


def vector_of(pooled: bytes, *, normalize: bool, size: int | None = None) -> npt.NDArray[Any]:
    """[size] float32. pooled: as the core tells it. normalize: divide by its Euclidean length, unless 0.

    size: numbers of it that are taken, from its start; None: all.
    """
    vector = np.frombuffer(pooled, np.float32)[:size]
    length = float(np.linalg.norm(vector.astype(np.float64))) if normalize else 0.0
    return vector if length == 0.0 else (vector / length).astype(np.float32)


async def embedding_output(stream: RequestStream, *, normalize: bool) -> EmbeddingRequestOutput:
    """Wait for a request with pooling. GenerationError when it failed or was aborted."""
    for delta in await stream.all_deltas():
        if delta.finish_reason in ("error", "abort"):
            raise GenerationError(delta.error or "the request was aborted")
    assert stream.pooled is not None, "only for requests with pooling"
    vector = vector_of(stream.pooled, normalize=normalize)
    return EmbeddingRequestOutput(
        stream.request_id,
        stream.prompt_token_ids,
        EmbeddingOutput(vector.tolist()),
        num_cached_tokens=stream.num_cached_tokens,
    )
