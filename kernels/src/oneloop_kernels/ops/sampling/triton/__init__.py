"""Sampling on a GPU in Triton: a scan of the logits, and a second kernel that finishes the rows that need more."""
