"""Micro-benches of the kernel families: `python -m oneloop_bench.kernels.norm` and so on."""
