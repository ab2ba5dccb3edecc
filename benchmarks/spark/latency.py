"""Micro-batches of one row: a stream of a topic that gets a message a second, and Spark's `rate`.

Both queries run at the same time, with the default trigger. A sample is the whole duration of a
batch that had one row, as Spark reports it (triggerExecution).
"""

import pathlib
import statistics
import time
from typing import Any

from benchmarks.common import Group, at_most, figure, say
from benchmarks.spark.data import TOPIC, Messages
from hastore.client import Producer

ROWS_A_ROUND = 9  # at one row a second
LIMIT_S = 60.0


def one_row_ms(query: Any) -> list[float]:
    """Return the durations of the query's batches of one row, ms."""
    return [
        float(one["durationMs"]["triggerExecution"])
        for one in query.recentProgress
        if one["numInputRows"] == 1
    ]


def measure(
    spark: Any, folder: pathlib.Path, messages: Messages, repeats: int, _missing: str | None
) -> list[dict[str, Any]]:
    """Measure the p50 of each round."""
    body, queries = bytes(messages.body_bytes), []
    need = (repeats + 1) * ROWS_A_ROUND
    with Group(folder, 2, role="SYNC_MASTER") as group, Producer(group.bootstrap) as producer:
        group.start()
        producer.send(TOPIC, body)  # creates the topic
        ours = spark.readStream.format("hastore").option("path", str(group[2].store))
        theirs = spark.readStream.format("rate").option("rowsPerSecond", "1")
        try:
            for name, source in (("hastore", ours.option("subscribe", TOPIC)), ("rate", theirs)):
                sink = source.load().writeStream.format("noop")
                queries.append(sink.option("checkpointLocation", str(folder / name)).start())

            def done() -> bool:
                for query in queries:
                    if query.exception() is not None:
                        raise RuntimeError(f"a query ended: {query.exception()}")
                return all(len(one_row_ms(query)) >= need for query in queries)

            due = time.monotonic()
            deadline = due + 3 * need + LIMIT_S
            while not done():
                if time.monotonic() > deadline:
                    raise TimeoutError("the queries did not get a row a second")
                producer.send(TOPIC, body)
                due = max(due + 1.0, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
        finally:
            for query in queries:
                query.stop()
        taken = [one_row_ms(query)[:need] for query in queries]
    medians = [
        [statistics.median(each[at : at + ROWS_A_ROUND])
         for at in range(ROWS_A_ROUND, need, ROWS_A_ROUND)]  # the first round warms up
        for each in taken
    ]  # fmt: skip
    say(f"latency: {[statistics.median(each) for each in medians]} ms")
    return [
        figure("micro-batch of one row, p50", "ms", medians[0], "the rate source", medians[1],
               at_most(1.2))
    ]  # fmt: skip
