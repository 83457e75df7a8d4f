"""The HTTP endpoint. The only package that knows aiohttp; imports no torch."""
