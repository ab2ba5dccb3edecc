"""The job `compact` on a real session: the latest message of each key, over several runs."""

import contextlib
import json
import random
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hastore.client import Admin
from hastore.errors import CorruptRecordError, HastoreError, PositionLostError, UsageError
from hastore.pipeline import compact as compact_job
from hastore.pipeline.committed import committed_dataset
from hastore.pipeline.compact import (
    CompactOptions,
    Destination,
    Published,
    check_compact,
    compact,
    compact_with,
    has_lost,
    publish_again,
)
from hastore.pipeline.compact_files import FRESH, RowWriter
from hastore.pipeline.object_target import ObjectTarget
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.target import Target, spark_path
from hastore.pipeline.where import Where
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.read.stores import PathBackend
from hastore.store.offline.reader import StoreReader
from tests.pipeline.s3 import client, new_target, s3_server
from tests.pipeline.test_export_commits import write_anew, written
from tests.process.conftest import make_group, pytest_runtest_makereport
from tests.spark.stores import write_store

__all__ = ["make_group", "pytest_runtest_makereport"]

SEED = random.SystemRandom().getrandbits(32)


def keyed(count, rng, *, queues=3, keys=12):
    """Messages of a few keys to any queue; some have no key, and some an empty body."""
    messages = []
    for number in range(count):
        key = rng.randrange(keys + 1)
        body = b"" if rng.random() < 0.2 else f"{number}".encode()
        properties = f"KEYS\x01k{key}\x02".encode() if key < keys else b""
        messages.append(
            (
                "t",
                rng.randrange(queues),
                {"body": body, "properties": properties, "store_timestamp_ms": number},
            )
        )
    return messages


def model(messages):
    """Return what compaction keeps: key -> body, and the bodies without a key."""
    last, others = {}, []
    for _, _, fields in messages:
        if not fields["properties"]:
            others.append(fields["body"])
        else:
            last[fields["properties"][5:-1]] = fields["body"]
    return {key: body for key, body in last.items() if body}, sorted(others)


@pytest.mark.parametrize(
    ("queues", "begins", "lost"),
    [
        ({0: (0, 5), 1: (0, 0)}, {}, False),
        ({0: (1, 5), 1: (0, 0)}, {}, True),  # retention
        ({}, {}, True),  # deleted
        ({0: (5, 9), 1: (7, 8)}, {"0": 5, "1": 7}, False),  # all was written again at 5 and 7
        ({0: (5, 9), 1: (8, 8)}, {"0": 5, "1": 7}, True),
        ({0: (5, 9)}, {"0": 5, "1": 7}, True),
        ({0: (5, 9), 1: (7, 9), 2: (0, 3)}, {"0": 5, "1": 7}, False),  # a queue was added
    ],
)
def test_whether_a_topic_has_lost_messages_is_seen_by_where_its_queues_begin(queues, begins, lost):
    ranges = {queue: OffsetRange(*bounds) for queue, bounds in queues.items()}
    assert has_lost(ranges, begins) is lost


class FakeTarget:
    """A target with two keys in two files, and its commits."""

    path, run, number = "lake", "RUN", 3

    def __init__(self):
        self.state = {"topic": "t", "keys": 2, "without_key": 0, "changes": None}
        self.removed = []

    def files(self):
        return {"topic=t/b.parquet": 1, "topic=t/a.parquet": 1}

    def commit(self, state, files, removed=()):
        assert not files
        self.number, self.state = self.number + 1, json.loads(json.dumps(state))
        self.removed += removed


