"""The job `stats` on a real session: the figures equal those computed from the messages singly."""

import json
import math
import random
import statistics

import pyarrow.parquet as pq
import pytest

from hastore.errors import HastoreError, UsageError
from hastore.pipeline.stats import StatsOptions, by_bucket, check_stats, grouped, run_stats
from hastore.pipeline.where import Where
from tests.spark.read import test_inner_batches as inner
from tests.spark.stores import write_store

START_MS = 1_795_000_000_000
MINUTE_MS = 60_000


def messages(seed, count):
    chance = random.Random(seed)
    print(f"seed {seed}")
    stored = START_MS
    found = []
    for number in range(count):
        stored += chance.randrange(400)
        latency = round(chance.lognormvariate(3, 2)) - 20 * chance.randrange(2)
        fields = {
            "body": bytes(chance.randrange(200)),
            "store_timestamp_ms": stored,
            "born_timestamp_ms": stored - latency,
        }
        found.append((chance.choice(["a", "b"]), number % 3, fields))
    return found


def latencies(records):
    return sorted(one.store_timestamp_ms - one.born_timestamp_ms for one in records)


def assert_figures(row, records):
    found = latencies(records)
    assert row["messages"] == len(records)
    assert row["bytes"] == sum(one.size for one in records)
    assert (row["latency_min_ms"], row["latency_max_ms"]) == (found[0], found[-1])
    assert math.isclose(row["latency_mean_ms"], statistics.fmean(found))
    assert row["negative_latencies"] == sum(latency < 0 for latency in found)
    for share in (50, 90, 99):
        place = (len(found) - 1) * share / 100
        low, high = found[math.floor(place)], found[math.ceil(place)]
        exact = low + (high - low) * (place - math.floor(place))
        assert abs(row[f"latency_p{share}_ms"] - exact) <= 0.008 * max(abs(low), abs(high)) + 0.5


# May take long where it is the first to shuffle: the JVM loads and compiles its classes then.
@pytest.mark.full
def test_figures_parquet_and_plots(spark, tmp_path):
    store = tmp_path / "store"
    records = write_store(store, messages(5, 2_000))
    target, plots = tmp_path / "minutes", tmp_path / "plots"
    options = StatsOptions(parquet=str(target), plots=str(plots), last_minutes=3)
    summary = run_stats(spark, Where(str(store)), options)
    json.dumps(summary.topics + summary.minutes)
    assert sum(row["messages"] for row in summary.topics) == 2_000
    for row in summary.topics:
        assert_figures(row, [one for one in records if one.topic == row["topic"]])
    table = pq.read_table(target).to_pylist()
    groups = {}
    for one in records:
        minute = one.store_timestamp_ms - one.store_timestamp_ms % MINUTE_MS
        groups.setdefault((minute, one.topic), []).append(one)
    moments = [(round(row["minute"].timestamp() * 1000), row["topic"]) for row in table]
    assert moments == sorted(groups)
    for key, row in zip(moments, table, strict=True):
        assert_figures(row, groups[key])
    assert len(summary.minutes) == 3
    assert summary.minutes[-1]["messages"] == table[-1]["messages"]
    assert sorted(path.name for path in plots.iterdir()) == ["latency.png", "throughput.png"]
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []
    with pytest.raises(UsageError, match="minutes exists; give a folder that does not"):
        run_stats(spark, Where(str(store)), options)


def test_a_sum_of_latencies_beyond_64_bits_is_no_error(spark):
    frame = spark.range(2_000).selectExpr(
        "'t' AS topic",
        "timestamp_millis(9000000000000000) AS timestamp",
        "timestamp_millis(-9000000000000000) AS bornTimestamp",
        "1 AS size",
    )
    (row,) = grouped(by_bucket(frame), "topic").collect()
    assert row["messages"] == 2_000
    assert math.isclose(row["latency_mean_ms"], 18e15)


@pytest.mark.full
def test_times_that_are_no_dates(spark, tmp_path):
    absurd = [2**62, -(2**62), 253_402_300_800_000, -(2**63) // 1000 + 1]
    written = [("absurd", at) for at in absurd]
    written += [("t", START_MS), ("t", START_MS + MINUTE_MS)]
    write_store(
        tmp_path / "store",
        [
            (topic, 0, {"body": b"", "store_timestamp_ms": at, "born_timestamp_ms": at})
            for topic, at in written
        ],
    )
    store, options = str(tmp_path / "store"), StatsOptions(plots=str(tmp_path / "plots"))
    summary = run_stats(spark, Where(store), options)
    assert [row["messages"] for row in summary.topics] == [4, 2]
    assert (len(summary.plots), summary.not_plotted) == (2, 4)
    minutes = [row["minute"] for row in summary.minutes]
    assert (minutes[0], minutes[-1]) == ("-9223372036854775 ms", "9223372036800000 ms")
    assert minutes[1:3] == ["2026-11-18T11:06Z", "2026-11-18T11:07Z"]
    summary = run_stats(spark, Where(store, topics=("absurd",)), options)
    assert (summary.plots, summary.not_plotted) == ([], 4)


def test_times_topics_and_wrong_input(spark, tmp_path):
    store = tmp_path / "store"
    records = write_store(store, messages(6, 500))
    middle = records[250].store_timestamp_ms
    options = StatsOptions(since=str(middle), last_minutes=0)
    summary = run_stats(spark, Where(str(store), topics=("b",)), options)
    wanted = [one for one in records if one.topic == "b" and one.store_timestamp_ms >= middle]
    (row,) = summary.topics
    assert_figures(row, wanted)
    assert summary.minutes == []
    with pytest.raises(HastoreError, match="nowhere"):
        run_stats(spark, Where(str(store), topics=("nowhere",)), StatsOptions())
    with pytest.raises(HastoreError, match="is no store"):
        run_stats(spark, Where(str(tmp_path)), StatsOptions(parquet=str(tmp_path / "minutes")))
    assert not (tmp_path / "minutes").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file; give a folder"):
        run_stats(spark, Where(str(store)), StatsOptions(plots=str(tmp_path / "file")))
    with pytest.raises(UsageError, match="the folder cannot be made"):
        check_stats(Where(str(store)), StatsOptions(plots=str(tmp_path / "file" / "plots")))
    with pytest.raises(UsageError, match="--sample needs --servers"):
        run_stats(spark, Where(str(store)), StatsOptions(sample_s=2))


@pytest.mark.full  # as above; that each is a row, tests/spark/read/test_inner_batches.py shows
def test_each_message_of_an_inner_batch_counts_as_large_as_it_would_be_alone(spark, tmp_path):
    inner.write(tmp_path, inner.records())
    (row,) = run_stats(spark, Where(str(tmp_path)), StatsOptions()).topics
    alone = inner.read(tmp_path, 0, inner.END)
    assert (row["messages"], row["bytes"]) == (inner.END, sum(one["size"] for one in alone))
