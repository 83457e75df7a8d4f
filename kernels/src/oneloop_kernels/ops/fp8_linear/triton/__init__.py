"""Kernels of 8-bit maps beside those of `ops.linear.triton`: the input's quantisation, and tiles for any card."""
