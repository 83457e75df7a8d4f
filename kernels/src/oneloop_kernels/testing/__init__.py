"""Comparing implementations: one table of tolerances, used by every test."""

from oneloop_kernels.testing.tolerances import TOLERANCES, Tolerance, assert_close

__all__ = ["TOLERANCES", "Tolerance", "assert_close"]
