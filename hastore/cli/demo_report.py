"""What both demos share: the report, sending in a thread of its own, the proofs, the Spark step."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from hastore.cli.common import progress_bar, stderr, stdout
from hastore.demo.data import read_delays, read_flights
from hastore.demo.nodes import Node
from hastore.demo.produce import FlightProducer
from hastore.demo.proof import (
    ProofError,
    prove_exactly_once,
    prove_identical_logs,
    prove_identical_queues,
)
from hastore.demo.spark_check import compare_with_spark

TOPIC = "flights"
SYNC_TIMEOUT_S = 60.0
WaitFor = Callable[[int], None]


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


def flight_producer(
    nodes: Sequence[Node], rows: int, group: str | None = None
) -> FlightProducer:
    """Return the producer of the flights; it is not started.

    It gets the nodes' addresses or, with a `group`, that of the group in ZooKeeper.
    """
    addresses = [node.api for node in nodes] if group is None else [group]
    return FlightProducer(addresses, TOPIC, read_flights(rows), rows)


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


def prove_all(
    report: DemoReport, producer: FlightProducer, nodes: Sequence[Node], rows: int, end: int
) -> None:
    """Prove that each node has each acknowledged message exactly once, and that logs and queues are
    the same on all of them; the logs end at `end`. Raises ProofError.
    """
    with progress_bar(visible=not report.quiet) as progress:
        for node in nodes:
            task = progress.add_task(f"    node {node.number}", total=rows, note="")
            count = prove_exactly_once(
                node.store,
                TOPIC,
                producer.acknowledged,
                lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
            )
            if count != rows:
                raise ProofError(f"node {node.number} has {count} messages, {rows} were sent")
    all_nodes = "both" if len(nodes) == 2 else f"all {len(nodes)}"
    report.print(
        f"    {all_nodes} nodes have all {rows:,} acknowledged messages exactly once, unchanged"
    )
    first = nodes[0]
    for other in nodes[1:]:
        compared = prove_identical_logs(first.store, other.store)
        units = prove_identical_queues(first.store, other.store, TOPIC)
        if compared != end:
            raise ProofError(f"{compared} bytes of the logs were compared, they end at {end}")
    report.facts |= {"log_bytes_identical": compared, "queue_units_identical": units}
    report.print(f"    {all_nodes} logs are identical, byte for byte: {compared:,} bytes")


def query_with_spark(report: DemoReport, node: Node, what: str, rows: int) -> None:
    """Read the topic from a node with Spark, over its API, like a job on another machine."""
    report.step(5, f"Read the topic from {what} with Spark and check it against the CSV")
    plot = report.folder / "delays.png"
    with stderr.status("    Spark is starting and reading ..."):
        messages = compare_with_spark(node.api, TOPIC, read_delays(rows), plot, report.print)
    report.facts |= {"spark_messages": messages, "plot": str(plot)}
    report.print(f"    {messages:,} flights; all sums equal those of the CSV; the plot is {plot}")


def leave_spark_out(report: DemoReport) -> None:
    """Say that the Spark step is left out."""
    report.step(5, "Spark is left out (--no-spark)")


def print_next_steps(report: DemoReport, commands: Sequence[str]) -> None:
    """Print the commands with which the stores can be explored."""
    report.step(6, "Done; nothing is left running")
    report.print(f"    The stores stay in {report.folder}. To explore them:")
    for line in commands:
        report.print(f"      {line}")
