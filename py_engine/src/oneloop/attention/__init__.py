"""The paged KV cache, what a step needs to attend to it, and the attention block of a decoder layer."""
