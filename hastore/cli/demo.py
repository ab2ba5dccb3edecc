"""`hastore demo`: run a pair on real data, kill its master, prove that nothing was lost.

With `--zookeeper` the roles are in ZooKeeper, which is killed twice (demo_zookeeper.py). With
`--mode dledger` it runs a group of three instead (demo_group.py).

    1 start a master and a slave      4 wait for both, prove that nothing was lost
    2 produce the flights             5 query with Spark, compare with the CSV
    3 kill, flip, rejoin half-way     6 leave nothing running

Steps 2 and 3 overlap: the producer goes on in its own thread while its master is killed. A failed
proof ends the command with exit code 1.
"""

import functools
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from hastore.cli.asking import ask_status
from hastore.cli.common import (
    DONE,
    WRONG,
    print_error,
    print_json,
    print_note,
    program,
    with_json,
)
from hastore.cli.demo_group import GROUP_SIZE, run_group_demo
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
from hastore.cli.demo_zookeeper import RolesInZooKeeper
from hastore.cli.flip import promote
from hastore.cli.role_place import role_place
from hastore.client.security import ENVIRONMENT as SECURITY
from hastore.config.file import load_config
from hastore.config.model import Mode, Role
from hastore.demo.data import count_rows
from hastore.demo.nodes import Node, make_pair
from hastore.demo.produce import FlightProducer
from hastore.demo.proof import ProofError, count_archived
from hastore.demo.requirements import LOG_FILE_BYTES, missing_requirements
from hastore.errors import HastoreError, UsageError


def run_demo(
    rows: int,
    folder: pathlib.Path,
    *,
    with_spark: bool,
    quiet: bool,
    with_zookeeper: bool = False,
) -> DemoReport:
    """Run all steps in `folder`; raises ProofError or the failed step's error.

    Both nodes, and ZooKeeper, are stopped when this returns or raises.
    """
    report = DemoReport(folder, quiet)
    roles = RolesInZooKeeper(report, folder) if with_zookeeper else None
    registry = None if roles is None else roles.registry
    master, slave = make_pair(folder, f"{LOG_FILE_BYTES}B", registry)
    try:
        report.step(1, f"Start a SYNC_MASTER and a slave on loopback; stores are in {folder}")
        if roles is not None:
            roles.start()
        _start(report, (master, slave))
        report.step(2, f"Send {rows:,} flights; each is acknowledged once the slave has it too")
        group = None if roles is None else roles.group
        producer = flight_producer((master, slave), rows, group)
        _produce_and_flip(report, producer, master, slave, rows, roles)
        report.step(4, "Wait until both nodes have everything, and prove that nothing was lost")
        end = _wait_in_sync(slave, master)
        prove_all(report, producer, (master, slave), rows, end)
        if with_spark:
            query_with_spark(report, master, "the slave", rows)  # node 1 is the slave now
        else:
            leave_spark_out(report)
    finally:
        for node in (slave, master):
            node.stop()
        if roles is not None:
            roles.stop()
    if roles is not None:
        roles.print_next_steps((master, slave))
        return report
    print_next_steps(
        report,
        (
            f"{program('hastore')} log stat --store {master.store}",
            f"{program('hastore-master')} -c {slave.config} &",
            f"{program('hastore-slave')} -c {master.config} &",
            f"{program('hastore')} status --wait 30 --bootstrap {slave.api},{master.api}",
            f"{program('hastore')} query --topic {TOPIC} --key UA-1545 --bootstrap {slave.api}",
        ),
    )
    return report


