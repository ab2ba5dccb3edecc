"""Put 1 KiB messages that a slave must confirm; client, master and slave are separate processes.

    python -m benchmarks.puts [--repeats 5] [--scale 1] [--dir FOLDER]

hastore, RocketMQ (its Java client) and Kafka (confluent-kafka) run at the same time, warmed up, and
take turns with each load. No put waits for a disk. Two more rows have no target:

  * hastore's client over zmq+tcp://, which reaches the same nodes through libzmq, shows what the
    transport costs;
  * a bare Python ping-pong over TCP is compared with one blocking put: 1 KiB from the first process
    to the second and on to the third, and 8 bytes back the same way.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from benchmarks.bare import ping_pong
from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Cost,
    Group,
    Target,
    arguments,
    at_least,
    at_most,
    figure,
    percentile,
    save,
    say,
    scratch,
    touch_memory,
)
from benchmarks.kafka import KafkaPair
from benchmarks.loads import batched, blocking, pipelined
from benchmarks.maven import peer_version
from benchmarks.rocketmq import RocketPair
from benchmarks.side_by_side import (
    OURS,
    ZMQ,
    ZMQ_LABEL,
    Row,
    run_rounds,
    share,
    start_peer,
    with_client,
    zmq_hosts,
)

ROCKETMQ, KAFKA, BARE = "RocketMQ", "Kafka", "bare"
ONE, MANY, BATCH = "one blocking put", "64 puts in flight", "send_batch of 100, 8 in flight"
OWN, LOOSE = "own batching, nothing held back", "acks=1, 512 in flight"
Load = tuple[int, Callable[[int], Any]]  # a count, and a function that puts that many messages
IDLE_S = 2.0
SETTLE_S = 4.0  # after the start, before the CPU of idle systems is measured
# Both systems touch the pages of the log in advance. This saves half of RocketMQ's CPU per message
# of a batch, and a quarter of hastore's. With a new, short store (replication, restart) it would
# only cost CPU.
WARM: dict[str, Any] = {"warmMapedFileEnable": True}
OWN_WARM: dict[str, Any] = {"warm_files": True}
MEMORY = "memory of the {} that is not mapped log"


def own_loads(hosts: list[str]) -> dict[str, Load]:
    """Return the loads of hastore's client, by row."""
    return {
        ONE: (1_500, lambda n: blocking(hosts, n)),
        MANY: (30_000, lambda n: pipelined(hosts, in_flight=64, count=n)),
        BATCH: (80_000, lambda n: batched(hosts, batch=100, in_flight=8, count=n)),
        OWN: (80_000, lambda n: pipelined(hosts, in_flight=1_024, count=n)),
        LOOSE: (50_000, lambda n: pipelined(hosts, in_flight=512, count=n, acks=1)),
    }


def rocket_loads(rocket: RocketPair) -> dict[str, Load]:
    """Return the loads of RocketMQ's client, by row."""
    return {
        ONE: (1_500, rocket.blocking),
        MANY: (15_000, lambda n: rocket.threads(64, n)),
        BATCH: (50_000, lambda n: rocket.batched(100, 8, n)),
        LOOSE: (15_000, lambda n: rocket.asynchronous(512, n)),
    }


def kafka_loads(kafka: KafkaPair) -> dict[str, Load]:
    """Return the loads of Kafka's client, by row."""
    return {
        ONE: (1_500, kafka.blocking),
        MANY: (30_000, lambda n: kafka.in_flight(64, n)),
        OWN: (200_000, kafka.batching),
    }


def all_rows(loads: dict[str, dict[str, Load]]) -> list[Row]:
    """Return the rows: the load of each system, and the targets."""
    promised: dict[str, dict[str, tuple[str, Target | None]]] = {
        ONE: {},  # each percentile has its own targets, see `blocking_figures`
        MANY: {
            ROCKETMQ: ("RocketMQ, 64 threads", at_least(5.0)),
            KAFKA: ("Kafka, idempotent", at_least(3.0)),
        },
        BATCH: {ROCKETMQ: ("RocketMQ, the same, warm files", at_least(1.2))},
        OWN: {KAFKA: ("Kafka, linger 5 ms", at_least(1.2))},
        LOOSE: {ROCKETMQ: ("RocketMQ, asynchronous", at_least(6.0))},
    }
    if ZMQ in loads:
        for peers in promised.values():
            peers[ZMQ] = (ZMQ_LABEL, None)
    return [
        Row(
            name,
            "ms" if name == ONE else "msg/s",
            {system: own[name] for system, own in loads.items() if name in own},
            peers,
        )
        for name, peers in promised.items()
    ]


