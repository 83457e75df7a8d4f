"""The errors a person can act on. Each says what is wrong with what they gave us, and the remedy."""

from __future__ import annotations


class OneloopError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(OneloopError):
    """A setting that cannot work. `field` is its name in `oneloop.config`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelError(OneloopError):
    """A model that cannot be served: names the file and the tensor or key."""

    def __init__(self, file: str, message: str, *, item: str | None = None) -> None:
        where = f"{file}: {item}" if item else file
        super().__init__(f"{where}: {message}")
        self.file = file
        self.item = item


class TraceFileError(OneloopError):
    """A schedule trace that cannot be replayed: names the file and why."""


class RequestError(OneloopError, ValueError):
    """A request that is refused (HTTP 400). `field` is the request field's name."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class OverloadedError(OneloopError):
    """Too much is waiting (HTTP 503 with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(OverloadedError):
    """The engine takes no more (HTTP 503 with Retry-After, and the end of the connection)."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", retry_after_s=10)


class EngineDeadError(OneloopError):
    """The engine has stopped; nothing more is accepted (HTTP 503)."""


class EngineClosedError(EngineDeadError):
    """It has stopped because it was asked to (over HTTP as ShuttingDownError)."""


class GenerationError(OneloopError):
    """A request that was accepted and then failed: its step failed, or the engine died (HTTP 500)."""
