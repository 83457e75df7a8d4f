"""Small quantisers, for checkpoints of 4 bits where none are at hand."""
