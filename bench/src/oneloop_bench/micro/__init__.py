"""Benches of single parts, without a model run."""
