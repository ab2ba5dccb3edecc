"""A disk without room: the error names the target, the remedy and what is exported."""

import errno
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from hastore.errors import StoreFullError
from hastore.pipeline import compact as compact_job
from hastore.pipeline import export as export_job
from hastore.pipeline import target as target_module
from hastore.pipeline.compact_files import FRESH, RowWriter
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.running import explain
from hastore.pipeline.target import Target
from hastore.pipeline.where import Where
from tests.pipeline.test_export_commits import SMALL, SPARK, bodies, run_here, values
from tests.spark.stores import numbered, write_store


def full(*_args, **_more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_export_keeps_what_is_complete_and_continues(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(40)
    write_store(store, messages)
    where, options = Where(str(store), topics=("t",)), ExportOptions(file_bytes=SMALL)
    with monkeypatch.context() as patch:
        run_here(patch, lambda n: patch.setattr(pq.ParquetWriter, "write_table", full))
        with pytest.raises(StoreFullError) as failed:
            export(SPARK, where, str(target), options)
    kept = len(values(target))
    assert 0 < kept < 40
    text = str(failed.value)
    assert text.startswith(f"{target}: no room is left on its file system (No space left")
    assert "free space there, and run the same command again" in text
    assert text.endswith(f"behind the {kept} messages that this run has exported, which stay")
    run_here(monkeypatch)
    assert export(SPARK, where, str(target), options).messages == 40 - kept
    assert values(target) == bodies(messages)


@pytest.mark.parametrize("call", ["_write_json", "_sync_folder"])
def test_a_commit_without_room_is_finished_or_repeated_by_the_next_run(tmp_path, monkeypatch, call):
    store, target = tmp_path / "store", tmp_path / "target"
    write_store(store, numbered(40))
    where = Where(str(store), topics=("t",))
    with monkeypatch.context() as patch:
        run_here(patch, lambda n: patch.setattr(target_module, call, full))
        with pytest.raises(StoreFullError, match="no room is left"):
            export(SPARK, where, str(target))
    run_here(monkeypatch)
    export(SPARK, where, str(target))
    assert values(target) == bodies(numbered(40))


def test_what_is_committed_counts_as_exported_though_its_files_are_not_in_place(
    tmp_path, monkeypatch
):
    store, target = tmp_path / "store", tmp_path / "target"
    write_store(store, numbered(40))
    where = Where(str(store), topics=("t",))
    with monkeypatch.context() as patch:
        run_here(patch, lambda n: patch.setattr(Target, "_apply", full))
        with pytest.raises(StoreFullError, match="behind the 40 messages that this run has"):
            export(SPARK, where, str(target))
    assert export(SPARK, where, str(target)).messages == 0
    assert values(target) == bodies(numbered(40))


@pytest.mark.parametrize("committed", [False, True])
def test_a_compaction_says_whether_its_commit_is_made(tmp_path, monkeypatch, committed):
    write_store(tmp_path / "store", numbered(4))

    def rewrite(_spark, opened, *_):
        if committed:
            monkeypatch.setattr(Target, "_apply", full)
            opened.commit({"keys": 1}, [])
        with target_module.needs_room("disk"):
            full()

    monkeypatch.setattr(compact_job, "_rewrite", rewrite)
    text = "commit is made, and the next" if committed else "The target has what it had before"
    with pytest.raises(StoreFullError, match=text):
        compact_job.compact(
            SPARK, Where(str(tmp_path / "store"), topics=("t",)), str(tmp_path / "target")
        )


def test_a_task_of_a_compaction_says_so_too(tmp_path, monkeypatch):
    writer = RowWriter(str(tmp_path), ".", "snappy", changes=False, deletions=False)
    batch = pa.RecordBatch.from_pydict({"key": [b"k"], "value": [b"v"], FRESH: [True]})
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StoreFullError, match=f"{tmp_path}: no room is left"):
        list(writer(iter([batch])))


def test_a_disk_that_spark_itself_has_filled_is_named():
    trace = "Job aborted.\nCaused by: java.io.IOException: No space left on device\n\tat java..."
    error = explain("compact", PySparkException(trace))
    assert isinstance(error, StoreFullError)
    assert "compact: no room is left" in str(error) and "spark.local.dir" in str(error)


def test_other_failures_of_a_disk_stay_what_they_are(tmp_path, monkeypatch):
    write_store(tmp_path / "store", numbered(3))
    run_here(monkeypatch)
    monkeypatch.setattr(export_job, "write_piece", lambda *_: os.fsync(1 << 30))
    with pytest.raises(OSError, match="Bad file descriptor"):
        export(SPARK, Where(str(tmp_path / "store"), topics=("t",)), str(tmp_path / "target"))
