"""A driver on a cluster: read a store while an executor is killed, write to nodes, read them."""

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import hastore.spark

store, nodes, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def wait_for_the_kill(batches):
    """Let one task name its executor, and wait in mid-range until that executor has ended."""
    import os
    import time

    from pyspark import TaskContext

    context = TaskContext.get()
    for number, batch in enumerate(batches):
        if number == 1 and context.partitionId() == 5 and context.attemptNumber() == 0:
            worker = Path("/proc", str(os.getppid()), "stat").read_text()  # pyspark.daemon
            executor = worker.rpartition(")")[2].split()[1]
            (folder / "executor.part").write_text(executor)
            (folder / "executor.part").rename(folder / "executor")
            while Path("/proc", executor).exists():
                time.sleep(0.05)
            os._exit(1)
        yield batch


spark = SparkSession.builder.appName("cluster").getOrCreate()
hastore.spark.register(spark, python=sys.executable)
print("master", spark.sparkContext.master.split(":")[0])
rows = spark.read.format("hastore").load(store, subscribe="t", maxRecordsPerPartition="2500")
summary = [
    F.count("*"),
    F.count_distinct("partition", "offset"),
    F.sum("offset"),
    F.sum(F.crc32("value")),
]
slow = rows.mapInArrow(wait_for_the_kill, rows.schema)
print("killed", *slow.agg(*summary).first())
print("whole", *rows.agg(*summary).first())
written = rows.where("partition = 0").withColumn("topic", F.lit("copy"))
written.select("topic", "key", "value", "partition").write.format("hastore").mode("append").options(
    **{"hastore.bootstrap.servers": nodes}
).save()
copy = hastore.spark.read_topic(spark, "copy", servers=nodes, options={"minPartitions": "4"})
print("copy", *copy.agg(*summary).first())
spark.stop()
