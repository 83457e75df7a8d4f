"""Kernels of linear maps: few_rows in Triton, for any card; stream for Hopper's copy engine and tensor cores."""
