"""Write the changes of a compaction to a topic, each once, however often the job is killed.

The changes are in files that the commit of the run has fixed. Each file is one task of one write,
in the order of the commit, and the write's name is fixed too. So the sink finds out, after a kill,
which rows are stored already.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from hastore.client import Admin
from hastore.client.connections.addresses import parse_bootstrap
from hastore.errors import UsageError
from hastore.pipeline.progress import Progress
from hastore.pipeline.running import run_action
from hastore.pipeline.target import Target, spark_path
from hastore.pipeline.where import servers_option

COLUMNS = ("key", "value", "headers", "tags")
_ONE_TASK = {
    "spark.sql.files.minPartitionNum": "1",  # with the next: a file is never divided
    "spark.sql.files.maxPartitionBytes": str(2**62),
}


@dataclass(frozen=True)
class Destination:
    """A topic, and the nodes of its group."""

    topic: str
    servers: str


def check_new(destination: Destination) -> None:
    """Raise UsageError if the topic has messages already."""
    with Admin(parse_bootstrap(destination.servers.split(","))) as admin:
        queues = admin.topics().get(destination.topic, {})
    if any(end > 0 for _, end in queues.values()):
        raise UsageError(
            f"the topic {destination.topic!r} has messages already; name a new topic for the "
            "compacted messages"
        )


def publish(
    spark: SparkSession, target: Target, destination: Destination, ddl: str, progress: Progress
) -> int:
    """Write the changes that the last commit left, and commit that; return the messages written."""
    waiting: dict[str, Any] | None = target.state.get("changes")
    if not waiting or not waiting["files"]:
        return 0
    names: Sequence[str] = waiting["files"]
    before = {name: spark.conf.get(name, None) for name in _ONE_TASK}
    for name, value in _ONE_TASK.items():
        spark.conf.set(name, value)
    try:
        frames = [spark.read.schema(ddl).parquet(spark_path(target.path / name)) for name in names]
        frame = functools.reduce(DataFrame.unionByName, frames).select(*COLUMNS)
        writer = (
            frame.write.format("hastore")
            .mode("append")
            .options(**servers_option(destination.servers))
            .option("topic", destination.topic)
            .option("writeId", waiting["write"])
        )
        run_action(spark, "publish", writer.save, progress)
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
    target.commit({**target.state, "changes": None}, [], removed=names)
    return int(waiting["rows"])
