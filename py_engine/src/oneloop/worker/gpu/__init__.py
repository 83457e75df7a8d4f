"""The worker on a GPU: every step is read from the slab by kernels, so that one captured graph serves all steps."""
