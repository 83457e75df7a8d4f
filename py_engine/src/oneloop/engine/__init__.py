"""The serving side: one asyncio loop over the core and an executor. Imports no torch."""
