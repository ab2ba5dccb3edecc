"""The job `export` on a real session: what the files hold, and what is added by later runs."""

import fcntl
import shutil
from datetime import UTC, datetime

import deltalake
import pandas as pd
import pyarrow.parquet as pq
import pytest

from hastore.errors import CorruptRecordError, PositionLostError, UsageError
from hastore.pipeline.committed import committed_dataset
from hastore.pipeline.delta import DeltaTarget
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.where import Where
from hastore.store.offline.reader import StoreReader
from tests.pipeline.s3 import client, new_target, s3_server
from tests.pipeline.test_iceberg import table_of
from tests.spark.stores import GOLDEN, numbered, write_store

DAY_MS = 24 * 3600 * 1000


def over_days(count, *, topic="t", queues=3, step_ms=DAY_MS // 10):
    """Messages in several queues over `count / 10` days."""
    messages = numbered(count, topic=topic, queues=queues)
    return [
        (topic, queue, {**fields, "store_timestamp_ms": n * step_ms})
        for n, (topic, queue, fields) in enumerate(messages)
    ]


def run(spark, store, target, topics=("t",), **options):
    return export(spark, Where(str(store), topics=topics), str(target), ExportOptions(**options))


def exported(spark, target):
    """Return what Spark reads: (topic, queue, offset) -> (date, value)."""
    rows = spark.read.parquet(str(target)).collect()
    found = {
        (row.topic, row.partition, row.offset): (str(row.date), bytes(row.value)) for row in rows
    }
    assert len(found) == len(rows), "a message is there twice"
    return found


def expected(store, topic="t"):
    with StoreReader(str(store)) as reader:
        return {
            (r.topic, r.queue_id, r.queue_offset): (
                str(pd.Timestamp(r.store_timestamp_ms, unit="ms").date()),
                r.body,
            )
            for r in reader.records()
            if r.topic == topic
        }


def test_later_runs_add_what_has_come_since(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = over_days(100)
    for count in (40, 41, 100):
        shutil.rmtree(store, ignore_errors=True)
        write_store(store, messages[:count])
        before = len(exported(spark, target)) if target.exists() else 0
        summary = run(spark, store, target)
        assert summary.messages == count - before
        assert exported(spark, target) == expected(store)
    assert run(spark, store, target).messages == 0
    assert len(list(target.glob("topic=t/date=*"))) == 10


def test_spark_reads_orc_files_as_it_reads_parquet_files(spark, tmp_path):
    store = GOLDEN / "three-files"
    frames = []
    for form in ("parquet", "orc"):
        run(spark, store, tmp_path / form, ("TopicA",), headers=True, metadata=True, format=form)
        frames.append(spark.read.format(form).load(str(tmp_path / form)))
    parquet, orc = frames
    assert orc.schema == parquet.schema
    assert sorted(orc.collect()) == sorted(parquet.collect())


def test_workers_write_to_tables_and_to_a_bucket_and_merge_there(spark, tmp_path, monkeypatch):
    store = tmp_path / "store"
    write_store(store, over_days(40))
    with s3_server() as variables:
        for name, value in variables.items():  # as spark.executorEnv, for new workers
            monkeypatch.setitem(spark.sparkContext.environment, name, value)
        target = new_target(client())
        assert run(spark, store, target, file_bytes=4_000).files > 4
        assert run(spark, store, target, merge=True).merged_files
        table = committed_dataset(target).to_table()
        delta = new_target(client())
        run(spark, store, delta, format="delta")
        options = {"aws_allow_http": "true"}
        in_delta = deltalake.DeltaTable(delta, storage_options=options).to_pyarrow_table()
    run(spark, store, tmp_path / "table", format="iceberg")
    with table_of(tmp_path / "table") as found:
        in_iceberg = found.scan().to_arrow()
    for found in (table, in_delta, in_iceberg):
        rows = found.select(["topic", "partition", "offset", "date", "value"]).to_pylist()
        assert len(rows) == 40
        assert {
            (row["topic"], row["partition"], row["offset"]): (str(row["date"]), row["value"])
            for row in rows
        } == expected(store)


def test_the_files_have_the_columns_and_types_of_the_source(spark, tmp_path):
    store = GOLDEN / "three-files"
    run(spark, store, tmp_path / "t", ("TopicA",), headers=True, metadata=True)
    found = spark.read.parquet(str(tmp_path / "t"))
    source = (
        spark.read.format("hastore")
        .option("path", str(store))
        .option("subscribe", "TopicA")
        .option("includeHeaders", "true")
        .option("includeMetadata", "true")
        .load()
    )
    types = dict(found.dtypes)
    assert types.pop("date") == "date"
    assert types == dict(source.dtypes)
    assert sorted(map(repr, found.select(source.columns).collect())) == sorted(
        map(repr, source.collect())
    )
    frame = pd.read_parquet(tmp_path / "t")
    assert str(frame["timestamp"].dtype) == "datetime64[us, UTC]"


def test_a_log_that_was_cut_after_the_export_is_refused(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = over_days(60)
    write_store(store, messages[:50])
    run(spark, store, target)
    before = exported(spark, target)
    shutil.rmtree(store)
    write_store(store, messages[:45])
    with pytest.raises(PositionLostError, match="a failover has cut the log, or this replica"):
        run(spark, store, target)
    others = [
        (topic, queue, {**fields, "store_timestamp_ms": fields["store_timestamp_ms"] + 1})
        for topic, queue, fields in messages[45:]
    ]
    shutil.rmtree(store)
    write_store(store, [*messages[:45], *others])  # the same number, bytes at the same places
    with pytest.raises(PositionLostError, match="not the one that was read before"):
        run(spark, store, target)
    assert exported(spark, target) == before


def test_messages_that_were_removed_before_their_export_are_an_error_or_counted(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = over_days(100, queues=1)
    write_store(store, messages[:50], file_size=2048)
    run(spark, store, target)
    shutil.rmtree(store)
    write_store(store, messages, file_size=2048)
    for file in sorted((store / "commitlog").iterdir()):
        with StoreReader(str(store)) as reader:
            if reader.queue_range("t", 0)[0] > 60:
                break
        file.unlink()
    with StoreReader(str(store)) as reader:
        first = reader.queue_range("t", 0)[0]
    with pytest.raises(PositionLostError, match="--allow-data-loss"):
        run(spark, store, target)
    summary = run(spark, store, target, fail_on_data_loss=False)
    assert summary.lost_messages == first - 50 > 0
    offsets = sorted(offset for _, _, offset in exported(spark, target))
    assert offsets == [*range(50), *range(first, 100)]


def test_topics_that_join_later_and_patterns(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    write_store(store, over_days(20) + over_days(20, topic="%RETRY%g"))
    run(spark, store, target)
    summary = export(spark, Where(str(store), pattern=".*"), str(target))
    assert summary.messages_by_topic == {"%RETRY%g": 20}
    assert exported(spark, target) == expected(store) | expected(store, "%RETRY%g")


def test_wrong_targets_are_refused_before_anything_is_written(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    write_store(store, over_days(20))
    run(spark, store, target)
    with pytest.raises(UsageError, match="was without --metadata"):
        run(spark, store, target, metadata=True)
    with pytest.raises(UsageError, match="there is no topic 'T'"):
        run(spark, store, tmp_path / "new", ("T",))
    assert not (tmp_path / "new").exists()
    with open(target / "_hastore" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another run writes into"):
            run(spark, store, target)


def test_small_files_are_merged_and_no_message_changes(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = over_days(40)
    for count in (10, 13, 40):
        shutil.rmtree(store, ignore_errors=True)
        write_store(store, messages[:count])
        run(spark, store, target)
    before = len(list(target.rglob("part-*.parquet")))
    summary = run(spark, store, target, merge=True)
    assert summary.messages == 0 and summary.merged_files > summary.merged_into == 1
    after = len(list(target.rglob("part-*.parquet")))
    assert before - after == summary.merged_files - summary.merged_into
    assert exported(spark, target) == expected(store)
    assert run(spark, store, target, merge=True).merged_files == 0


def test_json_bodies_become_columns_and_others_are_kept(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    bodies = [b'{"carrier":"UA","delay":3,"offset":5}', b"no json"]
    bodies += [b'{"delay":"late"}', b'{"delay":null}']
    write_store(store, [("t", 0, {"body": body}) for body in bodies])
    ddl = "carrier STRING, delay INT, offset INT"
    summary = run(spark, store, target, json_schema=ddl, keep_value=False)
    assert summary.corrupt_bodies == 2
    rows = spark.read.parquet(str(target)).orderBy("offset").collect()
    found = [(r.offset, r.carrier, r.delay, r.body_offset) for r in rows]
    assert found == [(0, "UA", 3, 5), *((n, None, None, None) for n in (1, 2, 3))]
    assert [r._corrupt and bytes(r._corrupt) for r in rows] == [None, *bodies[1:3], None]
    assert "value" not in rows[0]
    assert run(spark, store, target).taken_over == ("--drop-value", "--json-schema")
    with pytest.raises(UsageError, match="is not a schema in DDL"):
        run(spark, store, tmp_path / "n", json_schema="delay FOO")
    inferred = tmp_path / "inferred"
    run(spark, store, inferred, json_schema="infer")
    frame = spark.read.parquet(str(inferred))
    assert dict(frame.dtypes)["delay"] == "string" and "value" in frame.columns
    assert dict(frame.dtypes)["body_offset"] == "bigint"
    assert run(spark, store, inferred, json_schema="infer").messages == 0


def test_timestamps_of_bodies_are_times_of_utc_whatever_the_session_says(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    body = b'{"at":"2026-11-22T10:00:00","n":{"timestamp_ntz":["2026-11-22T12:00:00+01:00"]}}'
    write_store(store, [("t", 0, {"body": body})])
    ddl = "at TIMESTAMP, n STRUCT<timestamp_ntz: ARRAY<TIMESTAMP>>"
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        run(spark, store, target, json_schema=ddl)
    finally:
        spark.conf.unset("spark.sql.timestampType")
    run(spark, store, target, json_schema=ddl.lower())  # as in any other session
    (file,) = target.rglob("part-*.parquet")
    (row,) = pq.read_table(file, columns=["at", "n"], partitioning=None).to_pylist()
    assert row["at"] == datetime(2026, 11, 22, 10, tzinfo=UTC)
    assert row["n"] == {"timestamp_ntz": [datetime(2026, 11, 22, 11, tzinfo=UTC)]}


def delta_rows(target):
    table = deltalake.DeltaTable(str(target)).to_pyarrow_table()
    rows = table.select(["topic", "partition", "offset", "date", "value"]).to_pylist()
    found = {(r["topic"], r["partition"], r["offset"]): (str(r["date"]), r["value"]) for r in rows}
    assert len(found) == len(rows)
    return found


def test_a_delta_table_has_each_message_once_whatever_commit_fails(spark, tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = over_days(60)
    write_store(store, messages[:25])
    run(spark, store, target, format="delta")
    assert delta_rows(target) == expected(store)
    shutil.rmtree(store)
    write_store(store, messages)

    class Crash(BaseException):
        pass

    def crash(*_args):
        raise Crash

    add = DeltaTarget._add
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTarget, "_add", crash)  # before the table's commit
        with pytest.raises(Crash):
            run(spark, store, target, format="delta")
    assert len(delta_rows(target)) == 25

    def add_and_crash(*args):
        add(*args)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTarget, "_add", add_and_crash)  # after the table's commit
        with pytest.raises(Crash):
            run(spark, store, target, format="delta")
    assert delta_rows(target) == expected(store)
    summary = run(spark, store, target, format="delta", merge=True)
    assert summary.messages == 0 and summary.merged_files > summary.merged_into
    assert delta_rows(target) == expected(store)
    in_table = set(deltalake.DeltaTable(str(target)).file_uris())
    assert {str(path) for path in target.glob("part-*.parquet")} >= {
        uri for uri in in_table if "part-" in uri and "date=" not in uri
    }
    with pytest.raises(UsageError, match="target of `hastore pipeline export --format delta`"):
        run(spark, store, target)


def test_damage_in_the_log_ends_the_run_and_nothing_half_is_visible(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    placed = write_store(store, over_days(60), file_size=2048)
    file = min((store / "commitlog").iterdir())  # a RocketMQ store ends at damage in its last file
    data = bytearray(file.read_bytes())
    data[placed[5].physical_offset + 90] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptRecordError, match=str(placed[5].physical_offset)):
        run(spark, store, target)
    assert list(target.glob("topic=*")) == []
    assert list((target / "_hastore" / "commits").iterdir()) == []
