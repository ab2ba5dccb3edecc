"""A member of a group that shares queues, in a process of its own.

    python -m tests.interop.shared_member ADDRESSES TOPIC GROUP FILE

It writes its id to FILE, then "BODY MS" for each message, with the monotonic time.
SIGTERM closes it.
"""

from __future__ import annotations

import signal
import sys
import time

from hastore import Consumer, SharedConsumer


def main(addresses: str, topic: str, group: str, path: str) -> None:
    """Consume until SIGTERM."""
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ends.append(number))
    with (
        open(path, "w", buffering=1) as out,
        Consumer(topic, addresses, group=group, share=True, auto_commit_s=0.5) as consumer,
    ):
        assert isinstance(consumer, SharedConsumer)
        out.write(f"{consumer.member}\n")
        while not ends:
            for message in consumer.poll(200, 0.2):
                out.write(f"{message.body.decode()} {time.monotonic_ns() / 1e6:.3f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
