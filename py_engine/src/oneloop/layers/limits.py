"""Limits that the memory plan must know too. No torch."""

from __future__ import annotations

from typing import Final

MLP_TOKENS_AT_ONCE: Final = 512
"""On a CPU more are computed in parts: a model's widest activations then stay small, and in the processor's cache."""
