"""What an export commits while its log changes, without Spark: tasks run in this process."""

import shutil
import zlib
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import deltalake
import pyarrow.parquet as pq
import pytest

from hastore.errors import CorruptRecordError, PositionLostError, StoreBrokenError, UsageError
from hastore.pipeline import delta
from hastore.pipeline import export as export_job
from hastore.pipeline.compact import compact
from hastore.pipeline.delta import APPLICATION, DeltaLog, _restored_to
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.where import Where
from hastore.record.layout import V2_MAGIC
from hastore.spark.read.clusters import partition_of
from tests.spark.stores import numbered, write_store

SPARK = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
SMALL = 1_000  # bytes of a task: some records


def run_here(monkeypatch, after=lambda number: None):
    """Run tasks in this process; call `after` with the number of tasks that have ended."""

    def run_tasks(spark, name, function, tasks):
        for number, task in enumerate(tasks, 1):
            yield task, function(task)
            after(number)

    monkeypatch.setattr(export_job, "run_tasks", run_tasks)


def overwrite(store, messages):
    """Change a store's files in place, as a node does, whose files a reader has mapped."""
    new = store.with_name("new")
    write_store(new, messages)
    for file in new.rglob("*"):
        if file.is_file():
            with open(store / file.relative_to(new), "r+b") as old:
                old.write(file.read_bytes())
    shutil.rmtree(new)


def values(target):
    tables = [pq.read_table(file, columns=["value"]) for file in Path(target).rglob("part-*")]
    return sorted(value for table in tables for value in table["value"].to_pylist())


def bodies(messages):
    return sorted(fields["body"] for _, _, fields in messages)


