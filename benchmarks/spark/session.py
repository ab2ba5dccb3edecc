"""One Spark session for all sides, and the CPU time of all its processes."""

import os
import pathlib
from typing import Any

from benchmarks.common import Cost
from benchmarks.maven import NoPeer, class_path
from hastore.spark.session import local_session

MASTER = "local[2]"
MEMORY = "2g"
VALUE = "value binary"


def start() -> tuple[Any, str | None]:
    """Start a session; also return why Spark's Kafka connector is missing, or None."""
    settings, missing = {}, None
    try:
        settings["spark.driver.extraClassPath"] = class_path("sparkkafka")
    except NoPeer as reason:
        missing = str(reason)
    spark = local_session("bench-spark", master=MASTER, memory=MEMORY, settings=settings)
    return spark, missing


def digest(rows: Any) -> tuple[int, int, int]:
    """Return the count of rows, the bytes of `value` and the sum of its CRCs."""
    one = rows.selectExpr("count(*)", "sum(length(value))", "sum(crc32(value))").first()
    return int(one[0]), int(one[1]), int(one[2])


def consume(rows: Any) -> None:
    """Make Spark compute every column of every row, and drop them."""
    rows.write.format("noop").mode("overwrite").save()


def session_cost(spark: Any) -> dict[str, Cost]:
    """Return what the JVM and the Python workers below it have used."""
    return {"Spark": tree_cost(spark.sparkContext._gateway.proc.pid)}


def tree_cost(root: int) -> Cost:
    """Return what a process and all below it have used, with those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended; its parent counts it
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    used = sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")
    own = Cost.of(root)
    return Cost(used, own.resident_mib, own.anonymous_mib)
