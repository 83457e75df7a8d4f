"""File formats without torch: bounded readers of GGUF and safetensors headers, config.json → ModelSpec."""
