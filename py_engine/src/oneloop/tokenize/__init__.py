"""Tokenizers from Hugging Face folders and GGUF metadata, chat templates, bytes of every token. No torch."""