@pytest.mark.parametrize("queues", [{}, {0: (2, 9), 1: (0, 4)}])
def test_a_topic_whose_messages_are_gone_gets_all_rows_again(monkeypatch, queues):
    """By one write, which a killed run leaves to the next one under the same name."""
    target, seen = FakeTarget(), []

    class Head:
        def available(self, topics):
            assert topics == {"latest"}
            return {TopicPartition("latest", n): OffsetRange(*at) for n, at in queues.items()}

        def check_unlisted(self, topic):
            pass

        def close(self):
            seen.append("closed")

    def publish(start, target, destination, fitting, progress):
        seen.append(dict(target.state["changes"]))
        return Published(2)

    monkeypatch.setattr(compact_job, "open_head", lambda options: Head())
    monkeypatch.setattr(compact_job, "publish", publish)
    options = CompactOptions(destination=Destination("latest", "tcp://127.0.0.1:9"))

    def again():
        return publish_again(None, target, options, JobProgress()).rows

    assert again() == 2
    files = ["topic=t/a.parquet", "topic=t/b.parquet"]
    write = {"write": "hastore-compact-RUN-4-all", "files": files, "rows": 2, "kept": True}
    assert seen == ["closed", write] and target.removed == []
    assert target.state["to_begins"] == {str(queue): at[1] for queue, at in queues.items()}
    if queues:
        queues = {0: (9, 10), 1: (4, 5)}  # retention took the older ones, and no later one
        assert again() == 0
    queues = {}
    target.state |= {"to_rows": False}  # none of them could be sent
    assert again() == 0
    target.state |= {"to_rows": True}
    assert again() == 2
    target.state |= {"keys": 0}
    assert again() == 0, "there is nothing to write"


def test_a_null_value_deletes_its_key_as_an_empty_body_does():
    rows = [("a", b"1"), ("b", None), ("c", b""), (None, None), (None, b"")]
    key, value = zip(*rows, strict=True)
    table = pa.table({"key": key, "value": value, FRESH: [True, False, True, True, True]})
    writer = RowWriter("t", "s", "zstd", changes=True, deletions=True)
    assert writer.choose(table, False)["key"].to_pylist() == ["a", None, None]
    assert writer.choose(table, True)["key"].to_pylist() == ["a", "c", None, None]


def compacted(spark, target):
    rows = spark.read.parquet(spark_path(target)).collect()
    keyed = {bytes(row.key): bytes(row.value) for row in rows if row.key is not None}
    others = sorted(bytes(row.value) for row in rows if row.key is None)
    assert len(keyed) + len(others) == len(rows)
    return keyed, others


def in_bucket(url):
    """Return what `compacted` returns."""
    table = committed_dataset(url).to_table(columns=["key", "value", "topic"])
    assert set(table["topic"].to_pylist()) == {"t"}
    rows = list(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    return {key: value for key, value in rows if key}, sorted(v for k, v in rows if not k)


# May take long where it is the first to shuffle: the JVM loads and compiles its classes then.
@pytest.mark.slow("Spark plans and shuffles anew in each of its runs")
@pytest.mark.parametrize(
    "keep", [False, pytest.param(True, marks=[pytest.mark.full, pytest.mark.long])]
)
def test_each_run_brings_the_target_up_to_date(spark, tmp_path, keep):
    print("seed", SEED)
    messages = keyed(300, random.Random(SEED))
    store, target = tmp_path / "store", tmp_path / "target [1-2]{a,b}*?"
    for count in (100, 101, 300):
        shutil.rmtree(store, ignore_errors=True)
        write_store(store, messages[:count])
        where = Where(str(store), topics=("t",))
        summary = compact(spark, where, str(target), CompactOptions(keep_without_key=keep))
        expected, others = model(messages[:count])
        assert compacted(spark, target) == (expected, others if keep else [])
        assert summary.keys == len(expected) and summary.without_key == (len(others) * keep)
    assert compact(spark, where, str(target), CompactOptions(keep_without_key=keep)).read == 0
    assert summary.read == 199
    with pytest.raises(UsageError, match="messages without a key"):
        compact(spark, where, str(target), CompactOptions(keep_without_key=not keep))


@pytest.mark.full
def test_a_run_that_fails_leaves_the_target_as_it_was(spark, tmp_path):
    messages = keyed(60, random.Random(1))
    store, target = tmp_path / "store", tmp_path / "target"
    where = Where(str(store), topics=("t",))
    write_store(store, messages[:30], file_size=4096)
    compact(spark, where, str(target))
    before = compacted(spark, target)
    shutil.rmtree(store)
    placed = write_store(store, messages, file_size=4096)
    damaged = next(r for r in placed[30:] if r.body)
    # Not in the last file: there, damage ends a RocketMQ store.
    file = store / "commitlog" / f"{damaged.physical_offset // 4096 * 4096:020}"
    assert file != max((store / "commitlog").iterdir())
    whole = file.read_bytes()
    data = bytearray(whole)
    data[damaged.physical_offset % 4096 + 88] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptRecordError, match=str(damaged.physical_offset)):
        compact(spark, where, str(target))
    assert compacted(spark, target) == before
    file.write_bytes(whole)
    compact(spark, where, str(target))
    assert compacted(spark, target)[0] == model(messages)[0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a.b", "no dots"), ("HASTORE_FOO", "the group's own"), ("TBW102", "RocketMQ's own")],
)
def test_a_topic_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, name, problem):
    write_store(tmp_path / "store", keyed(10, random.Random(3)))
    where, target = Where(str(tmp_path / "store"), topics=("t",)), str(tmp_path / "target")
    options = CompactOptions(destination=Destination(name, "127.0.0.1:1"))
    with pytest.raises(UsageError, match=f"--to-topic: .*{problem}"):
        check_compact(where, target, options)
    with pytest.raises(UsageError, match=f"--to-topic: .*{problem}"):
        compact_with(lambda: pytest.fail("Spark was started"), where, target, options)
    assert check_compact(where, target, CompactOptions()) is None  # another run is not bound by it


