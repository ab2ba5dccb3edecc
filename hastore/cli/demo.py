"""`hastore demo`: run a group on real data, kill its master, prove that nothing was lost.

All demos have the same six steps, and a failed proof ends the command with exit code 1:

    1 start the nodes                 4 wait for all, prove that nothing was lost
    2 produce the flights             5 query with Spark, compare with the CSV
    3 kill the master or leader       6 leave nothing running

Steps 2 and 3 overlap: the producer goes on in its own thread and finds the new master by itself. A
pair's master is killed half-way, the slave is promoted, and the old master rejoins. With
`--zookeeper` the roles are in ZooKeeper, which is killed while the master serves, and again in the
middle of the flip, right after the new role was written. With `--mode dledger` three nodes elect
their leader, which is killed twice.

The nodes, the data, the producer and the proofs are in `hastore/demo/`.
"""

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import click
from rich.table import Table

from hastore.cli.common import (
    DONE,
    WRONG,
    Folder,
    print_error,
    print_json,
    print_note,
    program,
    progress_bar,
    stderr,
    stdout,
    with_json,
)
from hastore.cli.flip import promote
from hastore.cli.own_node import ANSWER_S, RegistryPlace, ask_status, role_place
from hastore.client.security import ENVIRONMENT as SECURITY
from hastore.config.file import load_config
from hastore.config.model import Mode, Role
from hastore.demo.flights import count_rows, read_delays, read_flights
from hastore.demo.nodes import (
    DemoNode,
    default_folder,
    demo_folder,
    free_ports,
    make_group,
    make_pair,
)
from hastore.demo.proof import (
    FlightProducer,
    ProofError,
    count_archived,
    prove_history,
    prove_identical_logs,
    prove_identical_queues,
)
from hastore.demo.requirements import LOG_FILE_BYTES, missing_requirements
from hastore.demo.zookeeper import ZooKeeper
from hastore.errors import HastoreError, UsageError
from hastore.history.recorder import Recorder

TOPIC = "flights"
PAIR_SIZE = 2
GROUP_SIZE = 3
KILLS = 2  # of a group's leader
SYNC_TIMEOUT_S = 60.0
_POLL_S = 0.01
_SHARE_WITHOUT = 10  # one flight in so many is sent while ZooKeeper is down

Status = dict[str, Any]
WaitFor = Callable[[int], None]


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
    "--clients",
    type=click.Choice(["rocketmq"]),
    help="Instead of the flights: RocketMQ's own Java clients send and consume while the master is "
    "killed. Needs Java 17 and Maven.",
)
@click.option(
    "--folder",
    type=Folder(),
    metavar="DIR",
    help="Put the stores here, and keep them. By default they are in data/demo of the checkout, "
    "or without one in ~/.cache/hastore/demo, until the next demo replaces them.",
)
@with_json
def demo_command(
    mode_name: str,
    scale: float,
    with_zookeeper: bool,
    no_spark: bool,
    clients: str | None,
    folder: str | None,
    as_json: bool,
) -> int:
    """Run a group of nodes on real data, kill its master or leader, prove that nothing was lost,
    and query the data with Spark.

    Requirements are checked before anything is started: exit code 2 when one is missing.
    """
    _leave_out_security()
    mode, rows = Mode(mode_name), count_rows(scale)
    nodes = PAIR_SIZE if mode is Mode.CLASSIC else GROUP_SIZE
    if with_zookeeper and mode is not Mode.CLASSIC:
        raise UsageError("--zookeeper: a group that elects its leader has no roles in ZooKeeper; "
                         "leave out --mode dledger")  # fmt: skip
    place = default_folder() if folder is None else pathlib.Path(folder).absolute()
    report = DemoReport(place, kept=folder is not None, quiet=as_json)
    if clients is not None:
        return _run_clients(report, mode, scale)
    missing = list(
        missing_requirements(
            place,
            rows,
            with_spark=not no_spark,
            nodes=nodes,
            with_zookeeper=with_zookeeper,
            replace=folder is None,
        )
    )
    for text in missing:
        print_error(text)
    if missing:
        return WRONG
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop_by_exception)
    with demo_folder(place, replace=folder is None):
        if mode is Mode.CLASSIC:
            run_pair_demo(report, rows, with_spark=not no_spark, with_zookeeper=with_zookeeper)
        else:
            run_group_demo(report, rows, with_spark=not no_spark)
    if as_json:
        print_json({"folder": str(place)} | report.facts)
    return DONE


