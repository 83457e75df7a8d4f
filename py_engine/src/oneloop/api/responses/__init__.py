"""OpenAI's Responses API over the same engine: /v1/responses and what is kept of it."""