def test_a_log_that_is_cut_and_grows_again_between_two_tasks_is_not_mixed(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(40)
    write_store(store, messages)
    others = [(topic, queue, {**f, "body": f["body"][::-1]}) for topic, queue, f in messages]
    tasks = []

    def cut(number):
        tasks.append(number)
        if number == 1:
            overwrite(store, [messages[0], *others[1:]])

    run_here(monkeypatch, cut)
    where = Where(str(store), topics=("t",))
    with pytest.raises(PositionLostError, match="was cut by a failover while it was read"):
        export(SPARK, where, str(target), ExportOptions(file_bytes=SMALL))
    assert len(tasks) > 2
    assert values(target) == []
    export(SPARK, where, str(target), ExportOptions(file_bytes=SMALL))
    assert values(target) == bodies([messages[0], *others[1:]])


def test_a_topic_that_is_deleted_during_the_run_is_said_to_be_gone(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    write_store(store, numbered(40))
    run_here(monkeypatch, lambda number: shutil.rmtree(store / "consumequeue", ignore_errors=True))
    options = ExportOptions(file_bytes=1 << 20)
    with pytest.raises(PositionLostError, match="t-0 at .* is gone: its topic was deleted while"):
        export(SPARK, Where(str(store), topics=("t",)), str(target), options)
    assert values(target) == []


def test_messages_that_are_removed_during_the_run_are_counted_and_named(
    tmp_path, monkeypatch, caplog
):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(100)
    placed = write_store(store, messages, file_size=2048)
    first, second, *_ = sorted((store / "commitlog").iterdir())
    gone = sum(record.physical_offset < 4096 for record in placed)

    def remove(number):
        if number == 1:
            first.unlink()
            second.unlink()

    run_here(monkeypatch, remove)
    options = ExportOptions(file_bytes=SMALL, fail_on_data_loss=False)
    summary = export(SPARK, Where(str(store), topics=("t",)), str(target), options)
    assert summary.messages + summary.lost_messages == 100
    assert 0 < summary.lost_messages < gone
    assert len(values(target)) == summary.messages
    named = [r for r in caplog.records if "were removed while they were read" in r.getMessage()]
    assert sum(record.args[0] for record in named) == summary.lost_messages
    assert all(record.args[3] == "t-0" for record in named)


def write_anew(store, messages, *, removed=0):
    """Write a store of small files, and remove the first ones, as retention does."""
    shutil.rmtree(store, ignore_errors=True)
    write_store(store, messages, file_size=1 << 12)
    for file in sorted((store / "commitlog").iterdir())[:removed]:
        file.unlink()


def test_a_queue_that_was_read_and_is_not_listed_any_more_is_no_news(
    tmp_path, monkeypatch, caplog
):
    """A folder lists the queues with messages only, so a cut may have emptied one."""
    run_here(monkeypatch)
    store, target = tmp_path / "store", str(tmp_path / "target")
    both = [*numbered(80, queues=2), *written(0, 3, topic="other")]
    where = Where(str(store))
    write_anew(store, both)
    assert export(SPARK, where, target).messages == 83
    shutil.rmtree(store / "consumequeue" / "t" / "1")
    with pytest.raises(PositionLostError, match=r"t-1 was read up to 40 before, and .* no such qu"):
        export(SPARK, where, target)
    assert export(SPARK, Where(str(store), topics=("other",)), target).messages == 0
    shutil.rmtree(store / "consumequeue" / "t")  # as RocketMQ deletes a topic
    caplog.clear()
    assert export(SPARK, where, target).messages == 0
    assert {r.getMessage() for r in caplog.records} == {
        f"{store} has no queue of topic 't', which was read before: it counts as deleted"
    }


def test_a_queue_of_which_retention_has_removed_all_may_be_gone(tmp_path, monkeypatch):
    """RocketMQ removes such a queue."""
    run_here(monkeypatch)
    store, target = tmp_path / "store", str(tmp_path / "target")
    messages = written(1, 3) + written(0, 200)
    where = Where(str(store), topics=("t",))
    write_anew(store, messages[:103])
    assert export(SPARK, where, target).messages == 103
    write_anew(store, messages, removed=1)
    shutil.rmtree(store / "consumequeue" / "t" / "1")
    assert export(SPARK, where, target).messages == 100


def written(queue, count, *, topic="t"):
    return [(topic, queue, {**fields}) for _, _, fields in numbered(count)]


@pytest.mark.parametrize("form", ["parquet", "delta", "iceberg"])
def test_what_retention_removes_of_a_queue_that_is_new_since_the_last_run_is_lost(
    tmp_path, monkeypatch, form
):
    """In the last run it had no message, so nothing was read of it then."""
    run_here(monkeypatch)
    store, target = tmp_path / "store", str(tmp_path / "target")
    first, second = written(0, 3), written(1, 60)
    where = Where(str(store), topics=("t",))
    write_anew(store, first)
    assert export(SPARK, where, target, ExportOptions(format=form)).messages == 3
    write_anew(store, first + second, removed=1)
    with pytest.raises(PositionLostError, match=r"the messages \[0, .* of t-1, which is new since"):
        export(SPARK, where, target, ExportOptions(format=form))
    options = ExportOptions(format=form, fail_on_data_loss=False)
    found = export(SPARK, where, target, options)
    assert found.messages + found.lost_messages == 60 and found.lost_messages > 0
    assert export(SPARK, where, target, options).lost_messages == 0


@pytest.mark.parametrize("form", ["parquet", "delta", "iceberg"])
def test_messages_that_are_lost_are_counted_once_also_if_there_is_nothing_else(
    tmp_path, monkeypatch, form
):
    run_here(monkeypatch)
    store, target = tmp_path / "store", str(tmp_path / "target")
    first, second = written(0, 3), written(1, 60)
    where = Where(str(store), topics=("t",))
    write_anew(store, first)
    export(SPARK, where, target, ExportOptions(format=form))
    write_anew(store, first + second + written(0, 60, topic="u"), removed=2)
    options = ExportOptions(format=form, fail_on_data_loss=False)
    found = export(SPARK, where, target, options)
    assert (found.messages, found.lost_messages, found.commits) == (0, 60, 1)
    found = export(SPARK, where, target, ExportOptions(format=form))
    assert (found.lost_messages, found.commits) == (0, 0)


def test_a_queue_that_a_run_did_not_come_to_is_not_new_in_the_next_one(tmp_path, monkeypatch):
    """A run that is stopped has committed where it would have begun in the other queues."""
    store, target = tmp_path / "store", tmp_path / "target"
    write_anew(store, written(0, 40) + written(1, 60), removed=2)

    def stop(number):
        raise KeyboardInterrupt

    where, options = Where(str(store), topics=("t",)), ExportOptions(file_bytes=SMALL)
    with monkeypatch.context() as patch:
        run_here(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            export(SPARK, where, str(target), options)
    assert 0 < len(values(target)) < 60
    run_here(monkeypatch)
    assert export(SPARK, where, str(target), options).lost_messages == 0


@pytest.mark.parametrize("case", ["another topic", "another group", "an older version"])
def test_where_the_first_messages_may_be_gone_before_a_queue_is_read(tmp_path, monkeypatch, case):
    run_here(monkeypatch)
    store, target = tmp_path / "store", tmp_path / "target"
    queue = partition_of("g1", 0)
    first = written(queue, 3)
    joined = written(queue + 1, 60)
    if case == "another topic":
        joined = written(queue, 60, topic="u")
    elif case == "another group":
        joined = written(partition_of("g2", 0), 60)
    write_anew(store, first)
    export(SPARK, Where(str(store)), str(target))
    if case == "an older version":  # and, since, a run of this one for another topic
        (commit,) = (target / "_hastore" / "commits").iterdir()
        commit.write_text(commit.read_text().replace('"all_queues"', '"unknown"'))
        write_anew(store, first + written(queue, 1, topic="u"))
        assert export(SPARK, Where(str(store), topics=("u",)), str(target)).messages == 1
    write_anew(store, first + joined, removed=1)
    topic = joined[0][0]
    found = export(SPARK, Where(str(store), topics=(topic,)), str(target))
    assert found.lost_messages == 0 and 0 < found.messages < 60


def test_a_run_that_ended_a_moment_ago_may_have_exported_more_than_there_was(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(40)
    write_store(store, messages[:20])
    where = Where(str(store), topics=("t",))
    run_here(monkeypatch)
    open_target = export_job._target

    def after_another_run(*args):
        monkeypatch.setattr(export_job, "_target", open_target)
        overwrite(store, messages)
        assert export(SPARK, where, str(target)).messages == 40
        return open_target(*args)

    monkeypatch.setattr(export_job, "_target", after_another_run)
    assert export(SPARK, where, str(target)).messages == 0
    assert values(target) == bodies(messages)


def test_a_delta_table_that_was_set_back_is_refused_and_keeps_its_files(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(30)
    run_here(monkeypatch)
    where = Where(str(store), topics=("t",))
    for count in (10, 20, 30):
        shutil.rmtree(store, ignore_errors=True)
        write_store(store, messages[:count])
        export(SPARK, where, str(target), ExportOptions(format="delta"))
    assert deltalake.DeltaTable(str(target)).version() == 2
    before = values(target)
    assert before == bodies(messages)
    shutil.rmtree(target / "_delta_log")
    with pytest.raises(StoreBrokenError, match="_delta_log was removed"):
        export(SPARK, where, str(target), ExportOptions(format="delta"))
    assert values(target) == before


def delta_table(tmp_path, monkeypatch, *counts):
    """Return a Delta table with a commit for each count of messages; a function that makes more."""
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(60)
    run_here(monkeypatch)

    def more(count):
        shutil.rmtree(store, ignore_errors=True)
        write_store(store, messages[:count])
        export(SPARK, Where(str(store), topics=("t",)), str(target), ExportOptions(format="delta"))
        return bodies(messages[:count])

    for count in counts:
        more(count)
    return deltalake.DeltaTable(str(target)), more


def shown(table):
    table.update_incremental()
    return sorted(table.to_pandas()["value"])


@pytest.mark.parametrize("by_time", [False, True])
def test_a_delta_table_that_was_restored_to_an_older_version_is_refused(
    tmp_path, monkeypatch, by_time
):
    """RESTORE keeps the numbers of applications: the rows of commit 2 would stay away for good."""
    table, more = delta_table(tmp_path, monkeypatch, 20, 40)
    first_ms = table.history()[-1]["timestamp"]
    table.restore(datetime.fromtimestamp(first_ms / 1000, UTC) if by_time else 0)
    assert len(shown(table)) == 20
    table.alter.set_table_properties({"mine": "1"}, False)  # other versions may follow
    for _ in range(2):
        with pytest.raises(StoreBrokenError, match="up to 1, but commit 2 took place.*set back"):
            more(60)
    table.update_incremental()
    table.restore(1)  # the remedy
    assert more(60) == shown(table)
    table.create_checkpoint()
    for version in range(table.version()):
        (tmp_path / f"target/_delta_log/{version:020}.json").unlink()
    more(60)  # without its history there is no telling


def test_a_delta_table_that_is_set_back_while_a_run_goes_on_is_refused(tmp_path, monkeypatch):
    table, more = delta_table(tmp_path, monkeypatch, 20, 40)
    run_here(monkeypatch, lambda number: table.restore(0))
    with pytest.raises(StoreBrokenError, match="up to 1, but commit 2 took place.*set back"):
        more(60)
    table.update_incremental()
    table.restore(1)
    run_here(monkeypatch)
    assert more(60) == shown(table)


@pytest.mark.parametrize("counts", [(20,), (20, 40)])
def test_a_delta_table_that_forgets_the_number_of_its_last_commit_keeps_its_rows(
    tmp_path, monkeypatch, counts
):
    """The export took commit 1 for one that did not take place, and removed its files."""
    table, more = delta_table(tmp_path, monkeypatch, *counts)
    name = "delta.setTransactionRetentionDuration"
    table.alter.set_table_properties({name: "interval 0 seconds"})
    assert deltalake.DeltaTable(str(tmp_path / "target")).transaction_version(APPLICATION) is None
    assert more(50) == shown(table)
    monkeypatch.setattr(DeltaLog, "_history_at", lambda *_: None)  # it is not kept for ever
    with pytest.raises(StoreBrokenError, match="setTransactionRetentionDuration has removed"):
        more(60)
    assert len(shown(table)) == 50


def test_the_notes_of_a_stream_in_the_history_are_no_commits_of_the_export(tmp_path, monkeypatch):
    """Earlier versions gave the batches of DeltaBatches the note of an export's commits."""
    table, more = delta_table(tmp_path, monkeypatch, 20, 40)
    batch = deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction("query", 0)], custom_metadata={"hastoreCommit": 0}
    )
    table.alter.set_table_properties({"mine": "1"}, False, commit_properties=batch)
    assert "hastoreCommit" in table.history(1)[0]
    assert more(60) == shown(table)


def test_each_version_of_the_history_is_read_once(tmp_path, monkeypatch):
    """In a bucket each takes a request, and others may have made thousands."""
    table, more = delta_table(tmp_path, monkeypatch, 20, 40)
    for number in range(5):
        table.alter.set_table_properties({"mine": str(number)}, False)
    read, parse = [], delta._parse_version
    monkeypatch.setattr(delta, "_parse_version", lambda data: read.append(data) or parse(data))
    assert more(60) == shown(table)
    assert len(read) == len(set(read)) == 6


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"version": "2", "timestamp": "null"}, (2, None)),
        ({"version": "null", "timestamp": '"1970-01-01 00:00:03.5"'}, (None, 3500)),
        ({"version": None, "timestamp": "1970-01-01T01:00:04+01:00"}, (None, 4000)),
        ({"datetime": "1000"}, (None, 1000)),
        ({"timestamp": "yesterday"}, (None, None)),
        (None, (None, None)),
    ],
)
def test_to_what_a_table_was_restored(given, found):
    assert _restored_to({"operationParameters": given}) == found


