"""Kernels of oneloop: one folder per operation family under `ops/`, picked by device through `registry`.

May import torch; Triton is imported here only, and only by the implementations that need it.
"""
