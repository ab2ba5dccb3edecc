"""A group of three of mode dledger beside DLedger 0.3.1.2: puts of 1 KiB, failover, rejoin.

    python -m benchmarks.dledger [--repeats 5] [--scale 1] [--dir FOLDER]

Both groups, and hastore's once more with synced disks, run at the same time, each node in a process
of its own, and take turns. DLedger acknowledges what two page caches have, and so does hastore's
group with `store.flush: async`. The other one, hastore's default, acknowledges what two disks have.
DLedger is driven by its own Java client.

  * Failover: SIGKILL of the leader to the next acknowledged put, with the default timeouts.
  * Catch-up: a follower that lacks 256 MiB, until it has the last entry.
  * COMPARE: 10,000 entries of an old leader that nobody else has, while the others have 10,000 in
    the next term, until they are cut. hastore also archives them on the disk.

The times of the last two begin when hastore's node has its link to the leader, and when DLedger's
server, whose JVM is warm, knows that it follows.
"""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.bare import BODY
from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Target,
    arguments,
    at_least,
    at_most,
    figure,
    save,
    say,
    scratch,
)
from benchmarks.ledgers import Ledgers
from benchmarks.loads import batched, blocking, pipelined
from benchmarks.maven import peer_version
from benchmarks.quorum import QuorumGroup
from benchmarks.side_by_side import OURS, Row, run_rounds, start_peer, times_and_rates, with_client
from hastore.client.producer.producer import Producer

DLEDGER = "DLedger"
PEER = "DLedger, acknowledged from page caches"
MEMORY: dict[str, Any] = {"store": {"flush": "async"}, "dledger": {"allow_async_flush": True}}
ONE, MANY = "one blocking put", "64 puts in flight"
CATCH_UP, DIVERGENT = 256 * MIB // BODY_BYTES, 10_000
FILL_BATCH = 100


def rows_of(
    group: QuorumGroup, ledgers: Ledgers | None, level: str, targets: dict[str, Target | None]
) -> list[Row]:
    """Return the rows of puts to one of hastore's groups."""
    hosts = group.bootstrap
    one: dict[str, Any] = {OURS: (1_000, lambda n: blocking(hosts, n))}
    many: dict[str, Any] = {OURS: (20_000, lambda n: pipelined(hosts, in_flight=64, count=n))}
    if ledgers is not None:
        one[DLEDGER] = (1_000, ledgers.blocking)
        many[DLEDGER] = (10_000, lambda n: ledgers.threads(64, n))
    return [
        Row(f"{ONE}, {level}", "ms", one, {DLEDGER: (PEER, targets[ONE])}),
        Row(f"{MANY}, {level}", "msg/s", many, {DLEDGER: (PEER, targets[MANY])}),
    ]


def puts(
    group: QuorumGroup,
    ledgers: Ledgers | None,
    given: Any,
    level: str,
    targets: dict[str, Target | None],
) -> list[dict[str, Any]]:
    """Run the puts in turn; return their figures."""
    rows = rows_of(group, ledgers, level, targets)
    systems: dict[str, Any] = {OURS: with_client(group.costs)}
    if ledgers is not None:
        systems[DLEDGER] = ledgers.costs

    def after_round(number: int) -> None:
        rates = {name: round(found[-1]) for name, found in rows[1].samples.items()}
        say(f"puts {level} {number + 1}/{given.repeats}: {MANY} {rates}")

    run_rounds(rows, systems, given.repeats, given.scale, after_round)
    return times_and_rates(rows)


def fill(group: QuorumGroup, count: int) -> Callable[[], None]:
    """Return a function that puts `count` messages, in batches."""

    def put() -> None:
        batched(group.bootstrap, batch=FILL_BATCH, in_flight=8, count=count)

    return put


def fail_over(group: QuorumGroup) -> float:
    """Return the seconds to the next acknowledged put after the leader was killed."""
    with Producer(group.bootstrap) as producer:
        producer.send_sync("failover", BODY)
        return group.fail_over(lambda: producer.send_sync("failover", BODY) and None)


def side_by_side(
    name: str,
    unit: str,
    given: Any,
    ours: Callable[[], float],
    theirs: Callable[[], float] | None,
    target: Target,
) -> dict[str, Any]:
    """Measure both in turn, `repeats` times; return the figure."""
    mine: list[float] = []
    others: list[float] = []
    for repeat in range(given.repeats):
        mine.append(ours())
        if theirs is not None:
            others.append(theirs())
        beside = f"; DLedger {others[-1]:.3f}" if others else ""
        say(f"{name} {repeat + 1}/{given.repeats}: {mine[-1]:.3f} {unit}{beside}")
    return figure(name, unit, mine, "DLedger", others, target)


def rejoins(
    group: QuorumGroup, ledgers: Ledgers | None, given: Any
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Run failover, catch-up and COMPARE; return the figures, and the sizes."""
    entries = max(1_000, int(CATCH_UP * given.scale)) // FILL_BATCH * FILL_BATCH
    divergent = max(1_000, int(DIVERGENT * given.scale)) // FILL_BATCH * FILL_BATCH
    mib = entries * BODY_BYTES / MIB
    figures = [
        side_by_side(
            "SIGKILL of the leader to the next acknowledged put",
            "s",
            given,
            lambda: fail_over(group),
            None if ledgers is None else ledgers.fail_over,
            Target(1.0, "at most", "figure"),
        )
    ]
    if ledgers is not None:
        ledgers.restart()
    figures.append(
        side_by_side(
            f"catch-up of a follower by {mib:.0f} MiB",
            "MiB/s",
            given,
            lambda: mib / group.catch_up(fill(group, entries)),
            None if ledgers is None else lambda: mib / ledgers.catch_up(entries),
            at_least(20.0),
        )
    )
    figures.append(
        side_by_side(
            f"COMPARE over {divergent:,} divergent entries",
            "s",
            given,
            lambda: group.compare(divergent, fill(group, divergent)),
            None if ledgers is None else lambda: ledgers.compare(divergent),
            Target(0.1, "at most", "figure"),
        )
    )
    return figures, {"catch_up_entries": entries, "divergent_entries": divergent}


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder: pathlib.Path = stack.enter_context(scratch(given.dir, 24 * 1024 * MIB))
        memory = stack.enter_context(QuorumGroup(folder / "memory", **MEMORY))
        disk = stack.enter_context(QuorumGroup(folder / "disk"))
        ledgers: Ledgers | None = start_peer(stack, DLEDGER, lambda: Ledgers(folder))
        memory.start()
        disk.start()
        loose: dict[str, Target | None] = {ONE: at_most(0.5), MANY: at_least(6.0)}
        synced: dict[str, Target | None] = {ONE: None, MANY: at_least(2.0)}
        figures = puts(memory, ledgers, given, "in two page caches", loose)
        memory.close()
        figures += puts(disk, ledgers, given, "on two disks", synced)
        more, sizes = rejoins(disk, ledgers, given)
        figures += more
    settings = {"body": BODY_BYTES, "dledger": "0.3.1.2", "rocketmq": peer_version("rocketmq")}
    save("dledger", figures, {**settings, **sizes})


if __name__ == "__main__":
    main()
