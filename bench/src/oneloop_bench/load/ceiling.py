"""What the client itself can take: its own ceiling, against a responder that does nothing but write.

The responder is a process that answers every request with the same events, one write per event and stream, a round over
all streams at a time. Paced, every event is a read of its own and the client has time to spare: events per second of
its CPU time is what one process can take of a server that sends token by token. Unpaced, nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oneloop_bench.load.closed_loop import closed_loop
from oneloop_bench.load.workload import Session, Turn
from oneloop_bench.report import print_result

if TYPE_CHECKING:
    from oneloop_bench.load.processes import Outcome

NUM_STREAMS: Final = 256
PACED_EVENTS, UNPACED_EVENTS = 200, 1000
"""Per stream."""
ROUND_S: Final = 0.02
"""256 streams every 20 ms: 12,800 events/s, a small part of what one client takes."""
_TEMPLATE: Final = (
    b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":0,"model":"responder",'
    b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}],"usage":null}'
)


def tell_ceiling(num_processes: int) -> int:
    """Measure, print, the result last. Returns the exit code. RuntimeError when a reply is not whole."""
    paced = measure_ceiling(num_processes, PACED_EVENTS, ROUND_S)
    unpaced = measure_ceiling(num_processes, UNPACED_EVENTS, 0.0)
    print(f"{num_processes} client process(es), {NUM_STREAMS} streams, CPU time per event:")
    print(f"  an event at a time  {paced.us_per_event:.1f} µs: {paced.per_cpu_s:,.0f} events/s per process")
    print(f"  as fast as it goes  {unpaced.us_per_event:.1f} µs: {unpaced.per_s:,.0f} events/s came in")
    print(f"The ceiling is {num_processes * paced.per_cpu_s:,.0f} events/s, with a core for each process.")
    print_result(
        {
            "ceiling_events_per_s": round(num_processes * paced.per_cpu_s),
            "client_processes": num_processes,
            "us_per_event": round(paced.us_per_event, 2),
            "us_per_event_unpaced": round(unpaced.us_per_event, 2),
            "events_per_s_unpaced": round(unpaced.per_s),
        }
    )
    return 0


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One measurement."""

    num_events: int
    cpu_s: float
    """Of all clients."""
    duration_s: float

    @property
    def us_per_event(self) -> float:
        """CPU time."""
        return self.cpu_s / self.num_events * 1e6

    @property
    def per_cpu_s(self) -> float:
        """Events per second of CPU time: what a process can take."""
        return self.num_events / self.cpu_s

    @property
    def per_s(self) -> float:
        """Events per second that were read."""
        return self.num_events / self.duration_s


def measure_ceiling(
    num_processes: int, num_events: int, round_s: float, *, num_streams: int = NUM_STREAMS
) -> Ceiling:
    """num_events per stream, a round over all streams each round_s. RuntimeError when a reply is not whole."""
    command = [sys.executable, "-m", __name__, str(num_streams), str(num_events), str(round_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as responder:
        try:
            assert responder.stdout is not None
            port = int(responder.stdout.readline())
            sessions = [Session([Turn([1], num_events)])] * num_streams
            outcome = closed_loop(port, "responder", sessions, num_streams, num_processes=num_processes)
        finally:
            responder.kill()
    return _ceiling(outcome)


def _ceiling(outcome: Outcome) -> Ceiling:
    first = min(record.times[0] for record in outcome.records)
    last = max(record.times[-1] for record in outcome.records)
    num_events = sum(len(record.times) for record in outcome.records)
    return Ceiling(num_events, sum(outcome.cpu_s), last - first)


def respond(num_streams: int, num_events: int, round_s: float) -> None:
    """Be the responder: prints its port, waits for all requests, answers them side by side, waits to be killed."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    print(listening.getsockname()[1], flush=True)
    streams = [listening.accept()[0] for _ in range(num_streams)]
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _read_request(stream)
        stream.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
    next_round = time.perf_counter()
    for number in range(num_events):
        data = _chunk(
            _TEMPLATE % (b" word%d" % (number % 10), b"null" if number < num_events - 1 else b'"length"')
        )
        if number == num_events - 1:
            usage = {"prompt_tokens": 1, "completion_tokens": num_events, "total_tokens": num_events + 1}
            data += _chunk(b'{"choices":[],"usage":%b}' % str(usage).replace("'", '"').encode())
            data += _chunk(b"[DONE]") + b"0\r\n\r\n"
        if (wait_s := next_round - time.perf_counter()) > 0:
            time.sleep(wait_s)
        next_round += round_s
        for stream in streams:
            stream.sendall(data)
    with selectors.DefaultSelector() as selector, contextlib.suppress(KeyboardInterrupt):
        selector.register(listening, selectors.EVENT_READ)
        selector.select()


def _read_request(stream: socket.socket) -> None:
    """To its end: its body is as long as it says."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += stream.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    missing = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]) - len(body)
    while missing > 0:
        missing -= len(stream.recv(1 << 16))


def _chunk(data: bytes) -> bytes:
    event = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(event), event)


def main(arguments: list[Any]) -> None:
    """Be the responder."""
    respond(int(arguments[0]), int(arguments[1]), float(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
