"""`hastore demo`: run a pair on real data, kill its master, prove that nothing was lost.

    1 start a master and a slave      4 wait for both, prove that nothing was lost
    2 produce the flights             5 query with Spark, compare with the CSV
    3 kill, flip, rejoin half-way     6 leave nothing running

Steps 2 and 3 overlap: the producer goes on in its own thread while its master is killed. A failed
proof ends the command with exit code 1.
"""

import pathlib
import signal
import tempfile
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import click
from rich.table import Table

from hastore.cli.asking import ask_status
from hastore.cli.common import (
    DONE,
    WRONG,
    print_error,
    print_json,
    program,
    progress_bar,
    stderr,
    stdout,
    with_json,
)
from hastore.cli.flip import promote
from hastore.config.file import edit_role
from hastore.config.model import Role
from hastore.demo.data import count_rows, read_delays, read_flights
from hastore.demo.nodes import Node, make_pair
from hastore.demo.produce import FlightProducer
from hastore.demo.proof import (
    ProofError,
    count_archived,
    prove_exactly_once,
    prove_identical_logs,
    prove_identical_queues,
)
from hastore.demo.requirements import LOG_FILE_BYTES, missing_requirements
from hastore.demo.spark_check import compare_with_spark
from hastore.errors import HastoreError

TOPIC = "flights"
SYNC_TIMEOUT_S = 60.0


@dataclass(slots=True)
class DemoReport:
    """Hold the results of the demo, which `--json` prints, and print the progress."""

    folder: pathlib.Path
    quiet: bool
    facts: dict[str, Any] = field(default_factory=dict)

    def print(self, text: str | Table) -> None:
        """Print a line, or a table, of progress."""
        (stderr if self.quiet else stdout).print(text, highlight=False, soft_wrap=True)

    def step(self, number: int, text: str) -> None:
        """Print the title of a step."""
        self.print(f"\n[bold]{number}/6[/bold] {text}")


def run_demo(rows: int, folder: pathlib.Path, *, with_spark: bool, quiet: bool) -> DemoReport:
    """Run all steps in `folder`; raises ProofError or the failed step's error.

    Both nodes are stopped when this returns or raises.
    """
    report = DemoReport(folder, quiet)
    master, slave = make_pair(folder, f"{LOG_FILE_BYTES}B")
    try:
        report.step(1, f"Start a SYNC_MASTER and a slave on loopback; stores are in {folder}")
        _start(report, master, slave)
        report.step(2, f"Send {rows:,} flights; each is acknowledged once the slave has it too")
        producer = FlightProducer([master.api, slave.api], TOPIC, read_flights(rows), rows)
        _produce_and_flip(report, producer, master, slave, rows)
        report.step(4, "Wait until both nodes have everything, and prove that nothing was lost")
        end = _wait_in_sync(slave, master)
        _prove(report, producer, master, slave, rows, end)
        if with_spark:
            report.step(5, "Read the topic from the slave with Spark and check it against the CSV")
            plot = folder / "delays.png"
            # Node 1 is the slave now. Spark reads over its API, like a job on another machine.
            with stderr.status("    Spark is starting and reading ..."):
                messages = compare_with_spark(
                    master.api, TOPIC, read_delays(rows), plot, report.print
                )
            report.facts |= {"spark_messages": messages, "plot": str(plot)}
            report.print(
                f"    {messages:,} flights; all sums equal those of the CSV; the plot is {plot}"
            )
        else:
            report.step(5, "Spark is left out (--no-spark)")
    finally:
        for node in (slave, master):
            node.stop()
    _print_next_steps(report, master, slave)
    return report


def _start(report: DemoReport, master: Node, slave: Node) -> None:
    master.start("master")
    slave.start("slave")
    for node in (master, slave):
        ready = node.wait_ready()
        report.print(f"    node {ready['node']}: {ready['role']} at {ready['api']}")