def idle_shares(systems: dict[str, Any]) -> dict[str, float]:
    """Return the share of one core that each system uses without any load."""

    def used() -> dict[str, float]:
        return {
            name: sum(
                cost.cpu_s for who, cost in costs().items() if who != "client" or name != OURS
            )
            for name, costs in systems.items()
            if costs is not None and name != ZMQ  # whose nodes are hastore's
        }

    time.sleep(SETTLE_S)
    before = used()
    time.sleep(IDLE_S)
    return {name: round((value - before[name]) / IDLE_S, 3) for name, value in used().items()}


def blocking_figures(row: Row) -> list[dict[str, Any]]:
    """Return p50 and p99 against each peer."""
    out = []
    for label, of, targets in (
        ("p50", 0.50, {ROCKETMQ: at_most(0.7), KAFKA: at_most(0.3)}),
        ("p99", 0.99, {ROCKETMQ: at_most(0.8), KAFKA: at_most(0.15)}),
    ):
        row.peers = {
            ROCKETMQ: ("RocketMQ, Java client", targets[ROCKETMQ]),
            KAFKA: ("Kafka, confluent-kafka", targets[KAFKA]),
            BARE: ("bare TCP, three processes", None),
            **({ZMQ: (ZMQ_LABEL, None)} if ZMQ in row.loads else {}),
        }
        out += row.figures(f"{row.name}, {label}", share(of))
    return out


def memory_figures(held: dict[str, dict[str, list[Cost]]]) -> list[dict[str, Any]]:
    """Return the memory of each node, and of the client, against RocketMQ's."""
    out = []
    for ours, theirs, target in (
        ("master", "master", at_most(0.15)),
        ("slave 2", "slave", at_most(0.15)),
        ("client", "client", None),
    ):
        mine, others = held[OURS][ours], held.get(ROCKETMQ, {}).get(theirs, [])
        more = {"resident": mine[-1].resident_mib}
        if others:
            more["peer_resident"] = others[-1].resident_mib
        out.append(
            figure(
                MEMORY.format(theirs),
                "MiB",
                [cost.anonymous_mib for cost in mine],
                f"RocketMQ's {theirs}",
                [cost.anonymous_mib for cost in others],
                target,
                **more,
            )
        )
    return out


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, int(16 * 1024 * MIB * given.scale)))
        touch_memory(folder, int(4 * 1024 * MIB * given.scale))
        group = stack.enter_context(Group(folder, store=OWN_WARM))
        rocket = start_peer(stack, ROCKETMQ, lambda: RocketPair(folder, **WARM))
        kafka = start_peer(stack, KAFKA, lambda: KafkaPair(folder))
        group.start()
        systems: dict[str, Any] = {OURS: with_client(group.costs)}
        loads = {OURS: own_loads(group.bootstrap)}
        over_zmq = zmq_hosts(group.bootstrap)
        if over_zmq is not None:
            systems[ZMQ], loads[ZMQ] = systems[OURS], own_loads(over_zmq)
        if rocket is not None:
            systems[ROCKETMQ], loads[ROCKETMQ] = rocket.costs, rocket_loads(rocket)
        if kafka is not None:
            systems[KAFKA], loads[KAFKA] = with_client(kafka.costs), kafka_loads(kafka)
        systems[BARE], loads[BARE] = None, {ONE: (2_000, ping_pong)}
        rows = all_rows(loads)
        idle = idle_shares(systems)
        held: dict[str, dict[str, list[Cost]]] = {}

        def after_round(number: int) -> None:
            for name, costs in systems.items():
                for who, cost in (costs() if costs else {}).items():
                    held.setdefault(name, {}).setdefault(who, []).append(cost)
            p50 = {name: percentile(times[-1], 0.5) for name, times in rows[0].samples.items()}
            say(
                f"puts {number + 1}/{given.repeats}: "
                + ", ".join(f"{name} {value:.3f} ms" for name, value in p50.items())
                + "".join(
                    f"; {row.name} "
                    + ", ".join(f"{name} {got[-1]:,.0f}" for name, got in row.samples.items())
                    for row in rows[1:]
                )
            )

        run_rounds(rows, systems, given.repeats, given.scale, after_round)
    figures = blocking_figures(rows[0])
    for row in rows[1:]:
        figures += row.figures()
    figures += memory_figures(held)
    settings = {
        "body": BODY_BYTES,
        "idle_share_of_a_core": idle,
        "rocketmq": peer_version("rocketmq"),
        "kafka": peer_version("kafka"),
    }
    save("puts", figures, settings)


if __name__ == "__main__":
    main()
