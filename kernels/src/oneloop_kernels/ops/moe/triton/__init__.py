"""Kernels of experts on a GPU."""