@contextlib.contextmanager
def settings_of(spark, **settings):
    """Set what a user's configuration may have set, for a moment."""
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


@pytest.mark.full
def test_a_damaged_file_of_the_target_ends_a_run_whatever_the_session_says(spark, tmp_path):
    messages = keyed(60, random.Random(2))
    store, target = tmp_path / "store", tmp_path / "target"
    where = Where(str(store), topics=("t",))
    write_store(store, messages[:30])
    compact(spark, where, str(target))
    (file,) = target.glob("topic=t/*.parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    shutil.rmtree(store)
    write_store(store, messages)
    skip = {"spark.sql.files.ignoreCorruptFiles": "true"}
    with settings_of(spark, **skip), pytest.raises(HastoreError, match="is not a Parquet file"):
        compact(spark, where, str(target))
    file.write_bytes(whole)
    compact(spark, where, str(target))
    assert compacted(spark, target)[0] == model(messages)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"spark.sql.timestampType": "TIMESTAMP_NTZ"},
        {
            "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
            "spark.sql.session.timeZone": "America/New_York",
        },
    ],
)
def test_times_stay_those_of_the_log_whatever_the_session_says(spark, tmp_path, settings):
    times = [-62_135_596_800_000, -3_153_600_000_000, 0, 1_741_505_400_000]
    messages = [
        ("t", 0, {"body": b"x", "properties": b"KEYS\x01%d\x02" % at, "store_timestamp_ms": at})
        for at in times
    ]
    store, target = tmp_path / "store", tmp_path / "target"
    where = Where(str(store), topics=("t",))
    with settings_of(spark, **settings):
        for count in (3, 4):
            shutil.rmtree(store, ignore_errors=True)
            write_store(store, messages[:count])
            compact(spark, where, str(target))
    (file,) = target.glob("topic=t/*.parquet")
    found = pq.read_table(file, columns=["timestamp"], partitioning=None)["timestamp"]
    assert sorted(found.cast(pa.int64()).to_pylist()) == [1_000 * at for at in times]


@pytest.fixture
def bucket(spark, monkeypatch):
    """The URL of a place in a bucket that the workers reach, too."""
    with s3_server() as variables:
        for name, value in variables.items():  # as spark.executorEnv, for new workers
            monkeypatch.setitem(spark.sparkContext.environment, name, value)
        yield new_target(client())


