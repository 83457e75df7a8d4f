"""Anthropic's Messages API over the same engine: /v1/messages and /v1/messages/count_tokens."""