def _run_clients(report: "DemoReport", mode: Mode, scale: float) -> int:
    """Run RocketMQ's clients through a kill; a `scale` below 1 shortens the quiet times."""
    from hastore.cli.demo_clients import (  # here: no other demo needs it
        QUIET_S,
        STEPS,
        run_clients_demo,
    )
    from hastore.demo.java_clients import require_java

    require_java()
    report.steps = STEPS
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop_by_exception)
    with demo_folder(report.folder, replace=not report.kept):
        facts = run_clients_demo(
            report.folder, mode, max(1.0, QUIET_S * scale), report.print, report.step
        )
    if report.quiet:
        print_json({"folder": str(report.folder)} | facts)
    return DONE


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


@dataclass(slots=True)
class DemoReport:
    """Hold the results of the demo, which `--json` prints, and print the progress."""

    folder: pathlib.Path
    kept: bool  # the next demo does not replace the folder
    quiet: bool
    steps: int = 6
    facts: dict[str, Any] = field(default_factory=dict)

    def print(self, text: str | Table) -> None:
        """Print a line, or a table, of progress."""
        (stderr if self.quiet else stdout).print(text, highlight=False, soft_wrap=True)

    def step(self, number: int, text: str) -> None:
        """Print the title of a step."""
        self.print(f"\n[bold]{number}/{self.steps}[/bold] {text}")


def run_pair_demo(report: DemoReport, rows: int, *, with_spark: bool, with_zookeeper: bool) -> None:
    """Run all steps with a pair; raises ProofError or the failed step's error.

    Both nodes, and ZooKeeper, are stopped when this returns or raises.
    """
    folder = report.folder
    roles = RolesInZooKeeper(report) if with_zookeeper else None
    registry = None if roles is None else roles.registry
    master, slave = make_pair(folder, f"{LOG_FILE_BYTES}B", registry)
    try:
        report.step(1, f"Start a SYNC_MASTER and a slave on loopback; stores are in {folder}")
        if roles is not None:
            roles.start()
        _start(report, (master, slave))
        report.step(2, f"Send {rows:,} flights; each is acknowledged once the slave has it too")
        group = None if roles is None else roles.group
        recorder = Recorder(history_of(report), nodes=PAIR_SIZE)
        producer = flight_producer((master, slave), rows, recorder, group)
        _produce_and_flip(report, producer, master, slave, rows, roles)
        report.step(4, "Wait until both nodes have everything, and prove that nothing was lost")
        prove_all(report, (master, slave), rows, kills=1)
        if with_spark:
            query_with_spark(report, master, "the slave", rows)  # node 1 is the slave now
        else:
            report.step(5, "Spark is left out (--no-spark)")
    finally:
        for node in (slave, master):
            node.stop()
        if roles is not None:
            roles.stop()
    starts = [
        f"{program('hastore-master')} -c {slave.config}",
        f"{program('hastore-slave')} -c {master.config}",
    ]
    if roles is not None:  # ZooKeeper is gone: each node starts in its last role
        starts = [f"{program('hastore')} serve -c {node.config}" for node in (slave, master)]
    print_next_steps(report, (slave, master), starts)


