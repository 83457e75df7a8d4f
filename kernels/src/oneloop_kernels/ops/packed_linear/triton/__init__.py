"""Kernels of packed linear maps: few_rows and unpack in Triton, for any card; stream for Hopper."""
