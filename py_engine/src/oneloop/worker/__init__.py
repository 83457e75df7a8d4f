"""The device side of a step: reads a slab, keeps per-slot state, runs the model and the sampler. Knows no request."""
