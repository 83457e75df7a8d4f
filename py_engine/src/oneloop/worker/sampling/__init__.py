"""Sampling of a step: which rows need what, in which order. The arithmetic is in oneloop_kernels.ops.sampling."""