def _produce_and_flip(
    report: DemoReport, producer: FlightProducer, master: Node, slave: Node, rows: int
) -> None:
    half = rows // 2
    with progress_bar(visible=not report.quiet) as progress:
        task = progress.add_task("    flights", total=rows, note="")

        def show(count: int) -> None:
            progress.update(task, completed=count)

        began = time.monotonic()
        producer.start()
        producer.wait_for(half, show)
        report.step(3, f"Half-way: kill the master (SIGKILL) and promote node {slave.number}")
        killed = time.monotonic()
        master.kill()
        status = promote(slave.config, Role.SYNC_MASTER)
        open_s = time.monotonic() - killed
        report.print(
            f"    node {slave.number} is {status['role']} of epoch {status['epoch']} after "
            f"{open_s:.2f} s; a synchronous put needs a slave, so the old master rejoins as one"
        )
        edit_role(master.config, Role.SLAVE)  # while the node is down
        master.start("slave")
        master.wait_ready()
        rejoined_s = time.monotonic() - killed
        producer.wait_for(rows, show)
        producer.join()
        seconds = time.monotonic() - began
    if producer.failure is not None:
        raise producer.failure
    records, size = count_archived(master.store)
    silence = producer.silence
    report.facts |= {
        "messages": rows,
        "seconds": round(seconds, 3),
        "msgs_per_s": round(rows / seconds, 1),
        "levels": producer.levels,
        "flip": {
            "seconds_to_open": round(open_s, 3),
            "seconds_to_rejoin": round(rejoined_s, 3),
            "seconds_without_acknowledgement": round(silence.seconds, 3),
            "records_archived": records,
            "bytes_archived": size,
        },
    }
    report.print(f"    {rows:,} acknowledged in {seconds:.1f} s, {rows / seconds:,.0f} a second")
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


def _prove(
    report: DemoReport, producer: FlightProducer, old: Node, new: Node, rows: int, end: int
) -> None:
    with progress_bar(visible=not report.quiet) as progress:
        for node in (old, new):
            task = progress.add_task(f"    node {node.number}", total=rows, note="")
            count = prove_exactly_once(
                node.store,
                TOPIC,
                producer.acknowledged,
                lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
            )
            if count != rows:
                raise ProofError(f"node {node.number} has {count} messages, {rows} were sent")
    report.print(f"    both nodes have all {rows:,} acknowledged messages exactly once, unchanged")
    compared = prove_identical_logs(old.store, new.store)
    units = prove_identical_queues(old.store, new.store, TOPIC)
    if compared != end:
        raise ProofError(f"{compared} bytes of the logs were compared, they end at {end}")
    report.facts |= {"log_bytes_identical": compared, "queue_units_identical": units}
    report.print(f"    both logs are identical, byte for byte: {compared:,} bytes")


def _print_next_steps(report: DemoReport, old: Node, new: Node) -> None:
    report.step(6, "Done; nothing is left running")
    report.print(f"    The stores stay in {report.folder}. To explore them:")
    for line in (
        f"{program('hastore')} log stat --store {old.store}",
        f"{program('hastore-master')} -c {new.config} &",
        f"{program('hastore-slave')} -c {old.config} &",
        f"{program('hastore')} status --wait 30 --bootstrap {new.api},{old.api}",
        f"{program('hastore')} query --topic {TOPIC} --key UA-1545 --bootstrap {new.api}",
    ):
        report.print(f"      {line}")


def _stop_by_exception(number: int, _frame: FrameType | None) -> NoReturn:
    raise HastoreError(f"the demo was stopped by {signal.Signals(number).name}")


@click.command("demo", short_help="Run a pair on real data, with a flip.")
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="FRACTION",
    help="The fraction of the 336,776 flights to send.",
)
@click.option("--no-spark", is_flag=True, help="Leave out the Spark step.")
@click.option(
    "--folder", metavar="DIR", help="Put the stores here (default: a new temporary folder)."
)
@with_json
def demo_command(scale: float, no_spark: bool, folder: str | None, as_json: bool) -> int:
    """Run a pair of nodes on real data, kill the master, flip, prove that nothing was lost, and
    query the data with Spark.

    Requirements are checked before anything is started: exit code 2 when one is missing.
    """
    rows = count_rows(scale)
    wanted = pathlib.Path(folder or tempfile.gettempdir()).absolute()
    missing = list(missing_requirements(wanted, rows, with_spark=not no_spark))
    for text in missing:
        print_error(text)
    if missing:
        return WRONG
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop_by_exception)
    place = wanted if folder else pathlib.Path(tempfile.mkdtemp(prefix="hastore-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    report = run_demo(rows, place, with_spark=not no_spark, quiet=as_json)
    if as_json:
        print_json({"folder": str(place)} | report.facts)
    return DONE
