"""`hastore demo --mode dledger`: three nodes elect their leader, which is killed twice.

    1 start three nodes               4 wait for all, prove that nothing was lost
    2 produce the flights             5 query with Spark, compare with the CSV
    3 kill the leader, twice          6 leave nothing running

Steps 2 and 3 overlap: the producer goes on in its own thread and follows the leader by itself.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from hastore.cli.asking import ANSWER_S, ask_status
from hastore.cli.common import program
from hastore.cli.demo_report import (
    SYNC_TIMEOUT_S,
    TOPIC,
    DemoReport,
    flight_producer,
    leave_spark_out,
    print_next_steps,
    prove_all,
    query_with_spark,
    sending,
)
from hastore.demo.nodes import Node, make_group
from hastore.demo.produce import FlightProducer
from hastore.demo.proof import ProofError, count_archived
from hastore.demo.requirements import LOG_FILE_BYTES

GROUP_SIZE = 3
KILLS = 2
_POLL_S = 0.01

Status = dict[str, Any]


def run_group_demo(rows: int, folder: pathlib.Path, *, with_spark: bool, quiet: bool) -> DemoReport:
    """Run all steps in `folder`; raises ProofError or the failed step's error.

    All nodes are stopped when this returns or raises.
    """
    report = DemoReport(folder, quiet)
    nodes = make_group(folder, GROUP_SIZE, f"{LOG_FILE_BYTES}B")
    try:
        report.step(1, f"Start {GROUP_SIZE} nodes on loopback; stores are in {folder}")
        _start(report, nodes)
        report.step(2, f"Send {rows:,} flights; each is acknowledged once 2 nodes have it on disk")
        producer = flight_producer(nodes, rows)
        _produce_and_kill(report, producer, nodes, rows)
        report.step(4, "Wait until all nodes have everything, and prove that nothing was lost")
        prove_all(report, producer, nodes, rows, _wait_equal(nodes))
        if with_spark:
            follower = next(node for node in nodes if node is not _leader(nodes)[0])
            query_with_spark(report, follower, f"node {follower.number}, a follower,", rows)
        else:
            leave_spark_out(report)
    finally:
        for node in nodes:
            node.stop()
    addresses = ",".join(node.api for node in nodes)
    print_next_steps(
        report,
        (
            f"{program('hastore')} log stat --store {nodes[0].store}",
            *(f"{program('hastore-dledger')} -c {node.config} &" for node in nodes),
            f"{program('hastore')} status --wait 30 --bootstrap {addresses}",
            f"{program('hastore')} query --topic {TOPIC} --key UA-1545 --bootstrap {addresses}",
        ),
    )
    return report


def _start(report: DemoReport, nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_ready()
    leader, status = _leader(nodes)
    for node in nodes:
        role = "LEADER" if node is leader else "FOLLOWER"
        report.print(f"    node {node.number}: {role} at {node.api}")
    report.print(f"    the nodes have elected node {leader.number} in term {status['term']}")


def _leader(nodes: Sequence[Node]) -> tuple[Node, Status]:
    """Return the node that takes writes, and its status. Raises ProofError if none does in time."""
    deadline = time.monotonic() + SYNC_TIMEOUT_S
    while time.monotonic() < deadline:
        for node in nodes:
            status = ask_status(node.api, ANSWER_S) if node.process is not None else None
            if status is not None and status["writable"]:
                return node, status
        time.sleep(_POLL_S)
    raise ProofError(f"no node leads after {SYNC_TIMEOUT_S:.0f} s")


def _produce_and_kill(
    report: DemoReport, producer: FlightProducer, nodes: Sequence[Node], rows: int
) -> None:
    """Send all flights; kill the leader after a third, and again after two thirds.

    The last third is held back until the first killed node runs again: only two of three nodes are
    a majority.
    """
    last_third = rows * KILLS // (KILLS + 1)
    go_on = producer.hold_at(last_third)
    kills = []
    with sending(report, producer, rows) as wait_for:
        wait_for(rows // (KILLS + 1))
        report.step(3, f"Meanwhile: kill the leader (SIGKILL), {KILLS} times")
        kills.append(_kill_leader(report, nodes))
        wait_for(last_third)
        go_on.set()
        wait_for(last_third + 1)
        kills.append(_kill_leader(report, nodes))
    archived = [count_archived(node.store) for node in nodes]
    silence = producer.silence
    report.facts["failover"] = {
        "kills": kills,
        "seconds_without_acknowledgement": round(silence.seconds, 3),
        "records_archived": sum(records for records, _ in archived),
        "bytes_archived": sum(size for _, size in archived),
    }
    report.print(
        f"    the longest time without an acknowledgement was {silence.seconds:.2f} s; nobody "
        "promoted a node, and the producer followed the leader by itself"
    )


def _kill_leader(report: DemoReport, nodes: Sequence[Node]) -> dict[str, Any]:
    """Kill the leader, wait for the next one, start the killed node again; return the facts."""
    old, before = _leader(nodes)
    killed = time.monotonic()
    old.kill()
    new, after = _leader(nodes)
    led_s = time.monotonic() - killed
    report.print(
        f"    node {old.number}, leader of term {before['term']}, is killed; node {new.number} "
        f"leads term {after['term']} after {led_s:.2f} s"
    )
    old.start()
    old.wait_ready()
    return {
        "killed": old.number,
        "leader": new.number,
        "term": after["term"],
        "seconds_to_lead": round(led_s, 3),
    }


def _wait_equal(nodes: Sequence[Node]) -> int:
    """Wait until all nodes have the whole log, committed and replayed; return its end."""
    deadline = time.monotonic() + SYNC_TIMEOUT_S
    keys = ("max_offset", "readable_offset", "confirmed_offset", "dispatched_offset")
    statuses: list[Status | None] = []
    while time.monotonic() < deadline:
        statuses = [ask_status(node.api, ANSWER_S) for node in nodes]
        ends = {int(status[key]) if status else -1 for status in statuses for key in keys}
        if len(ends) == 1 and -1 not in ends:
            return ends.pop()
        time.sleep(_POLL_S)
    raise ProofError(f"the nodes differ after {SYNC_TIMEOUT_S:.0f} s: {statuses}")