@pytest.mark.full
@pytest.mark.parametrize("kind", [Target, ObjectTarget])
def test_a_new_topic_gets_each_change_once_when_a_run_dies(
    spark, tmp_path, make_group, monkeypatch, request, kind
):
    messages = keyed(200, random.Random(3))
    store, target = tmp_path / "source", tmp_path / "target"
    if kind is ObjectTarget:
        target = request.getfixturevalue("bucket")
    group = make_group(1, acks=0, master_role="ASYNC_MASTER").start()
    servers = ",".join(group.bootstrap)
    options = CompactOptions(destination=Destination("compacted", servers))
    where = Where(str(store), topics=("t",))

    def stored():
        with StoreReader(str(group[1].store)) as reader:
            records = [r for r in reader.records() if r.topic == "compacted"]
            return [(r.keys[0], r.body) for r in records]

    def latest(pairs):
        found = dict(pairs)
        return {key.encode(): body for key, body in found.items() if body}

    class Crash(BaseException):
        pass

    commit = kind.commit

    def crash_after_publishing(self, state, *args, **kwargs):
        if self.number and state.get("changes") is None:
            raise Crash
        commit(self, state, *args, **kwargs)

    write_store(store, messages[:120])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "commit", crash_after_publishing)
        with pytest.raises(Crash):
            compact(spark, where, str(target), options)
    expected = model(messages[:120])[0]
    first = stored()
    assert latest(first) == expected and len(first) == len(expected)
    summary = compact(spark, where, str(target), options)
    assert stored() == first and summary.published == len(expected)
    shutil.rmtree(store)
    write_store(store, messages)
    summary = compact(spark, where, str(target), options)
    there = in_bucket(target) if kind is ObjectTarget else compacted(spark, target)
    assert latest(stored()) == model(messages)[0] == there[0]
    changed = {fields["properties"] for _, _, fields in messages[120:]} - {b""}
    assert summary.published == len(changed) == len(stored()) - len(first)
    if kind is Target:
        assert list((target / "_hastore" / "changes").rglob("*.parquet")) == []
    assert compact(spark, where, str(target)).published == 0  # to the topic of the first run
    before = len(stored())
    with Admin(group.bootstrap) as admin:
        admin.delete_topic("compacted")
    summary = compact(spark, where, str(target))
    assert summary.published == summary.published_again == len(there[0])
    again = stored()[before:]
    assert len(again) == len(there[0]) and latest(again) == there[0]
    assert (in_bucket(target) if kind is ObjectTarget else compacted(spark, target)) == there
    other = CompactOptions(destination=Destination("other", servers))
    with pytest.raises(UsageError, match="writes its changes to the topic 'compacted'"):
        compact(spark, where, str(target), other)
    with pytest.raises(UsageError, match="has messages already"):
        compact(spark, where, str(tmp_path / "other"), options)


def keys_of(group):
    with StoreReader(str(group[1].store)) as reader:
        return [record.keys[0] for record in reader.records() if record.topic == "compacted"]


@pytest.mark.full
def test_what_cannot_be_sent_to_the_topic_is_dropped_or_refused_before_the_commit(
    spark, tmp_path, make_group
):
    group = make_group(1, acks=0, master_role="ASYNC_MASTER").start()
    store, target = tmp_path / "source", tmp_path / "target"
    where = Where(str(store), topics=("t",))
    destination = Destination("compacted", ",".join(group.bootstrap))
    options = CompactOptions(destination=destination)
    messages = [
        ("t", 0, {"body": b"1", "properties": b"KEYS\x01%s\x02" % properties})
        for properties in (b"a", b"b\x02trace\x01x\x01y", b"c\x01d", b"e")
    ]
    write_anew(store, messages[:2])
    found = compact(spark, where, str(target), options)
    assert (found.published, found.dropped_headers, found.left_out) == (2, 1, 0)
    write_anew(store, messages)
    with pytest.raises(UsageError, match=r"the message 2 of t-0 .*b'c.x01d'.*--allow-data-loss"):
        compact(spark, where, str(target), options)
    assert len(compacted(spark, target)[0]) == 2, "nothing was committed"
    found = compact(spark, where, str(target), replace(options, fail_on_data_loss=False))
    assert (found.published, found.dropped_headers, found.left_out) == (1, 0, 1)
    assert set(compacted(spark, target)[0]) == {b"a", b"b", b"c\x01d", b"e"}
    found = compact(spark, where, str(target), options)
    assert (found.published, found.left_out) == (0, 0)
    assert sorted(keys_of(group)) == ["a", "b", "e"]
    write_anew(store, messages[2:3])  # the topic never comes to be, and lacks nothing
    unsent = replace(
        options,
        fail_on_data_loss=False,
        destination=Destination("unsent", ",".join(group.bootstrap)),
    )
    for left_out in (1, 0):
        found = compact(spark, where, str(tmp_path / "unsent"), unsent)
        assert (found.keys, found.published_again, found.left_out) == (1, 0, left_out)