@pytest.mark.parametrize(("version", "old"), [("1.5.1", True), ("1.6.0", False), ("2.0rc1", False)])
def test_a_deltalake_that_loses_the_numbers_of_commits_is_refused(monkeypatch, version, old):
    """Up to 1.5 it left the number of a commit out of the table, so the next run undid it."""
    monkeypatch.setattr(deltalake, "__version__", version)
    if old:
        with pytest.raises(UsageError, match=f"deltalake {version} loses the number.*--upgrade"):
            DeltaLog("target")
    else:
        DeltaLog("target")


def test_a_run_may_leave_bodies_compressed_to_get_past_one_that_is_damaged(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    packed = zlib.compress(b"long " * 100)
    flagged = [("t", 0, {"body": body, "sys_flag": 1}) for body in (packed, b"junk")]
    write_store(store, [*flagged, ("t", 0, {"body": b"plain"})])
    run_here(monkeypatch)
    where = Where(str(store), topics=("t",))
    with pytest.raises(CorruptRecordError, match="does not decompress.*with --no-decompress"):
        export(SPARK, where, str(target))
    export(SPARK, where, str(target), ExportOptions(decompress=False))
    assert values(target) == sorted([packed, b"junk", b"plain"])
    overwrite(store, [*flagged, ("t", 0, {"body": b"plain"}), flagged[0]])
    assert export(SPARK, where, str(target)).messages == 1
    assert b"long " * 100 in values(target)


LONG = "%RETRY%" + "g" * 248


@pytest.mark.parametrize("form", ["parquet", "orc", "iceberg", "delta"])
def test_a_topic_whose_folder_would_have_too_long_a_name_is_refused_in_time(
    tmp_path, monkeypatch, form
):
    run_here(monkeypatch)
    store, target = str(tmp_path / "store"), str(tmp_path / "target")
    messages = [(topic, 0, {"body": b"1", "magic": V2_MAGIC}) for topic in ("orders", LONG)]
    write_store(store, messages)
    options = ExportOptions(format=form)
    if form == "delta":  # its files are all in one folder
        assert export(SPARK, Where(store), target, options).messages == 2
        return
    with pytest.raises(UsageError, match=f"the topic '{LONG}' cannot have a folder in {target}.*"):
        export(SPARK, Where(store), target, options)
    assert export(SPARK, Where(store, topics=("orders",)), target, options).messages == 1


def test_a_topic_with_the_longest_name_that_a_folder_takes_is_exported(tmp_path, monkeypatch):
    run_here(monkeypatch)
    longest = "%RETRY%" + "g" * (255 - len("topic=%25RETRY%25"))
    write_store(tmp_path / "store", [(longest, 0, {"body": b"1", "magic": V2_MAGIC})])
    assert export(SPARK, Where(str(tmp_path / "store")), str(tmp_path / "target")).messages == 1
    assert values(tmp_path / "target") == [b"1"]


def test_compact_refuses_a_topic_whose_folder_would_have_too_long_a_name(tmp_path):
    write_store(tmp_path / "store", [(LONG, 0, {"body": b"1", "magic": V2_MAGIC})])
    with pytest.raises(UsageError, match="cannot have a folder"):
        compact(SPARK, Where(str(tmp_path / "store"), topics=(LONG,)), str(tmp_path / "t"))


def test_compact_takes_no_list_of_topics(tmp_path):
    write_store(tmp_path / "store", numbered(3, topic="a") + numbered(3, topic="b"))
    with pytest.raises(UsageError, match="compact takes one topic"):
        compact(SPARK, Where(str(tmp_path / "store"), topics=("a,b",)), str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("first", ["group", "cluster"])
def test_a_target_of_a_group_does_not_go_on_with_its_cluster(tmp_path, monkeypatch, first):
    """There the same queue has another number: all messages would be in the target twice."""
    run_here(monkeypatch)
    messages, number = numbered(4), partition_of("g1", 0)
    write_store(tmp_path / "group", messages)
    write_store(tmp_path / "cluster", [("t", number, fields) for _, _, fields in messages])
    target = tmp_path / "target"
    second = "cluster" if first == "group" else "group"
    export(SPARK, Where(str(tmp_path / first), topics=("t",)), str(target))
    with pytest.raises(UsageError, match="'t' was read from .* before.*would be read again"):
        export(SPARK, Where(str(tmp_path / second), topics=("t",)), str(target))
    assert export(SPARK, Where(str(tmp_path / first), topics=("t",)), str(target)).messages == 0
    assert values(target) == bodies(messages)


def test_compact_takes_no_cluster_of_several_groups(tmp_path):
    """A physical offset orders the messages of one log; the latest of two groups is unknown."""
    where = Where(servers="zk://127.0.0.1:1/prod", topics=("t",))
    with pytest.raises(UsageError, match="one group.*give --servers zk://127.0.0.1:1/prod/GROUP"):
        compact(SPARK, where, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
