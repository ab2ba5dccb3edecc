"""The demo's Spark step: how late are the flights of each carrier, and does the CSV say the same?

pyspark is imported only by the step itself, because the demo also runs without it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from hastore.demo.flights import Delays
from hastore.demo.proof import ProofError
from hastore.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FIELDS = ("carrier", "dep_delay", "arr_delay")


@dataclass(frozen=True, slots=True)
class CarrierDelays:
    """The flights of one carrier.

    Sums are in minutes, over the flights with a known delay; cancelled flights have none.
    """

    carrier: str
    flights: int
    departed: int
    departure_delay_sum: int
    arrived: int
    arrival_delay_sum: int

    @property
    def mean_departure_delay(self) -> float | None:
        """Return the mean in minutes; None when no flight departed."""
        return self.departure_delay_sum / self.departed if self.departed else None

    @property
    def mean_arrival_delay(self) -> float | None:
        """Return the mean in minutes; None when no flight arrived."""
        return self.arrival_delay_sum / self.arrived if self.arrived else None


def read_topic(spark: SparkSession, source: str, topic: str) -> DataFrame:
    """Return the keys and values of a topic, from a store's directory or `tcp://HOST:PORT,...`."""
    where = "hastore.bootstrap.servers" if "://" in source else "path"
    reader = spark.read.format("hastore").schema("key BINARY, value BINARY")
    return reader.option(where, source).option("subscribe", topic).load()


def delays_per_carrier(spark: SparkSession, source: str, topic: str) -> list[CarrierDelays]:
    """Count and sum the delays in `topic` by carrier; each message is one flight as JSON.

    `source` is a store's directory or the nodes' addresses. Messages without a carrier have the
    carrier "".
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    # Read the fields as strings, so that a number with or without quotes gives the same value.
    kind = StructType([StructField(name, StringType()) for name in _FIELDS])
    flight = F.from_json(F.col("value").cast("string"), kind)
    flights = read_topic(spark, source, topic).select(flight.alias("flight"))
    departure = F.expr("try_cast(flight.dep_delay AS DOUBLE)")
    arrival = F.expr("try_cast(flight.arr_delay AS DOUBLE)")
    departure = F.when(~F.isnan(departure), departure)
    arrival = F.when(~F.isnan(arrival), arrival)
    table = (
        flights.groupBy(F.coalesce("flight.carrier", F.lit("")).alias("carrier"))
        .agg(
            F.count(F.lit(1)),
            F.count(departure),
            F.coalesce(F.sum(departure), F.lit(0.0)).cast("bigint"),
            F.count(arrival),
            F.coalesce(F.sum(arrival), F.lit(0.0)).cast("bigint"),
        )
        .orderBy("carrier")
    )
    return [CarrierDelays(*row) for row in table.collect()]


def save_plot(rows: Sequence[CarrierDelays], path: str) -> None:
    """Draw the mean delays per carrier, the largest on top, as a PNG file."""
    from matplotlib.figure import Figure

    shown = sorted(rows, key=lambda row: row.mean_arrival_delay or 0.0)
    names = [f"{row.carrier} ({row.flights:,})" for row in shown]
    figure = Figure(figsize=(9, 0.42 * len(shown) + 1.8), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(shown)))
    for shift, label, colour, values in (
        (0.2, "departure", "#8fb4d9", [row.mean_departure_delay or 0.0 for row in shown]),
        (-0.2, "arrival", "#1f4e79", [row.mean_arrival_delay or 0.0 for row in shown]),
    ):
        axes.barh([place + shift for place in places], values, 0.4, label=label, color=colour)
    axes.set_yticks(places, names)
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_xlabel("mean delay, minutes")
    total = sum(row.flights for row in shown)
    axes.set_title(f"Delays of {total:,} flights per carrier (flights in brackets)")
    axes.legend(loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130, format="png")


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
        import pyspark  # noqa: F401

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
