"""Exports to a bucket of a real S3 server (moto's), without Spark: tasks run in this process."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from hastore.errors import StoreBrokenError, StoreError, StoreInUseError, UsageError
from hastore.pipeline import compact as compact_job
from hastore.pipeline import export as export_job
from hastore.pipeline import object_target as module
from hastore.pipeline import parquet_files
from hastore.pipeline.committed import committed_dataset, committed_files
from hastore.pipeline.compact import compact
from hastore.pipeline.compact_files import FRESH, RowReader, RowWriter
from hastore.pipeline.export import ExportOptions, check_export, export
from hastore.pipeline.object_target import ObjectTarget
from hastore.pipeline.places import Bucket
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.target import StagedFile
from hastore.pipeline.where import Where
from tests.documents.blocks import blocks_of
from tests.pipeline.s3 import client, new_target, s3_server
from tests.pipeline.test_export_commits import SMALL, SPARK, bodies, overwrite, run_here
from tests.pipeline.test_target import Crash, crash
from tests.spark.stores import numbered, write_store

DAY_MS = 24 * 3600 * 1000


@pytest.fixture(scope="module")
def server():
    with s3_server():
        yield


@pytest.fixture
def fs(server):
    return client()


@pytest.fixture
def url(fs):
    return new_target(fs)


@pytest.fixture
def here(monkeypatch):
    """Run the tasks of exports and merges in this process."""
    run_here(monkeypatch)
    monkeypatch.setattr(parquet_files, "run_tasks", export_job.run_tasks)


def objects(fs, url, folder):
    root = url.removeprefix("s3://")
    found = fs.get_file_info(
        pafs.FileSelector(f"{root}/{folder}", recursive=True, allow_not_found=True)
    )
    return sorted(f"s3://{info.path}" for info in found if info.is_file)


def values(url):
    return sorted(committed_dataset(url).to_table(columns=["value"])["value"].to_pylist())


def where(store):
    return Where(str(store), topics=("t",))


@pytest.mark.parametrize("folder", ["topic=x", "date=1999-01-01", "a b%20/topic=x/y"])
def test_a_target_in_a_folder_with_the_name_of_a_partition(tmp_path, url, here, folder):
    write_store(tmp_path / "store", numbered(5))
    export(SPARK, where(tmp_path / "store"), f"{url}/{folder}")
    table = committed_dataset(f"{url}/{folder}").to_table()
    assert set(table["topic"].to_pylist()) == {"t"}
    assert {str(day) for day in table["date"].to_pylist()} == {"1970-01-01"}


def test_each_run_adds_what_is_new_and_readers_see_it_once(tmp_path, fs, url, here):
    store, messages = tmp_path / "store", numbered(60)
    write_store(store, messages[:40])
    small = ExportOptions(file_bytes=SMALL, headers=True)
    check_export(where(store), url, small)
    summary = export(SPARK, where(store), url, small)
    assert (summary.messages, summary.target) == (40, url)
    assert summary.files > 2
    overwrite(store, messages)
    again = export(SPARK, where(store), url.replace("s3:", "s3a:") + "/")
    assert (again.messages, again.taken_over) == (20, ("--headers",))
    assert export(SPARK, where(store), url).messages == 0
    assert values(url) == bodies(messages)
    table = committed_dataset(url).to_table()
    assert set(table["topic"].to_pylist()) == {"t"}
    assert {f"date={day}" for day in table["date"].to_pylist()} == {
        file.split("/")[-2] for file in committed_files(url)
    }
    assert objects(fs, url, "") == sorted(
        committed_files(url) + objects(fs, url, "_hastore/commits") + [f"{url}/_hastore/clock"]
    )
    with pytest.raises(UsageError, match="without --metadata"):
        check_export(where(store), url, ExportOptions(metadata=True))


def test_a_reader_that_lists_the_folder_finds_nothing_rather_than_wrong_rows(
    tmp_path, fs, url, here
):
    write_store(tmp_path / "store", numbered(5))
    export(SPARK, where(tmp_path / "store"), url)
    listed = pads.dataset(url.removeprefix("s3://"), filesystem=fs, format="parquet")
    assert listed.files == []


def test_a_run_that_dies_before_a_commit_leaves_no_rows(tmp_path, fs, url, here, monkeypatch):
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Bucket, "write_json", crash)
        export(SPARK, where(store), url)
    left = objects(fs, url, "_data")
    assert left
    assert committed_files(url) == []
    with pytest.raises(UsageError, match="nothing was exported to"):
        committed_dataset(url)
    assert export(SPARK, where(store), url).messages == 40
    assert values(url) == bodies(messages)
    assert not set(left) & set(committed_files(url))


def test_a_commit_whose_answer_is_lost_is_found_by_the_next_run(tmp_path, url, here, monkeypatch):
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)
    write = Bucket.write_json

    def lost(self, name, value):
        write(self, name, value)
        raise OSError("no answer")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="no answer.*AWS_ENDPOINT"):
        patch.setattr(Bucket, "write_json", lost)
        export(SPARK, where(store), url)
    assert export(SPARK, where(store), url).messages == 0
    assert values(url) == bodies(messages)


def test_of_two_runs_at_once_the_one_that_commits_later_is_refused(
    tmp_path, url, here, monkeypatch
):
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)

    def after_another_run(*_args):
        monkeypatch.undo()
        run_here(monkeypatch)
        assert export(SPARK, where(store), url).messages == 40

    run_here(monkeypatch, after_another_run)
    with pytest.raises(StoreInUseError, match="another run has exported to"):
        export(SPARK, where(store), url)
    assert values(url) == bodies(messages)


@pytest.mark.parametrize("later_counts", [False, True])
def test_of_two_commits_at_the_same_moment_one_counts_whole(
    tmp_path, url, here, monkeypatch, later_counts
):
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)
    listed = ObjectTarget._listed

    def between_look_and_commit(self, *args):
        monkeypatch.setattr(ObjectTarget, "_listed", listed)
        with monkeypatch.context() as patch:
            run = ("0" if later_counts else "f") * 32
            patch.setattr(module.uuid, "uuid4", lambda: SimpleNamespace(hex=run))
            assert export(SPARK, where(store), url).messages == 40
        return listed(self, *args)

    monkeypatch.setattr(ObjectTarget, "_listed", between_look_and_commit)
    if later_counts:
        assert export(SPARK, where(store), url).messages == 40
    else:
        with pytest.raises(StoreInUseError, match="another run has exported to"):
            export(SPARK, where(store), url)
    assert len(ObjectTarget(url)._commits()) == 2
    assert values(url) == bodies(messages)
    assert export(SPARK, where(store), url).messages == 0


@pytest.mark.parametrize("run", ["0" * 32, "f" * 32])
def test_a_commit_that_comes_after_two_of_another_run_does_not_count(
    tmp_path, url, here, monkeypatch, run
):
    """The run stood still between its look and its commit; the others have gone on since."""
    store, messages = tmp_path / "store", numbered(60)
    write_store(store, messages[:40])
    listed = ObjectTarget._listed

    def between_look_and_commit(self, *args):
        monkeypatch.setattr(ObjectTarget, "_listed", listed)
        assert export(SPARK, where(store), url).messages == 40
        overwrite(store, messages)
        assert export(SPARK, where(store), url).messages == 20
        return listed(self, *args)

    with ObjectTarget(url, "export") as late:
        late.run = run
        monkeypatch.setattr(ObjectTarget, "_listed", between_look_and_commit)
        with pytest.raises(StoreInUseError, match="another run has exported to"):
            late.commit({}, [])
    assert values(url) == bodies(messages)


def test_a_commit_counts_still_when_other_runs_have_gone_on_from_it(url):
    with ObjectTarget(url, "export") as target:
        target.commit({}, [])
    for _ in range(2):
        with ObjectTarget(url, "export") as later:
            later.commit({}, [])
    target.check_counts()
    entry = Bucket(url).read_json(f"_hastore/commits/{later._name}")
    del entry["before"]  # of a version that did not say so
    Bucket(url).write_json(f"_hastore/commits/{later._name}", entry)
    target.check_counts()


def test_changes_of_a_commit_that_does_not_count_are_not_published(url, monkeypatch):
    wrote = []
    monkeypatch.setattr(compact_job, "run_action", lambda *_: wrote.append(1))
    monkeypatch.setattr(compact_job, "read_rows", lambda *_: MagicMock())
    monkeypatch.setattr(compact_job.functools, "reduce", lambda *_: MagicMock())
    with ObjectTarget(url, "compact") as target, ObjectTarget(url, "compact") as other:
        target.run, other.run = "0" * 32, "f" * 32
        with monkeypatch.context() as patch:
            patch.setattr(ObjectTarget, "_commits", lambda _: [])  # neither sees the other
            for one in (target, other):
                changes = {"write": one.run, "files": ["x"], "rows": 1, "dropped": 0}
                one.commit({"changes": changes}, [])
        destination = compact_job.Destination("latest", "127.0.0.1:1")
        with pytest.raises(StoreInUseError, match="another run"):
            compact_job.publish(MagicMock(), target, destination, "", JobProgress())
    assert not wrote


def test_a_merge_is_one_commit_and_its_files_stay_for_readers_that_began_before(
    tmp_path, fs, url, here, monkeypatch
):
    monkeypatch.setattr(module, "_LISTED_FILES", 1)  # files in lists are replaced, too
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)
    export(SPARK, where(store), url, ExportOptions(file_bytes=SMALL))
    before = committed_files(url)
    lists = objects(fs, url, "_hastore/lists")
    assert lists
    summary = export(SPARK, where(store), url, ExportOptions(merge=True))
    assert (summary.merged_files, summary.merged_into) == (len(before), 1)
    assert values(url) == bodies(messages)
    monkeypatch.setattr(module, "_DAY_MS", 0)  # all objects are old, but replaced a moment ago
    with ObjectTarget(url) as target:
        target._clean()
    assert set(objects(fs, url, "_data")) == {*before, *committed_files(url)}
    assert set(lists) < set(objects(fs, url, "_hastore/lists"))


def test_files_in_lists_are_read_and_old_commits_removed(url, fs, here, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LISTED_FILES", 3)
    monkeypatch.setattr(module, "_KEPT_COMMITS", 4)
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)
    small = ExportOptions(file_bytes=SMALL, commit_every_s=0)
    summary = export(SPARK, where(store), url, small)
    assert summary.commits > 4
    assert len(objects(fs, url, "_hastore/lists")) == summary.files // 3
    assert len(objects(fs, url, "_hastore/commits")) == 4
    assert len(committed_files(url)) == summary.files
    assert values(url) == bodies(messages)


def test_what_no_reader_needs_is_removed_when_it_is_a_day_old(tmp_path, fs, url, here, monkeypatch):
    store, messages = tmp_path / "store", numbered(40)
    write_store(store, messages)
    small = ExportOptions(file_bytes=SMALL)
    export(SPARK, where(store), url, small)
    replaced = committed_files(url)
    with fs.open_output_stream(f"{url.removeprefix('s3://')}/_data/part-left.parquet") as file:
        file.write(b"x")
    export(SPARK, where(store), url, ExportOptions(merge=True))
    monkeypatch.setattr(module, "_DAY_MS", 0)
    before = objects(fs, url, "_data")
    with ObjectTarget(url) as target:
        target._began_ns -= 3600 * 10**9  # its tasks may have written all these files
        target.commit(target.state, [])
    assert objects(fs, url, "_data") == before
    with ObjectTarget(url) as target:
        target.commit(target.state, [])
    assert objects(fs, url, "_data") == committed_files(url)
    assert not set(replaced) & set(committed_files(url))
    assert values(url) == bodies(messages)


def test_tasks_of_a_compaction_write_to_a_bucket_and_read_there(fs, url):
    """Spark would need jars to read there. A file is a task, and its rows are in their order."""
    batch = pa.RecordBatch.from_pydict(
        {
            "key": [b"a", b"b", None, b"c"],
            "value": [b"1", b"", b"2", b"3"],
            "headers": pa.nulls(4, pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))),
            "tags": pa.nulls(4, pa.string()),
            FRESH: [True, True, True, False],
        }
    )
    writer = RowWriter(url, "_data/topic=t", "zstd", True, True, changes_staging=module.CHANGES)
    rows = [one for made in writer(iter([batch])) for one in made.to_pylist()]
    assert [(row["changes"], row["rows"], row["with_key"]) for row in rows] == [
        *((False, 3, 2), (True, 3, 2))
    ]
    assert [row["staged"].rpartition("/")[0] for row in rows] == ["_data/topic=t", module.CHANGES]
    reader = RowReader(url, tuple(row["staged"] for row in rows))
    for number, keys in enumerate([[b"a", None, b"c"], [b"a", b"b", None]]):
        tasks = iter([pa.RecordBatch.from_pydict({"id": [number]})])
        assert [key for got in reader(tasks) for key in got["key"].to_pylist()] == keys
    with pytest.raises(StoreError, match="part-none.*AWS_ENDPOINT_URL"):
        list(RowReader(url, ("part-none",))(iter([pa.RecordBatch.from_pydict({"id": [0]})])))


def test_files_that_are_no_data_stay_until_a_commit_removes_them(fs, url, monkeypatch):
    monkeypatch.setattr(module, "_DAY_MS", 0)  # each commit cleans, and all objects are old
    names = [f"{module.DATA}/part-1.parquet", f"{module.CHANGES}/1/part-2.parquet"]
    left = f"{module.CHANGES}/0/part-of-a-run-that-died.parquet"
    for name in (*names, left):
        with fs.open_output_stream(f"{url.removeprefix('s3://')}/{name}") as file:
            file.write(b"x")
    with ObjectTarget(url, "compact") as target:
        target._began_ns += 3600 * 10**9
        target.commit({}, [StagedFile(name, name, 1, 1) for name in names])
        assert target.files() == {names[0]: 1}
        assert committed_files(url) == [f"{url}/{names[0]}"]
        assert objects(fs, url, "_hastore/changes") == [f"{url}/{names[1]}"]
        target.commit({}, [], removed=[names[1]])
        target.commit({}, [])
        assert target.files() == {names[0]: 1}
    assert objects(fs, url, "_hastore/changes") == []
    assert objects(fs, url, "_data") == [f"{url}/{names[0]}"]


@pytest.mark.parametrize("first", ["ahead", "behind"])
def test_days_are_of_the_server_s_clock_not_of_a_machine_whose_time_is_wrong(
    fs, url, monkeypatch, first
):
    """A file that was replaced a moment ago stays, and the cleaning has its turn a day later."""
    true_ns = module.time.time_ns
    wrong_ns = 3 * DAY_MS * 1_000_000 * (1 if first == "ahead" else -1)
    names = [f"{module.DATA}/part-{number}.parquet" for number in range(2)]
    for name in names:
        with fs.open_output_stream(f"{url.removeprefix('s3://')}/{name}") as file:
            file.write(b"x")

    def commit(offset_ns, *args, **named):
        monkeypatch.setattr(module.time, "time_ns", lambda: true_ns() + offset_ns)
        with ObjectTarget(url, "compact") as target:
            target.commit({}, *args, **named)
        return target

    files = [StagedFile(name, name, 1, 1) for name in names]
    commit(-wrong_ns, files[:1])
    commit(wrong_ns, files[1:], removed=names[:1])
    target = commit(-wrong_ns, [])
    assert set(target._entry["replaced"]) == {names[0]}
    assert abs(target._entry["cleaned_ms"] - true_ns() // 1_000_000) < DAY_MS
    future = {**target._entry, "number": 4, "cleaned_ms": 2 * target._entry["cleaned_ms"]}
    Bucket(url).write_json(f"_hastore/commits/00000004-{'0' * 32}.json", future)
    assert commit(0, [])._entry["cleaned_ms"] < future["cleaned_ms"]


def test_places_that_cannot_be_a_target_are_refused(tmp_path, fs, url, monkeypatch):
    store = tmp_path / "store"
    write_store(store, numbered(3))
    root = url.removeprefix("s3://")
    with pytest.raises(UsageError, match="there is no bucket 'no-such-bucket'"):
        check_export(where(store), "s3://no-such-bucket/x", ExportOptions())
    for bad in ("s3://", "s3:///x", "s3://b//x"):
        with pytest.raises(UsageError, match="use s3://BUCKET/FOLDER"):
            Bucket(bad)
    with fs.open_output_stream(f"{root}/mine.csv") as file:
        file.write(b"x")
    with pytest.raises(UsageError, match="holds objects of something else"):
        check_export(where(store), url, ExportOptions())
    for refused in (
        lambda: check_export(where(store), "gs://bucket/x", ExportOptions()),
        lambda: compact(SPARK, where(store), "gs://bucket/x"),
    ):
        with pytest.raises(UsageError, match="also take s3://BUCKET/FOLDER"):
            refused()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("hastore.pipeline.places._ATTEMPTS", 1)
    refused = r"(?s)Could(n't| not) connect.*AWS_ENDPOINT_URL.*run the same"
    with pytest.raises(StoreError, match=refused):
        check_export(where(store), url, ExportOptions())


def test_commits_of_a_newer_version_and_damaged_ones_are_named(fs, url):
    root = url.removeprefix("s3://")
    for number, (data, error, text) in enumerate(
        [
            (json.dumps({"format": 2}).encode(), UsageError, "a newer version of hastore"),
            (b"{", StoreBrokenError, f"0002-{'0' * 32}.json is damaged"),
            (b"[]", StoreBrokenError, "it holds no object"),
        ],
        1,
    ):
        path = f"{root}/_hastore/commits/{number:08}-{'0' * 32}.json"
        with fs.open_output_stream(path) as file:
            file.write(data)
        with pytest.raises(error, match=text):
            ObjectTarget(url).look()


def test_orc_files_in_a_bucket(tmp_path, url, here):
    write_store(tmp_path / "store", numbered(5))
    export(SPARK, where(tmp_path / "store"), url, ExportOptions(format="orc"))
    assert values(url) == bodies(numbered(5))
    with pytest.raises(UsageError, match="is a target of `hastore pipeline export --format orc`"):
        check_export(where(tmp_path / "store"), url, ExportOptions())


def test_the_files_have_the_settings_of_those_in_folders(tmp_path, fs, url, here):
    write_store(tmp_path / "store", numbered(5))
    export(SPARK, where(tmp_path / "store"), url, ExportOptions(compression="zstd"))
    (file,) = committed_files(url)
    read = pq.read_metadata(file.removeprefix("s3://"), filesystem=fs)
    assert read.row_group(0).column(0).compression == "ZSTD"


def test_the_readers_of_the_documents_see_what_is_committed(tmp_path, url, here):
    write_store(tmp_path / "store", numbered(5))
    export(SPARK, where(tmp_path / "store"), url)
    (block,) = [b for b in blocks_of("docs/pipeline-jobs.md") if "committed_dataset" in b.text]
    arrow, spark = block.text.split("# Spark", 1)
    names = {}
    exec(compile(arrow.replace("s3://lake/flights", url), "docs", "exec"), names)
    assert len(names["frame"]) == 5

    class Reader:
        def option(self, name, value):
            assert (name, value) == ("basePath", url.replace("s3:", "s3a:") + "/_data")
            return self

        def parquet(self, *files):
            return list(files)

    reader = SimpleNamespace(read=Reader())
    names["spark"] = reader
    text = ("# Spark" + spark).replace("//lake/flights", url.removeprefix("s3:"))
    exec(compile(text, "docs", "exec"), names)
    assert names["flights"] == [f.replace("s3:", "s3a:") for f in committed_files(url)]
