"""What queueing a report costs the training thread: median, p99 and p99.9 of ``Channel.send``, with a real relay socket behind it.

Sends come in bursts with pauses, as rounds do, so that the channel's thread sends while the next burst is queued.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

import zmq

from sentinel.wire.messages import ClosedBy, RoundClosed
from sentinel_agent.channel import Channel
from sentinel_agent.errors import Health

LIMIT_MICROSECONDS = 5.0
BURST = 50


def measure(count: int) -> list[float]:
    """Microseconds of each of ``count`` sends."""
    with tempfile.TemporaryDirectory(prefix="sentinel-bench-") as folder:
        context = zmq.Context()
        relay = context.socket(zmq.ROUTER)
        relay.setsockopt(zmq.LINGER, 0)
        relay.bind(f"ipc://{folder}/relay")
        health = Health(0, print)
        channel = Channel(f"ipc://{folder}/relay", identity=(0, 0, 0), key=b"", health=health, on_command=print)
        channel.start()
        taken: list[float] = []
        for number in range(count // BURST):
            for _ in range(BURST):
                report = RoundClosed(0, 0, number, number, ClosedBy.OPTIMIZER, time.time(), 0, 2, loss=1.0)
                began = time.perf_counter_ns()
                channel.send(report)
                taken.append((time.perf_counter_ns() - began) / 1e3)
            while relay.poll(0):
                relay.recv_multipart()
            time.sleep(0.002)
        channel.close()
        relay.close()
        context.term()
    print(f"drops {dict(health.drops)}, faults {dict(health.faults)}", file=sys.stderr)
    return taken


def main() -> int:
    """Print the figures; exit code 1 if p99.9 is over the limit."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=100_000, help="sends measured")
    taken = sorted(measure(arguments.parse_args().count))
    p999 = taken[int(len(taken) * 0.999)]
    print(f"sends   {len(taken)}")
    print(f"p50     {statistics.median(taken):.2f} µs")
    print(f"p99     {taken[int(len(taken) * 0.99)]:.2f} µs")
    print(f"p99.9   {p999:.2f} µs (limit {LIMIT_MICROSECONDS:g})")
    print(f"max     {taken[-1]:.1f} µs")
    return 0 if p999 <= LIMIT_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
