"""Decoder-only language models: one short file per family, found by architecture name in `registry`."""
