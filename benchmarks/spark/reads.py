"""Batch reads and one streaming batch, beside Spark's Kafka connector, Parquet and bare batches.

The bare batches are those that the tasks of the batch read yield, ready made: what Spark itself
costs (bare_source.py). Reads from servers and the stream are compared with the batch read. Every
read ends in the sink `noop`, so Spark computes all columns of all rows. The time is that of
`load()` and of the query, with Spark's planning; for a stream, that of its batch as Spark reports
it (triggerExecution). Before the rounds each side's rows are counted and
their bodies compared by CRC.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql.types import StructType

from benchmarks.common import Group, Target, at_least, at_most, figure, say
from benchmarks.kafka import KafkaPair
from benchmarks.side_by_side import OURS, Costs, Row, run_rounds, start_peer
from benchmarks.spark import bare_source
from benchmarks.spark.data import FILE_BYTES, TOPIC, Messages, write_parquet, write_store
from benchmarks.spark.session import consume, digest, session_cost
from hastore.spark.arrow.schema import source_schema
from hastore.spark.source import HastoreDataSource

KAFKA, PARQUET, SERVERS, STREAM = "Kafka", "Parquet", "servers", "stream"
BARE = "bare batches"
LABELS = {
    KAFKA: "Spark's Kafka connector",
    PARQUET: "the same rows in Parquet",
    BARE: "a bare source of the same batches",
}
ALL, VALUE = "7 columns", "value only"
IN_SYNC_S = 300.0
STREAM_ROWS = 600_000.0  # rows/s: with these a stream may be slower than 0.8 of the batch read
RATES: dict[tuple[str, str, int], Target] = {
    (KAFKA, ALL, 1024): at_least(4.0),
    (KAFKA, ALL, 200): at_least(4.0),
    (KAFKA, VALUE, 1024): at_least(5.0),
    (KAFKA, VALUE, 200): at_least(6.0),
    (PARQUET, VALUE, 1024): at_least(1.2),
    (PARQUET, ALL, 1024): at_least(0.9),
    **{(BARE, columns, size): at_least(0.8) for columns in (ALL, VALUE) for size in (200, 1024)},
}
CPU = {1024: at_most(1 / 3), 200: at_most(0.5)}
SCHEMA = source_schema(include_headers=False, include_metadata=False)
VALUE_SCHEMA = StructType([SCHEMA["value"]])
SCHEMAS = {ALL: SCHEMA, VALUE: VALUE_SCHEMA}


@dataclasses.dataclass
class Sides:
    """Where each side's rows are, in one Spark session."""

    spark: Any
    messages: Messages
    folder: pathlib.Path
    path: pathlib.Path
    hosts: list[str]
    kafka: KafkaPair | None
    parquet: pathlib.Path
    bare: Mapping[str, pathlib.Path]  # by the columns
    runs: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)

    def reader(self, source: Any, columns: str) -> Any:
        """Return a reader or stream reader of our format for these columns."""
        ours = source.format("hastore").option("subscribe", TOPIC)
        return ours.schema(VALUE_SCHEMA) if columns == VALUE else ours

    def rows(self, side: str, columns: str) -> Any:
        """Return one side's rows as a DataFrame."""
        read = self.spark.read
        if side == OURS:
            return self.reader(read, columns).option("path", str(self.path)).load()
        if side == SERVERS:
            hosts = ",".join(self.hosts)
            return self.reader(read, columns).option("hastore.bootstrap.servers", hosts).load()
        if side == KAFKA:
            assert self.kafka is not None
            servers = read.format("kafka").option("kafka.bootstrap.servers", self.kafka.bootstrap)
            found = servers.option("subscribe", TOPIC).load()
        elif side == BARE:
            bare = read.format(bare_source.FORMAT).schema(SCHEMAS[columns])
            return bare.load(str(self.bare[columns]))
        else:
            found = read.parquet(str(self.parquet))
        return found.select("value") if columns == VALUE else found

    def batch(self, side: str, columns: str, count: int) -> float:
        """Read all rows of one side; return the rows per second."""
        began = time.perf_counter()
        consume(self.rows(side, columns))
        return count / (time.perf_counter() - began)

    def stream(self, columns: str, count: int) -> float:
        """Read all rows by a new query with one batch; return the rows per second of the batch."""
        checkpoint = self.folder / f"checkpoint{next(self.runs)}"
        rows = self.reader(self.spark.readStream, columns).option("path", str(self.path))
        sink = rows.option("startingOffsets", "earliest").load().writeStream.format("noop")
        query = sink.option("checkpointLocation", str(checkpoint))
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        batches = [one for one in running.recentProgress if one["numInputRows"]]
        if [one["numInputRows"] for one in batches] != [count]:
            raise RuntimeError(f"the stream did not read {count} rows in one batch: {batches}")
        return count / float(batches[0]["durationMs"]["triggerExecution"]) * 1_000.0

    def check(self, sides: list[str]) -> None:
        """Raise RuntimeError if a side has other rows."""
        wanted = self.messages.digest()
        for side in sides:
            found = digest(self.rows(side, ALL))
            if found != wanted:
                raise RuntimeError(f"{side} has rows {found} instead of {wanted}")


