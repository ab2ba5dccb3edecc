"""The job that test_sink_kills.py kills: lines of text files to a topic, as a stream.

    sink_job.py SERVERS FOLDER

It reads FOLDER/input, keeps its checkpoint in FOLDER/checkpoint, and says each finished batch on
stdout. It ends with code 0 when FOLDER/end exists and all lines are written.
"""

import pathlib
import sys
import time

from hastore.spark.session import local_session
from tests.spark.quick import QUICK


def main(servers, folder):
    # Each task is tried four times: a killed Python worker fails its task, not the query.
    spark = local_session("sink job", master="local[2,4]", memory="512m", settings=QUICK)
    lines = spark.readStream.option("maxFilesPerTrigger", "3").text(f"{folder}/input")
    # Two tasks a batch or more, and an order that each attempt repeats.
    rows = lines.selectExpr(
        "value",
        "split(value, ':')[0] AS key",
        "array(struct('line' AS key, CAST(split(value, ':')[1] AS BINARY) AS value)) AS headers",
    )
    query = (
        rows.writeStream.format("hastore")
        .option("hastore.bootstrap.servers", servers)
        .option("topic", "t")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )
    said = -1
    while True:
        ending = (pathlib.Path(folder) / "end").exists()
        if ending:
            query.processAllAvailable()
        elif query.exception() is not None:
            raise query.exception()
        progress = query.lastProgress
        if progress is not None and progress["batchId"] > said:
            said = progress["batchId"]
            print("batch", said, flush=True)
        if ending:
            query.stop()
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
