"""Put with more producers, slaves and queues: does the rate stay flat?

    python -m benchmarks.growth [--repeats 5] [--scale 1] [--dir FOLDER]

Synchronous puts of 1 KiB. Each figure is compared with the smallest of its kind in the same repeat:

  * 1, 4, 16 and 64 producers in up to four client processes, which share 256 puts in flight; also
    with clients over zmq+tcp://;
  * 1, 2 and 4 slaves, `acks: 1`, 64 in flight;
  * 1, 100 and 10,000 queues, 256 in flight.

`growth_log` measures the size of the log. All processes share the machine's cores, so a higher CPU
cost per message lowers the rate.
"""

import contextlib
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Cost,
    Group,
    arguments,
    at_least,
    figure,
    save,
    say,
    scratch,
)
from benchmarks.loads import TOPIC_QUEUES, pipelined, shared
from benchmarks.side_by_side import OURS, ZMQ, ZMQ_LABEL, Row, run_rounds, with_client, zmq_hosts

PRODUCERS = (1, 4, 16, 64)
IN_FLIGHT = 256  # shared by the producers
TARGETS = {"64 producers, 4 in flight each": at_least(0.6)}
SLAVES = (1, 2, 4)
QUEUES = (1, 100, 10_000)
# A queue's first file is allocated whole: with the default of 300,000 units, 10,000 queues would
# take 60 GB.
QUEUE_UNITS = 3_000


def row(name: str, load: Any, count: int) -> Row:
    """Return a row without peers."""
    return Row(name, "msg/s", {OURS: (count, load)}, {})


def producers_row(hosts: list[str], over_zmq: list[str] | None, number: int) -> Row:
    """Return the row for a number of producers; also over libzmq if that is installed."""

    def load(where: list[str]) -> Any:
        return lambda n: shared(where, producers=number, in_flight=IN_FLIGHT, count=n)

    each = IN_FLIGHT // number
    name = (
        f"{number} producers, {each} in flight each" if number > 1 else f"one producer with {each}"
    )
    out = row(name, load(hosts), 16_000)
    if over_zmq is not None:
        out.loads = {**out.loads, ZMQ: (16_000, load(over_zmq))}
        out.peers = {ZMQ: (ZMQ_LABEL, None)}
    return out


def rows_of(groups: dict[int, Group], many: Group) -> dict[str, list[Row]]:
    """Return the rows of each kind, the smallest first."""
    pair = groups[1].bootstrap
    over_zmq = zmq_hosts(pair)
    producers = [producers_row(pair, over_zmq, number) for number in PRODUCERS]
    slaves = [
        row(
            f"{number} slaves",
            lambda n, k=number: pipelined(groups[k].bootstrap, in_flight=64, count=n),
            12_000,
        )
        for number in SLAVES
    ]
    queues = [
        row(
            f"{number:,} queues",
            lambda n, k=number: pipelined(many.bootstrap, in_flight=256, count=n, queues=k),
            20_000,
        )
        for number in QUEUES
    ]
    return {"producers": producers, "slaves": slaves, "queues": queues}


def figures_of(kinds: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """Return for each row a figure against the smallest of its kind, then against its peers."""
    out = []
    for rows in kinds.values():
        least = rows[0]
        for one in rows:
            alone = one is least
            out.append(
                figure(
                    one.name,
                    one.unit,
                    one.samples[OURS],
                    None if alone else least.name,
                    [] if alone else least.samples[OURS],
                    TARGETS.get(one.name),
                    cpu_us_per_message=one.cpu(OURS),
                )
            )
            out += one.figures() if one.peers else []
    return out


def costs_of(groups: list[Group]) -> dict[str, Cost]:
    """Sum what nodes of the same name have used; only one group has load at a time."""
    out: dict[str, Cost] = {}
    for group in groups:
        for who, cost in group.costs().items():
            seen = out.get(who, Cost(0.0, 0.0, 0.0))
            out[who] = Cost(seen.cpu_s + cost.cpu_s, cost.resident_mib, cost.anonymous_mib)
    return out


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 30 * 1024 * MIB))

        def start(name: str, slaves: int, **store: int) -> Group:
            place = folder / name
            place.mkdir()
            group = stack.enter_context(Group(place, slaves + 1, store=store))
            group.start()
            return group

        groups = {slaves: start(f"slaves{slaves}", slaves) for slaves in SLAVES}
        many = start("queues", 1, default_queues=TOPIC_QUEUES, consume_queue_units=QUEUE_UNITS)
        kinds = rows_of(groups, many)
        everyone = [*groups.values(), many]
        for rows in kinds.values():
            costs = with_client(lambda: costs_of(everyone))
            run_rounds(rows, {OURS: costs, ZMQ: costs}, given.repeats, given.scale)
            for one in rows:
                rates = ", ".join(f"{rate:,.0f}" for rate in one.samples[OURS])
                say(f"growth, {one.name}: {rates} msg/s")
    save("growth", figures_of(kinds), {"body": BODY_BYTES, "consume_queue_units": QUEUE_UNITS})


if __name__ == "__main__":
    main()