def _start(report: DemoReport, nodes: Sequence[DemoNode]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        ready = node.wait_ready()
        report.print(f"    node {ready['node']}: {ready['role']} at {ready['api']}")


def _produce_and_flip(
    report: DemoReport,
    producer: FlightProducer,
    master: DemoNode,
    slave: DemoNode,
    rows: int,
    roles: "RolesInZooKeeper | None",
) -> None:
    half = rows // 2
    go_on = producer.hold_at(rows * 3 // 4)  # so that a fast one has not sent all by then
    with sending(report, producer, rows) as wait_for:
        if roles is not None:
            roles.go_on_without(producer, wait_for, rows)
        wait_for(half)
        report.step(3, f"Half-way: kill the master (SIGKILL) and promote node {slave.number}")
        killed = time.monotonic()
        producer.recorder.fault("kill", master.number)
        master.kill()
        go_on.set()
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


def run_group_demo(report: DemoReport, rows: int, *, with_spark: bool) -> None:
    """Run all steps with a group that elects its leader; raises as `run_pair_demo` does.

    All nodes are stopped when this returns or raises.
    """
    nodes = make_group(report.folder, GROUP_SIZE, f"{LOG_FILE_BYTES}B")
    try:
        report.step(1, f"Start {GROUP_SIZE} nodes on loopback; stores are in {report.folder}")
        _start_group(report, nodes)
        report.step(2, f"Send {rows:,} flights; each is acknowledged once 2 nodes have it on disk")
        recorder = Recorder(history_of(report), mode="dledger", nodes=GROUP_SIZE)
        producer = flight_producer(nodes, rows, recorder)
        _produce_and_kill(report, producer, nodes, rows)
        report.step(4, "Wait until all nodes have everything, and prove that nothing was lost")
        prove_all(report, nodes, rows, kills=KILLS)
        if with_spark:
            follower = next(node for node in nodes if node is not _leader(nodes)[0])
            query_with_spark(report, follower, f"node {follower.number}, a follower,", rows)
        else:
            report.step(5, "Spark is left out (--no-spark)")
    finally:
        for node in nodes:
            node.stop()
    starts = [f"{program('hastore-dledger')} -c {node.config}" for node in nodes]
    print_next_steps(report, nodes, starts)


def _start_group(report: DemoReport, nodes: Sequence[DemoNode]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_ready()
    leader, status = _leader(nodes)
    for node in nodes:
        role = "LEADER" if node is leader else "FOLLOWER"
        report.print(f"    node {node.number}: {role} at {node.api}")
    report.print(f"    the nodes have elected node {leader.number} in term {status['term']}")


def _leader(nodes: Sequence[DemoNode]) -> tuple[DemoNode, Status]:
    """Return the node that takes writes, and its status. Raises ProofError if none does in time."""
    deadline = time.monotonic() + SYNC_TIMEOUT_S
    while time.monotonic() < deadline:
        for node in nodes:
            status = ask_status(node.api, ANSWER_S) if node.process is not None else None
            if status is not None and status["writable"]:
                return node, status
        time.sleep(_POLL_S)
    raise ProofError(
        f"no node leads after {SYNC_TIMEOUT_S:.0f} s; see {nodes[0].log} and the others"
    )


def _produce_and_kill(
    report: DemoReport, producer: FlightProducer, nodes: Sequence[DemoNode], rows: int
) -> None:
    """Send all flights; kill the leader after a third, and again after two thirds.

    The last third is held back until the first killed node runs again: only two of three nodes are
    a majority. Its second half waits for the second kill, so that a fast producer has not sent all
    by then.
    """
    last_third = rows * KILLS // (KILLS + 1)
    go_on = producer.hold_at(last_third)
    killed_again = producer.hold_at((last_third + rows) // 2)
    kills = []
    with sending(report, producer, rows) as wait_for:
        wait_for(rows // (KILLS + 1))
        report.step(3, f"Meanwhile: kill the leader (SIGKILL), {KILLS} times")
        kills.append(_kill_leader(report, nodes, producer))
        wait_for(last_third)
        go_on.set()
        wait_for(last_third + 1)
        kills.append(_kill_leader(report, nodes, producer, killed_again))
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


def _kill_leader(
    report: DemoReport,
    nodes: Sequence[DemoNode],
    producer: FlightProducer,
    is_killed: threading.Event | None = None,
) -> dict[str, Any]:
    """Kill the leader, wait for the next one, start the killed node again; return the facts.

    `is_killed` is set once the leader is down.
    """
    old, before = _leader(nodes)
    killed = time.monotonic()
    producer.recorder.fault("kill", old.number)
    old.kill()
    if is_killed is not None:
        is_killed.set()
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


class RolesInZooKeeper:
    """The ZooKeeper server with the roles of a pair, and what the demo does with it."""

    def __init__(self, report: DemoReport) -> None:
        (port,) = free_ports(1)
        self._server = ZooKeeper(report.folder / "zookeeper", port)
        self._report = report
        self._facts: dict[str, Any] = {"kills": 0}
        report.facts["zookeeper"] = self._facts

    @property
    def registry(self) -> str:
        """The value of the nodes' key `registry`."""
        return f"zk://{self._server.address}"

    @property
    def group(self) -> str:
        """The address of the group for clients."""
        return f"{self.registry}/demo/flights"

    def start(self) -> None:
        """Start the server."""
        self._server.start()
        self._server.wait_ready()
        self._report.print(f"    ZooKeeper: {self.group}")

    def stop(self) -> None:
        """Stop the server, if it runs."""
        self._server.stop()

    def go_on_without(self, producer: FlightProducer, wait_for: WaitFor, rows: int) -> None:
        """Kill ZooKeeper while the master serves; wait for acknowledgements; start it again."""
        wait_for(rows // _SHARE_WITHOUT)
        self._kill()
        before = producer.count
        wait_for(min(rows // 2, before + max(1, rows // _SHARE_WITHOUT)))
        count = producer.count - before
        self._facts["acknowledged_without"] = count
        self._server.start()
        self._server.wait_ready()
        self._report.print(
            f"    ZooKeeper was killed (SIGKILL) meanwhile: {count:,} flights were acknowledged "
            "without it, and no role changed; now it is back"
        )

    def promote(self, node: DemoNode) -> dict[str, Any]:
        """Give a node the role SYNC_MASTER, and kill ZooKeeper at once; return the node's status
        once it takes writes. Raises ProofError if it never does.
        """
        RegistryPlace(load_config(node.config)).change(Role.SYNC_MASTER)
        self._kill()
        self._report.print("    ZooKeeper is killed right after the new role was written to it")
        self._server.start()
        self._server.wait_ready()
        deadline = time.monotonic() + SYNC_TIMEOUT_S
        while time.monotonic() < deadline:
            status = ask_status(node.api, ANSWER_S)
            if status is not None and status["writable"]:
                return status
            time.sleep(_POLL_S)
        raise ProofError(
            f"node {node.number} is not master after {SYNC_TIMEOUT_S:.0f} s; see {node.log}"
        )

    def _kill(self) -> None:
        self._server.kill()
        self._facts["kills"] += 1


def history_of(report: DemoReport) -> pathlib.Path:
    """Return the file of what the producer sees."""
    return report.folder / "history.jsonl"


def flight_producer(
    nodes: Sequence[DemoNode], rows: int, recorder: Recorder, group: str | None = None
) -> FlightProducer:
    """Return the producer of the flights; it is not started.

    It gets the nodes' addresses or, with a `group`, that of the group in ZooKeeper.
    """
    addresses = [node.api for node in nodes] if group is None else [group]
    return FlightProducer(addresses, TOPIC, read_flights(rows), rows, recorder)


@contextlib.contextmanager
def sending(report: DemoReport, producer: FlightProducer, rows: int) -> Iterator[WaitFor]:
    """Send while the body runs; lend a function that waits until so many are acknowledged.

    At the end all are. Raises the producer's failure.
    """
    with progress_bar(visible=not report.quiet) as progress:
        task = progress.add_task("    flights", total=rows, note="")

        def show(count: int) -> None:
            progress.update(task, completed=count)

        began = time.monotonic()
        producer.start()
        yield lambda count: producer.wait_for(count, show)
        producer.wait_for(rows, show)
        producer.join()
        seconds = time.monotonic() - began
    if producer.failure is not None:
        raise producer.failure
    report.facts |= {
        "messages": rows,
        "seconds": round(seconds, 3),
        "msgs_per_s": round(rows / seconds, 1),
        "levels": producer.levels,
    }
    report.print(f"    {rows:,} acknowledged in {seconds:.1f} s, {rows / seconds:,.0f} a second")


def prove_all(report: DemoReport, nodes: Sequence[DemoNode], rows: int, kills: int) -> None:
    """Wait until all nodes have the whole log. Then prove that logs and queues are the same on all
    of them, and that the log has each acknowledged message exactly once. Raises ProofError.
    """
    end = _wait_until_equal(nodes)
    all_nodes = "both" if len(nodes) == 2 else f"all {len(nodes)}"
    first = nodes[0]
    for other in nodes[1:]:
        compared = prove_identical_logs(first.store, other.store)
        units = prove_identical_queues(first.store, other.store, TOPIC)
        if compared != end:
            raise ProofError(f"{compared} bytes of the logs were compared, they end at {end}")
    report.facts |= {"log_bytes_identical": compared, "queue_units_identical": units}
    report.print(f"    {all_nodes} logs are identical, byte for byte: {compared:,} bytes")
    events = 3 * rows  # a send, its reply and its record
    with progress_bar(visible=not report.quiet) as progress:
        task = progress.add_task("    history", total=events, note="")
        prove_history(
            history_of(report),
            first.store,
            rows,
            kills,
            lambda done: progress.update(task, completed=done),
        )
    report.facts["history"] = str(history_of(report))
    report.print(
        f"    {all_nodes} nodes have all {rows:,} acknowledged messages exactly once, unchanged"
        " and in order"
    )


def query_with_spark(report: DemoReport, node: DemoNode, what: str, rows: int) -> None:
    """Read the topic from a node with Spark, over its API, like a job on another machine."""
    report.step(5, f"Read the topic from {what} with Spark and check it against the CSV")
    from hastore.demo.spark import compare_with_spark  # here: it needs pyspark, an extra

    plot = report.folder / "delays.png"
    with stderr.status("    Spark is starting and reading ..."):
        messages = compare_with_spark(node.api, TOPIC, read_delays(rows), plot, report.print)
    report.facts |= {"spark_messages": messages, "plot": str(plot)}
    report.print(f"    {messages:,} flights; all sums equal those of the CSV; the plot is {plot}")


def print_next_steps(report: DemoReport, nodes: Sequence[DemoNode], starts: Sequence[str]) -> None:
    """Print the commands with which the stores can be explored; `starts` are those of the nodes."""
    report.step(6, "Done; nothing is left running")
    kept = "" if report.kept else ", until the next demo replaces them"
    report.print(f"    The stores stay in {report.folder}{kept}. To explore them:")
    to = ",".join(node.api for node in nodes)
    for line in (
        f"{program('hastore')} log stat --store {nodes[0].store}",
        f"{program('hastore')} check {history_of(report)} --store {nodes[0].store}",
        *(f"{start} &" for start in starts),
        f"{program('hastore')} status --wait 30 --bootstrap {to}",
        f"{program('hastore')} query --topic {TOPIC} --key UA-1545 --bootstrap {to}",
    ):
        report.print(f"      {line}")


def _wait_until_equal(nodes: Sequence[DemoNode]) -> int:
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
