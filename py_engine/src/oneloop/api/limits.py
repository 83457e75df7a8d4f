"""What one request may ask for. Every list and number is held against these before anything is built from it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
"""Over all messages."""
MAX_TOOL_CALLS = 4096
"""Over all messages."""
MAX_TOOLS = 1024
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_DOCUMENTS = 1024
MAX_DOCUMENT_BYTES = 4 << 20
"""Of all documents, as JSON."""
MAX_TEMPLATE_CHARS = 1 << 16
"""Of a template that a request brings."""
MAX_TOOLS_BYTES = 1 << 20
"""Of all tools, as JSON."""
MAX_TOOL_NAME_LEN = 128
MAX_TEMPLATE_ARGUMENTS = 32
MAX_TEMPLATE_ARGUMENT_BYTES = 16 << 10
MAX_NAME_LEN = 256
"""Characters of a model name, a function name, a tool call id."""

MAX_TOLD_BYTES = 256 << 20
"""About what a reply repeats of its prompts, in all choices together: it is held until it is sent. As many bytes
as the log-probabilities of its answers may take (engine.params.MAX_LOGPROB_ENTRIES)."""

MAX_HEAD_BYTES = 64 << 10
"""A request's line and headers, or what frames its body between two of its bytes, give or take what is read at once.
(Each header has a bound of its own.)"""
MAX_WAITING_REQUESTS = 4
"""Behind one another on a connection, beyond which no more of it is read; those of one reading may be more."""

MAX_SOCKET_GENERATIONS = 64
"""Of one WebSocket, at a time."""
MAX_SOCKET_MESSAGE_BYTES = 1 << 20
"""Of what a client sends over a WebSocket."""
SOCKET_PING_S = 30.0
"""A WebSocket is probed so often; one that does not answer within half of that is closed."""

BODY_TIMEOUT_S = 60.0
"""A request body must have arrived within this time."""
HEADER_TIMEOUT_S = 30.0
"""Headers must be complete, and idle connections are closed, within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that depend on the model and the settings."""

    vocab_size: int
    """Rows of the output head: every token id is below it."""
    max_model_len: int
    """Context length in tokens."""
    max_sequences: int
    """Prompts × n of one request."""
    max_n: int
    """n of one request."""
    max_prompt_chars: int
    """Characters of a prompt; a longer one cannot fit the context, whatever its tokens are."""
    max_body_bytes: int
    """Size of a body, after decompression."""
    priority: bool
    """Whether the priority policy is on."""
    request_templates: bool = False
    """Whether a request may bring a chat template."""
    force_usage: bool = False
    """Whether every stream ends with its usage, asked for or not."""

    @property
    def max_detokenize_ids(self) -> int:
        """Ids that one /detokenize may carry."""
        return max(self.max_model_len, 1 << 16)
