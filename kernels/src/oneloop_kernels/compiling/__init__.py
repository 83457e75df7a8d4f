"""Compiling before anything runs: `ahead` in the process that launches, `workers` and `worker` in others beside it."""
