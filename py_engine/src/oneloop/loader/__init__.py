"""Checkpoint → model: finds the files of a model argument, reads its shape, fills its weights."""
