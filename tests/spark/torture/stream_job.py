"""A query from hastore to Parquet files, as a process that test_stream_kills kills.

    python stream_job.py FOLDER       FOLDER/options.json has the options of the source

It prints "running" when a query runs, and starts the query again if it fails. Once it reads
"finish" from stdin, it reads what is left, writes FOLDER/rows.json and prints "done".
"""

import json
import pathlib
import sys
import threading

from pyspark.errors import StreamingQueryException

from hastore.spark.session import end_session, local_session
from tests.spark.quick import QUICK

ATTEMPTS = 5


def start(spark, folder, **trigger):
    options = json.loads((folder / "options.json").read_text())
    frame = spark.readStream.format("hastore").options(**options).load()
    writer = (
        frame.select("partition", "offset", "value")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("path", str(folder / "rows"))
    )
    return (writer.trigger(**trigger) if trigger else writer).start()


def say(text):
    print(text, flush=True)


def follow(spark, folder, finish):
    """Run the query, again and again, until `finish` is set."""
    while not finish.is_set():
        query = start(spark, folder)
        say("running")
        while query.isActive and not finish.wait(0.05):
            pass
        if query.isActive:
            query.stop()
        failure = query.exception()
        if failure is not None:
            say(f"failed: {str(failure).splitlines()[0]}")


def read_all(spark, folder):
    """Run the query until it has read all that is there; a busy machine may fail a run."""
    for attempt in range(ATTEMPTS):
        try:
            start(spark, folder, availableNow=True).awaitTermination()
            return
        except StreamingQueryException as failure:
            say(f"failed: {str(failure).splitlines()[0]}")
            if attempt == ATTEMPTS - 1:
                raise


def main(folder):
    finish = threading.Event()
    threading.Thread(
        target=lambda: (sys.stdin.readline(), finish.set()), daemon=True, name="stdin"
    ).start()
    # A task whose worker is killed is tried again.
    spark = local_session("stream kills", master="local[2,4]", memory="512m", settings=QUICK)
    try:
        follow(spark, folder, finish)
        read_all(spark, folder)
        rows = spark.read.parquet(str(folder / "rows")).collect()
        found = sorted((row.partition, row.offset, bytes(row.value).decode()) for row in rows)
        (folder / "rows.json").write_text(json.dumps(found))
        say("done")
    finally:
        end_session(spark)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