def _start(report: DemoReport, nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        ready = node.wait_ready()
        report.print(f"    node {ready['node']}: {ready['role']} at {ready['api']}")


def _produce_and_flip(
    report: DemoReport,
    producer: FlightProducer,
    master: Node,
    slave: Node,
    rows: int,
    roles: RolesInZooKeeper | None,
) -> None:
    half = rows // 2
    with sending(report, producer, rows) as wait_for:
        if roles is not None:
            roles.go_on_without(producer, wait_for, rows)
        wait_for(half)
        report.step(3, f"Half-way: kill the master (SIGKILL) and promote node {slave.number}")
        killed = time.monotonic()
        master.kill()
        if roles is None:
            status = promote(slave.config, Role.SYNC_MASTER)
        else:
            status = roles.promote(slave)
        open_s = time.monotonic() - killed
        report.print(
            f"    node {slave.number} is {status['role']} of epoch {status['epoch']} after "
            f"{open_s:.2f} s; a synchronous put needs a slave, so the old master rejoins as one"
        )
        role_place(master.config, load_config(master.config)).change(Role.SLAVE)  # it is down
        master.start()
        master.wait_ready()
        rejoined_s = time.monotonic() - killed
    records, size = count_archived(master.store)
    silence = producer.silence
    report.facts["flip"] = {
        "seconds_to_open": round(open_s, 3),
        "seconds_to_rejoin": round(rejoined_s, 3),
        "seconds_without_acknowledgement": round(silence.seconds, 3),
        "records_archived": records,
        "bytes_archived": size,
    }
    report.print(
        f"    the flip cost {silence.seconds:.2f} s without acknowledgements; the old master cut "
        f"{records:,} unacknowledged records off its log and keeps them in "
        f"{master.store / 'rescued'}"
        if records
        else f"    the flip cost {silence.seconds:.2f} s without acknowledgements; the old master "
        "had no records to cut off its log"
    )


def _wait_in_sync(master: Node, slave: Node) -> int:
    """Wait until both nodes have the whole log, confirmed and replayed; return its end."""
    deadline = time.monotonic() + SYNC_TIMEOUT_S
    while time.monotonic() < deadline:
        one, other = (ask_status(node.api, 2.0) for node in (master, slave))
        if one is not None and other is not None:
            ends = {
                status[key] for status in (one, other) for key in ("max_offset", "readable_offset")
            }
            ends |= {one["confirmed_offset"], one["dispatched_offset"], other["dispatched_offset"]}
            if len(ends) == 1 and any(known["in_sync"] for known in one["slaves"]):
                return int(ends.pop())
        time.sleep(0.1)
    raise ProofError(f"the nodes are not in sync after {SYNC_TIMEOUT_S:.0f} s: {one}, {other}")


def _stop_by_exception(number: int, _frame: FrameType | None) -> NoReturn:
    raise HastoreError(f"the demo was stopped by {signal.Signals(number).name}")


def _leave_out_security() -> None:
    """Use no security in this process, whatever the environment says: the demo's nodes have none.

    The variable is set again when the command ends.
    """
    given = os.environ.pop(SECURITY, None)
    if given:
        print_note(
            f"{SECURITY} is not used: the demo makes a group of its own, without security; unset "
            "it before you run the commands that the demo prints at its end"
        )
        click.get_current_context().call_on_close(lambda: os.environ.update({SECURITY: given}))


@click.command("demo", short_help="Run a pair, or a group, on real data, with failovers.")
@click.option(
    "--mode",
    "mode_name",
    default=Mode.CLASSIC.value,
    show_default=True,
    type=click.Choice([mode.value for mode in Mode]),
    help="classic: a pair, its master killed once, and a flip; dledger: three nodes that elect "
    "their leader, which is killed twice.",
)
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="FRACTION",
    help="The fraction of the 336,776 flights to send.",
)
@click.option(
    "--zookeeper",
    "with_zookeeper",
    is_flag=True,
    help="Keep the roles in a ZooKeeper server, and kill it twice; only in mode classic.",
)
@click.option("--no-spark", is_flag=True, help="Leave out the Spark step.")
@click.option(
    "--folder", metavar="DIR", help="Put the stores here (default: a new temporary folder)."
)
@with_json
def demo_command(
    mode_name: str,
    scale: float,
    with_zookeeper: bool,
    no_spark: bool,
    folder: str | None,
    as_json: bool,
) -> int:
    """Run a group of nodes on real data, kill its master or leader, prove that nothing was lost,
    and query the data with Spark.

    Requirements are checked before anything is started: exit code 2 when one is missing.
    """
    _leave_out_security()
    mode, rows = Mode(mode_name), count_rows(scale)
    nodes = 2 if mode is Mode.CLASSIC else GROUP_SIZE
    wanted = pathlib.Path(folder or tempfile.gettempdir()).absolute()
    if with_zookeeper and mode is not Mode.CLASSIC:
        raise UsageError("--zookeeper: a group that elects its leader has no roles in ZooKeeper; "
                         "leave out --mode dledger")  # fmt: skip
    missing = list(
        missing_requirements(
            wanted, rows, with_spark=not no_spark, nodes=nodes, with_zookeeper=with_zookeeper
        )
    )
    for text in missing:
        print_error(text)
    if missing:
        return WRONG
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop_by_exception)
    place = wanted if folder else pathlib.Path(tempfile.mkdtemp(prefix="hastore-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    run = run_group_demo
    if mode is Mode.CLASSIC:
        run = functools.partial(run_demo, with_zookeeper=with_zookeeper)
    report = run(rows, place, with_spark=not no_spark, quiet=as_json)
    if as_json:
        print_json({"folder": str(place)} | report.facts)
    return DONE
