"""What the machine gives at best: the same events from a process that only writes them, one call each.

`python -m oneloop_bench.serve_null.ceiling STREAMS TOKENS` listens, prints its port, waits for so many requests and
then writes an event to each in turn until each has its tokens.
"""

from __future__ import annotations

import json
import socket
import sys


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def main() -> None:
    """Serve once."""
    num_streams, num_tokens = map(int, sys.argv[1:])
    choice = {"index": 0, "text": "x", "finish_reason": None}
    event = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1_800_000_000, "model": "null"}
    text = (
        b"data: " + json.dumps({**event, "choices": [choice], "usage": None}, separators=(",", ":")).encode()
    )
    usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % num_tokens
    message, end = _chunk(text + b"\n\n"), _chunk(usage) + b"0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listening:
        print(listening.getsockname()[1], flush=True)
        streams = [listening.accept()[0] for _ in range(num_streams)]
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.recv(1 << 16)
    writes = [stream.sendall for stream in streams]
    for _ in range(num_tokens):
        for write in writes:
            write(message)
    for write in writes:
        write(end)
    for stream in streams:
        stream.recv(1)  # until the client has read it all


if __name__ == "__main__":
    main()
