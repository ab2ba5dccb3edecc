"""The demo's Spark step: compare delays per carrier, read from the slave, with the CSV."""

import pathlib
from collections.abc import Callable

from rich.table import Table

from hastore.demo.data import Delays
from hastore.demo.proof import ProofError
from hastore.errors import UsageError


def compare_with_spark(
    source: str,
    topic: str,
    expected: dict[str, Delays],
    plot: pathlib.Path,
    show: Callable[[Table], None],
) -> int:
    """Query with Spark, show and check the result, draw `plot`; return the number of messages.

    `source` is a node's address or a store's folder. Raises UsageError without Spark or Java, and
    ProofError when a number differs from `expected`.
    """
    try:
        from hastore.demo.spark_report import delays_per_carrier, save_plot
        from hastore.spark.session import end_session, local_session
    except ImportError as missing:
        remedy = "pip install 'hastore[spark,demo]', or skip that step with --no-spark"
        raise UsageError(f"the Spark step needs {missing.name}; {remedy}") from missing
    spark = local_session("hastore demo")
    try:
        rows = delays_per_carrier(spark, source, topic)
    finally:
        end_session(spark)
    table = Table("carrier", box=None, pad_edge=False)
    for name in ("flights", "mean departure delay, min", "mean arrival delay, min"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: -row.flights):
        departure, arrival = row.mean_departure_delay, row.mean_arrival_delay
        table.add_row(
            row.carrier,
            f"{row.flights:,}",
            "-" if departure is None else f"{departure:.1f}",
            "-" if arrival is None else f"{arrival:.1f}",
        )
    show(table)
    answered = {
        row.carrier: Delays(
            row.flights, row.departed, row.departure_delay_sum, row.arrived, row.arrival_delay_sum
        )
        for row in rows
    }
    for carrier in sorted(expected.keys() | answered.keys()):
        if expected.get(carrier) != answered.get(carrier):
            problem = f"Spark found {answered.get(carrier)}, the CSV has {expected.get(carrier)}"
            raise ProofError(f"carrier {carrier!r}: {problem}")
    save_plot(rows, str(plot))
    return sum(row.flights for row in rows)