def measure(
    spark: Any, folder: pathlib.Path, messages: Messages, repeats: int, missing: str | None
) -> list[dict[str, Any]]:
    """Measure the reads of one size of bodies; `missing` says why Kafka's connector cannot run."""
    size = messages.body_bytes
    say(f"spark: {messages.count:,} messages of {size} B to hastore, Kafka and Parquet")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(
            Group(folder, 2, role="SYNC_MASTER", store={"commitlog_file_size": FILE_BYTES})
        )
        write_store(group[1].store, messages)
        group.start(IN_SYNC_S)
        kafka = None
        if missing is None:
            kafka = start_peer(stack, KAFKA, lambda: KafkaPair(folder))
        else:
            say(f"{KAFKA} is left out: {missing}")
        if kafka is not None:
            kafka.add_topic(TOPIC)
            kafka.fill(TOPIC, messages)
        path = group[2].store
        write_parquet(spark, path, folder / "parquet")
        bare = write_bare(spark, path, folder)
        hosts = [host.removeprefix("tcp://") for host in group.bootstrap]
        sides = Sides(spark, messages, folder, path, hosts, kafka, folder / "parquet", bare)
        names = [OURS, *([KAFKA] if kafka is not None else []), PARQUET, BARE, SERVERS]
        sides.check(names)
        costs: dict[str, Costs | None] = dict.fromkeys(
            [*names, STREAM], functools.partial(session_cost, spark)
        )
        costs[SERVERS] = lambda: session_cost(spark) | group.costs()
        if kafka is not None:
            costs[KAFKA] = lambda: session_cost(spark) | kafka.costs()
        rows = [make_row(sides, columns, names) for columns in (ALL, VALUE)]
        run_rounds(rows, costs, repeats, 1.0, functools.partial(tell, rows, repeats))
    return [one for row, columns in zip(rows, (ALL, VALUE), strict=True)
            for one in figures(row, columns, size)]  # fmt: skip


def write_bare(spark: Any, path: pathlib.Path, folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Write the batches of the batch read for the bare source; return a folder for each."""
    spark.dataSource.register(bare_source.BareSource)
    source = HastoreDataSource({"path": str(path), "subscribe": TOPIC})
    found = {ALL: folder / "bare", VALUE: folder / "bare_values"}
    for columns, target in found.items():
        bare_source.prepare(source.reader(SCHEMAS[columns]), target)
    return found


def make_row(sides: Sides, columns: str, names: list[str]) -> Row:
    """Return the loads of all sides for these columns."""
    count = sides.messages.count
    loads: dict[str, tuple[int, Callable[[int], Any]]] = {
        name: (count, functools.partial(sides.batch, name, columns)) for name in names
    }
    loads[STREAM] = count, functools.partial(sides.stream, columns)
    return Row(f"batch read, {columns}", "rows/s", loads, {})


def tell(rows: list[Row], repeats: int, number: int) -> None:
    """Print the samples of a round."""
    for row in rows:
        got = ", ".join(f"{name} {taken[-1] / 1e6:.2f}" for name, taken in row.samples.items())
        say(f"{row.name} {number + 1}/{repeats}: {got} M rows/s")


def figures(row: Row, columns: str, size: int) -> list[dict[str, Any]]:
    """Return the figures of one row: rates, CPU, and what servers and streams cost."""
    out = []
    ours = row.samples[OURS]
    for side in (KAFKA, PARQUET, BARE):
        theirs = row.samples.get(side, [])
        used = {"cpu_us_per_message": cpu_medians(row, OURS)}
        if theirs:
            used["peer_cpu_us_per_message"] = cpu_medians(row, side)
        target = RATES.get((side, columns, size))
        name = f"{row.name}, {size} B"
        out.append(figure(name, row.unit, ours, LABELS[side], theirs, target, **used))
    if columns == ALL:
        cpu, brokers = cpu_us(row, OURS), cpu_us(row, KAFKA)
        name, peer = f"CPU time a row, {columns}, {size} B", "the connector and both brokers"
        out.append(figure(name, "us", cpu, peer, brokers, CPU[size]))
    name = f"from servers, {columns}, {size} B"
    used = {"cpu_us_per_message": cpu_medians(row, SERVERS)}
    out.append(
        figure(name, row.unit, row.samples[SERVERS], "the path", ours, at_least(0.8), **used)
    )
    streamed = row.samples[STREAM]
    name = f"stream, one batch AvailableNow, {columns}, {size} B"
    one = figure(name, row.unit, streamed, "the batch read", ours, at_least(0.8))
    one["met"] = one["met"] or statistics.median(streamed) >= STREAM_ROWS
    return [*out, one]


def cpu_us(row: Row, side: str) -> list[float]:
    """Return the CPU us a row of all processes of a side, for each repeat."""
    each: Mapping[str, list[float]] = row.cpu_us.get(side, {})
    return [sum(used) for used in zip(*each.values(), strict=True)]


def cpu_medians(row: Row, side: str) -> dict[str, float]:
    """Return the median CPU us a row of each process of a side."""
    return {who: round(statistics.median(us), 2) for who, us in row.cpu_us[side].items()}