@pytest.mark.full
def test_changes_of_an_older_version_that_cannot_be_sent_do_not_stop_a_target(
    spark, tmp_path, make_group, monkeypatch
):
    group = make_group(1, acks=0, master_role="ASYNC_MASTER").start()
    store, target = tmp_path / "source", tmp_path / "target"
    where = Where(str(store), topics=("t",))
    options = CompactOptions(destination=Destination("compacted", ",".join(group.bootstrap)))
    write_anew(store, [("t", 0, {"body": b"1", "properties": b"KEYS\x01a\x02"})] * 3)

    class Crash(BaseException):
        pass

    def crash(start, target, *_):
        if target.state:
            raise Crash
        return compact_job.Published()

    with monkeypatch.context() as patch:
        patch.setattr(compact_job, "publish", crash)
        with pytest.raises(Crash):
            compact(spark, where, str(target), options)
    (changes,) = (target / "_hastore" / "changes").rglob("*.parquet")
    (row,) = pq.read_table(changes).to_pylist()
    header = {"key": "trace", "value": b"x\x01y"}
    rows = [{**row, "key": key} for key in (b"a", b"b\x01c", b"d", b"e")]
    rows[0]["headers"] = [header]
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(changes)), changes)
    commit = target / "_hastore" / "commits" / "00000001.json"
    entry = json.loads(commit.read_text())
    entry["state"]["changes"] = {
        name: 4 if name == "rows" else entry["state"]["changes"][name]
        for name in ("write", "files", "rows")
    }
    commit.write_text(json.dumps(entry))
    with pytest.raises(UsageError, match="b'b.x01c'.*--allow-data-loss"):
        compact(spark, where, str(target), options)
    assert keys_of(group) == []
    found = compact(spark, where, str(target), replace(options, fail_on_data_loss=False))
    assert (found.published, found.dropped_headers, found.left_out) == (3, 1, 1)
    assert keys_of(group) == ["a", "d", "e"]
    assert compact(spark, where, str(target), options).published == 0


def test_what_retention_removes_of_a_queue_that_is_new_since_the_last_run_is_lost(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    where, first, second = Where(str(store), topics=("t",)), written(0, 3), written(1, 60)
    write_anew(store, first)
    assert compact(spark, where, str(target)).read == 3
    write_anew(store, first + second, removed=1)
    with pytest.raises(PositionLostError, match=r"\[0, .* of t-1, which is new since the last run"):
        compact(spark, where, str(target))
    options = CompactOptions(fail_on_data_loss=False)
    found = compact(spark, where, str(target), options)
    assert found.read + found.lost_messages == 60 and found.lost_messages > 0
    assert compact(spark, where, str(target)).lost_messages == 0


def test_wrong_topics_are_refused(spark, tmp_path):
    store, target = tmp_path / "store", tmp_path / "target"
    write_store(store, [*keyed(10, random.Random(2)), ("u", 0, {"body": b"x"})])
    with pytest.raises(UsageError, match="one topic"):
        compact(spark, Where(str(store), topics=("t", "u")), str(target))
    compact(spark, Where(str(store), topics=("t",)), str(target))
    with pytest.raises(UsageError, match="has the topic 't'"):
        compact(spark, Where(str(store), topics=("u",)), str(target))
    with PathBackend(str(store), True) as backend:
        assert {key.topic for key in backend.available()} == {"t", "u"}
