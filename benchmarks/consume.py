"""Read a million messages of 1 KiB with one consumer, from the first to the last.

    python -m benchmarks.consume [--repeats 5] [--scale 1] [--dir FOLDER]

Both systems read the same log of four queues from the page cache: hastore's node the original,
RocketMQ's broker a copy, which it opens as its own. Both are masters without slaves.

hastore: `Consumer.poll` in this process, 1 MiB per reply; the length of each body is checked.
RocketMQ: its DefaultMQPullConsumer in a JVM that stays warm, with a thread for each queue. It runs
twice: with 32 messages per reply, a broker's default limit (0.3 M messages), and with 1,024
messages or 1 MiB, for which both ends must be configured (maxTransferCountOnMessageInMemory,
maxTransferBytesOnMessageInMemory). The target against 32 per reply is the older one. It still
holds, because RocketMQ's users have that limit.
"""

import contextlib
import shutil
import time
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Group,
    Target,
    arguments,
    at_least,
    fill_store,
    save,
    say,
    scratch,
)
from benchmarks.maven import peer_version
from benchmarks.rocketmq import QUEUES, TOPIC, RocketPair
from benchmarks.side_by_side import (
    OURS,
    ZMQ,
    ZMQ_LABEL,
    Row,
    run_rounds,
    start_peer,
    with_client,
    zmq_hosts,
)
from hastore.client.consumer.consumer import Consumer

DEFAULT, TUNED = "RocketMQ as it comes", "RocketMQ tuned"
MESSAGES = 1_000_000
RECORD_BYTES = 1_125  # a message of 1 KiB takes 1,120 bytes in the log; files end with a blank
LIMIT_S = 120.0


def read(bootstrap: list[str], count: int) -> float:
    """Return the messages per second of one consumer that reads `count` messages."""
    left, size = count, 0
    deadline = time.monotonic() + LIMIT_S
    with Consumer(TOPIC, bootstrap) as consumer:
        began = time.perf_counter()
        while left > 0:
            messages = consumer.poll(min(left, 1_000))
            for message in messages:
                size += len(message.body)
            left -= len(messages)
            if not messages and time.monotonic() > deadline:
                raise RuntimeError(f"{left} messages did not arrive")
        seconds = time.perf_counter() - began
    if size != count * BODY_BYTES:
        raise RuntimeError(f"{size} bytes of {count} bodies")
    return count / seconds


def read_rocket(rocket: RocketPair, count: int, batch: int) -> float:
    """Return the messages per second of RocketMQ's consumer."""
    seconds, size = rocket.consume(TOPIC, count, QUEUES, batch)
    if size < count * BODY_BYTES:
        raise RuntimeError(f"RocketMQ's consumer received {size} bytes of {count} bodies")
    return count / seconds


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    size = int(MESSAGES * RECORD_BYTES * given.scale)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 5 * 1024 * MIB))
        group = stack.enter_context(Group(folder, 1, role="ASYNC_MASTER"))
        say(f"consume: writing {size / 2**30:.2f} GiB of log")
        fill_store(group[1].store, size, 1024 * MIB)

        def make() -> RocketPair:
            pair = RocketPair(folder, slave=False, role="ASYNC_MASTER")
            ignored = shutil.ignore_patterns("hastore")
            shutil.copytree(group[1].store, pair.root("master"), ignore=ignored)
            return pair

        rocket = start_peer(stack, "RocketMQ", make)
        group[1].start()
        hosts, count = group.bootstrap, int(MESSAGES * given.scale)
        loads: dict[str, Any] = {OURS: (count, lambda n: read(hosts, n))}
        systems: dict[str, Any] = {OURS: with_client(group.costs)}
        if rocket is not None:
            loads[DEFAULT] = (3 * count // 10, lambda n: read_rocket(rocket, n, 32))
            loads[TUNED] = (count, lambda n: read_rocket(rocket, n, 1_024))
            systems |= {DEFAULT: rocket.costs, TUNED: rocket.costs}
        peers: dict[str, tuple[str, Target | None]] = {
            DEFAULT: ("RocketMQ's pull consumer, 32 an answer", at_least(4.0)),
            TUNED: ("RocketMQ's pull consumer, 1,024 an answer", at_least(1.2)),
        }
        over_zmq = zmq_hosts(hosts)
        if over_zmq is not None:
            loads[ZMQ] = (count, lambda n: read(over_zmq, n))
            systems[ZMQ] = systems[OURS]
            peers[ZMQ] = (ZMQ_LABEL, None)
        row = Row("one consumer reading 1 M messages", "msg/s", loads, peers)
        run_rounds(
            [row],
            systems,
            given.repeats,
            1.0,
            lambda number: say(
                f"consume {number + 1}/{given.repeats}: "
                + ", ".join(f"{name} {got[-1]:,.0f}/s" for name, got in row.samples.items())
            ),
        )
    settings = {"body": BODY_BYTES, "messages": count, "rocketmq": peer_version("rocketmq")}
    save("consume", row.figures(), settings)


if __name__ == "__main__":
    main()
