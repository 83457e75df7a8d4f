"""The core beside vLLM's scheduler: the same requests, the same schedules, µs per step. `make bench-scheduler`."""
