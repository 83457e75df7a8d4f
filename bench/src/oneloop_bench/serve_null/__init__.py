"""The host path over HTTP with steps that take no time, or a fixed one: `python -m oneloop_bench.serve_null`."""
