"""Put 1 KiB messages that both disks must have: synchronous flush on both nodes, 64 in flight.

    python -m benchmarks.flush [--repeats 5] [--scale 1] [--dir FOLDER]

hastore runs end to end: client, master and slave are processes, the master syncs, and the slave
syncs before it reports. RocketMQ has less to do: only its stores run, with 64 threads in the
master's process, no client, and SYNC_FLUSH on both nodes. Its slave reports messages that are in
its page cache, whatever its own setting says.
"""

import contextlib
from typing import Any

from benchmarks.common import BODY_BYTES, MIB, Group, arguments, at_least, save, say, scratch
from benchmarks.loads import pipelined
from benchmarks.maven import peer_version
from benchmarks.rocketmq import RocketStores
from benchmarks.side_by_side import OURS, Row, run_rounds, start_peer, with_client

ROCKETMQ = "RocketMQ"


def start_stores(rocket: RocketStores) -> None:
    """Open both stores, and wait until the slave is in sync."""
    rocket.open("master")
    rocket.open("slave")
    rocket.jvms["master"].wait_slaves(1)


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 8 * 1024 * MIB))
        group = stack.enter_context(
            Group(folder, store={"flush": "sync"}, ha={"ack_point": "flushed"})
        )
        rocket = start_peer(
            stack, ROCKETMQ, lambda: RocketStores(folder, flushDiskType="SYNC_FLUSH")
        )
        group.start()
        hosts = group.bootstrap
        loads: dict[str, Any] = {OURS: (15_000, lambda n: pipelined(hosts, in_flight=64, count=n))}
        systems: dict[str, Any] = {OURS: with_client(group.costs)}
        if rocket is not None:
            start_stores(rocket)
            systems[ROCKETMQ] = rocket.costs
            loads[ROCKETMQ] = (15_000, lambda n: rocket.put(64, n))
        row = Row(
            "synchronous flush on both sides, 64 in flight",
            "msg/s",
            loads,
            {ROCKETMQ: ("RocketMQ's stores without a client", at_least(1.3))},
        )
        run_rounds(
            [row],
            systems,
            given.repeats,
            given.scale,
            lambda number: say(
                f"flush {number + 1}/{given.repeats}: "
                + ", ".join(f"{name} {got[-1]:,.0f}/s" for name, got in row.samples.items())
            ),
        )
    save("flush", row.figures(), {"body": BODY_BYTES, "rocketmq": peer_version("rocketmq")})


if __name__ == "__main__":
    main()
