"""Counts, sums and latency percentiles of messages, by topic and minute, as Spark aggregates.

The latency of a message is its store time minus its born time, in ms. It includes the difference
between the clocks of producer and master, so it can be negative. Percentiles come from a histogram
whose bounds are the same everywhere, so that partial results can be merged: values up to 127 ms are
exact, and a larger one is rounded to the middle of a bucket, 0.8 % away at most.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

MINUTE_MS = 60_000
TIMESTAMP_MAX_MS = (2**63 - 1) // 1000  # the source's times are not farther from 1970
SOURCE_SCHEMA = "topic string, timestamp timestamp, bornTimestamp timestamp, size int"
OTHERS = "other topics"
_EXACT = 128  # latencies below it have buckets of their own
_BITS = 6  # larger ones share a bucket if their 7 leading binary digits are the same
_PERCENTILES = (0.5, 0.9, 0.99)


def by_bucket(messages: DataFrame) -> DataFrame:
    """Return the messages, with the columns of SOURCE_SCHEMA, by topic, minute and bucket."""
    stored = F.unix_millis("timestamp")
    latency = stored - F.unix_millis("bornTimestamp")
    rows = messages.select(
        "topic",
        (stored - F.pmod(stored, F.lit(MINUTE_MS))).alias("minute_ms"),
        latency.alias("latency"),
        "size",
    )
    return (
        rows.withColumn("bucket", _bucket(F.col("latency")))
        .groupBy("topic", "minute_ms", "bucket")
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum("size").alias("bytes"),
            F.min("latency").alias("lowest"),
            F.max("latency").alias("highest"),
            # As whole numbers, the sum of some million born times of 0 would be an error.
            F.sum(F.col("latency").cast("double")).alias("total"),
            F.count_if(F.col("latency") < 0).alias("negative"),
        )
    )


def _bucket(latency: Column) -> Column:
    """Return the middle of the bucket of a latency."""
    size = F.abs(latency)
    width = F.expr(f"shiftleft(1L, cast(floor(log2(abs(latency))) as int) - {_BITS})")
    middle = F.floor(size / width) * width + F.floor(width / 2)
    return F.when(size < _EXACT, latency).otherwise(F.signum(latency) * middle).cast("double")


def grouped(buckets: DataFrame, *columns: Column | str) -> DataFrame:
    """Merge the buckets into one row for each value of `columns`."""
    percentiles = F.percentile("bucket", list(_PERCENTILES), F.col("messages"))
    merged = buckets.groupBy(*columns).agg(
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.min("lowest").alias("latency_min_ms"),
        (F.sum("total") / F.sum("messages")).alias("latency_mean_ms"),
        percentiles.alias("percentiles"),
        F.max("highest").alias("latency_max_ms"),
        F.sum("negative").alias("negative_latencies"),
        F.min("minute_ms").alias("first_ms"),
        F.max("minute_ms").alias("last_ms"),
    )
    for number, share in enumerate(_PERCENTILES):
        name = f"latency_p{share * 100:g}_ms"
        value = F.greatest(F.col("percentiles")[number], F.col("latency_min_ms"))
        merged = merged.withColumn(name, F.least(value, F.col("latency_max_ms")))
    return merged.drop("percentiles")


def minutes(buckets: DataFrame) -> DataFrame:
    """Return a row for each topic and minute, ordered, as the Parquet file has them."""
    table = grouped(buckets, "topic", "minute_ms")
    # The minute of the least time that a timestamp can hold begins before it.
    minute = F.greatest("minute_ms", F.lit(-TIMESTAMP_MAX_MS))
    return table.select(
        "topic",
        F.timestamp_millis(minute).alias("minute"),
        *("messages", "bytes", "latency_min_ms", "latency_mean_ms", "latency_p50_ms"),
        *("latency_p90_ms", "latency_p99_ms", "latency_max_ms", "negative_latencies"),
    ).orderBy("minute", "topic")


def bins(buckets: DataFrame, topics: list[str], width_ms: int) -> DataFrame:
    """Return a row for each topic and interval of `width_ms`, other topics added up."""
    topic = F.when(F.col("topic").isin(topics), F.col("topic")).otherwise(OTHERS)
    start = F.col("minute_ms") - F.pmod(F.col("minute_ms"), F.lit(width_ms))
    return grouped(
        buckets.withColumn("topic", topic).withColumn("bin_ms", start), "topic", "bin_ms"
    ).orderBy("bin_ms", "topic")
