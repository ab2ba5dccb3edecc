"""Exports to a Delta table in a bucket of a real S3 server (moto's), without Spark."""

import json
import subprocess
import sys

import deltalake
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from hastore.errors import StoreBrokenError, StoreError, StoreInUseError, UsageError
from hastore.pipeline import delta_objects as module
from hastore.pipeline.delta import DeltaLog
from hastore.pipeline.delta_objects import DeltaObjectTarget
from hastore.pipeline.export import ExportOptions, check_export, export
from hastore.pipeline.places import Bucket
from hastore.pipeline.where import Where
from tests.documents.blocks import blocks_of
from tests.pipeline.s3 import client, new_target, s3_server
from tests.pipeline.test_export_commits import SMALL, SPARK, bodies, overwrite, run_here
from tests.pipeline.test_target import Crash, crash
from tests.spark.stores import numbered, write_store

OPTIONS = {"aws_allow_http": "true"}
MESSAGES = numbered(60)


@pytest.fixture(scope="module")
def server():
    with s3_server():
        yield


@pytest.fixture
def fs(server):
    return client()


@pytest.fixture
def url(fs, monkeypatch):
    run_here(monkeypatch)
    return new_target(fs)


@pytest.fixture
def store(tmp_path):
    """A store with 40 of the 60 messages."""
    write_store(tmp_path / "store", MESSAGES[:40])
    return tmp_path / "store"


def where(store):
    return Where(str(store), topics=("t",))


def run(store, url, **options):
    return export(SPARK, where(store), url, ExportOptions(format="delta", **options))


def table_of(url):
    return deltalake.DeltaTable(url, storage_options=OPTIONS)


def change(url, call):
    """Call a table in another process: deltalake keeps the server's thread in this one waiting."""
    table = f"deltalake.DeltaTable({url!r}, storage_options={OPTIONS})"
    code = f"import deltalake; {table}.{call}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def values(url):
    return sorted(table_of(url).to_pyarrow_table(columns=["value"])["value"].to_pylist())


def names(fs, url, folder=""):
    found = fs.get_file_info(pafs.FileSelector(url.removeprefix("s3://") + folder))
    return sorted(info.base_name for info in found)


def test_each_run_adds_what_is_new_and_merges(store, fs, url):
    check_export(where(store), url, ExportOptions(format="delta"))
    summary = run(store, url, file_bytes=SMALL, headers=True)
    assert (summary.messages, summary.target, summary.commits) == (40, url, 1)
    overwrite(store, MESSAGES)
    again = run(store, url.replace("s3:", "s3a:") + "/")
    assert (again.messages, again.taken_over) == (20, ("--headers",))
    assert values(url) == bodies(MESSAGES)
    assert table_of(url).version() == 1
    table = table_of(url).to_pyarrow_table()
    assert table.schema.names[-2:] == ["topic", "date"] and set(table["topic"].to_pylist()) == {"t"}
    merged = run(store, url, merge=True)
    assert merged.messages == 0 and merged.merged_files > merged.merged_into == 1
    assert values(url) == bodies(MESSAGES)
    overwrite(store, [*MESSAGES, MESSAGES[0]])
    assert run(store, url).messages == 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("moment", ["files", "state", "after"])
def test_a_run_that_is_killed_at_any_moment_leaves_each_message_once(
    store, url, monkeypatch, moment, first
):
    before = 0
    if not first:
        before = run(store, url).messages
        overwrite(store, MESSAGES)
    add = DeltaLog.add

    def add_and_die(*args):
        add(*args)
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        if moment == "files":
            patch.setattr(Bucket, "write_json", crash)
        else:
            patch.setattr(DeltaLog, "add", crash if moment == "state" else add_and_die)
        run(store, url)
    there = 40 if first else 60
    committed = there if moment == "after" else before
    assert (values(url) if committed else []) == bodies(MESSAGES[:committed])
    assert run(store, url).messages == there - committed
    assert values(url) == bodies(MESSAGES[:there])


@pytest.mark.parametrize("failure", [OSError("no answer"), DeltaError("no answer")])
def test_a_commit_whose_answer_is_lost_is_found(store, url, monkeypatch, failure):
    add = DeltaLog.add

    def lost(*args):
        add(*args)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "add", lost)
        assert run(store, url).commits == 1
        patch.setattr(DeltaLog, "add", lambda *_: (_ for _ in ()).throw(failure))
        overwrite(store, MESSAGES)
        with pytest.raises(StoreError, match="no answer.*again"):
            run(store, url)
    assert run(store, url).messages == 20
    assert values(url) == bodies(MESSAGES)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("moment", ["tasks", "commit"])
def test_of_two_runs_at_once_the_one_that_commits_later_is_refused(
    store, url, monkeypatch, moment, first
):
    """At the moment of the commit too: the server takes one object of a name, and keeps it."""
    if not first:
        run(store, url)
        overwrite(store, MESSAGES)
    there = 40 if first else 60
    add = DeltaLog.add

    def other(*args):
        monkeypatch.undo()
        run_here(monkeypatch)
        assert run(store, url).messages == there - (0 if first else 40)
        return args

    if moment == "tasks":
        run_here(monkeypatch, other)
    else:
        monkeypatch.setattr(DeltaLog, "add", lambda *args: add(*other(*args)))
    with pytest.raises(StoreInUseError, match="another run has exported to"):
        run(store, url)
    assert values(url) == bodies(MESSAGES[:there])
    assert run(store, url).messages == 0


def test_other_programs_may_change_the_table_at_the_moment_of_the_commit(store, url, monkeypatch):
    run(store, url, file_bytes=SMALL)
    overwrite(store, MESSAGES)
    add = DeltaLog.add

    def after_a_merge(*args):
        table_of(url).optimize.compact()
        add(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "add", after_a_merge)
        assert run(store, url).messages == 20
    assert values(url) == bodies(MESSAGES)


def test_old_states_are_removed(store, fs, url, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_COMMITS", 2)
    summary = run(store, url, file_bytes=SMALL, commit_every_s=0)
    assert summary.commits > 4
    assert len(names(fs, url, "/_hastore/commits")) == 3
    assert run(store, url).messages == 0


def test_a_table_that_was_set_back_is_refused(store, fs, url):
    run(store, url, file_bytes=SMALL, commit_every_s=0)
    root = url.removeprefix("s3://")
    for version in sorted(names(fs, url, "/_delta_log"))[1:]:
        fs.delete_file(f"{root}/_delta_log/{version}")
    with pytest.raises(StoreBrokenError, match="up to 1, but commit .* was set back"):
        run(store, url)


def test_a_table_that_was_restored_to_an_older_version_is_refused(store, url, monkeypatch):
    run(store, url)
    overwrite(store, MESSAGES)
    run(store, url)
    change(url, "restore(0)")
    overwrite(store, [*MESSAGES, MESSAGES[0]])
    with pytest.raises(StoreBrokenError, match="up to 1, but commit 2 took place.*set back"):
        run(store, url)
    change(url, "restore(1)")
    assert run(store, url).messages == 1
    overwrite(store, [*MESSAGES, *MESSAGES[:2]])
    run_here(monkeypatch, lambda number: change(url, "restore(0)"))
    with pytest.raises(StoreBrokenError, match="up to 1, but commit 3 took place.*set back"):
        run(store, url)


def test_a_table_that_forgets_the_number_of_its_last_commit_goes_on(store, fs, url, monkeypatch):
    run(store, url)
    forget = {"delta.setTransactionRetentionDuration": "interval 0 seconds"}
    change(url, f"alter.set_table_properties({forget})")
    overwrite(store, MESSAGES)
    assert run(store, url).messages == 20
    assert values(url) == bodies(MESSAGES)
    state = f"{url.removeprefix('s3://')}/_hastore/commits/00000002-"
    with fs.open_output_stream(f"{state}{1:016x}.json"):
        pass  # of a run that died before its commit, or of the one that made it
    with pytest.raises(StoreBrokenError, match="has removed the number"):
        run(store, url)
    fs.delete_file(f"{state}{1:016x}.json")
    monkeypatch.setattr(DeltaLog, "_history_at", lambda *_: None)
    with pytest.raises(StoreBrokenError, match="has removed the number"):
        run(store, url)


def test_places_that_cannot_be_a_target_are_refused(store, fs, url, monkeypatch):
    given = ExportOptions(format="delta")
    root = url.removeprefix("s3://")

    def wrong(text, error=UsageError, target=url):
        with pytest.raises(error, match=text):
            check_export(where(store), target, given)

    wrong("there is no bucket 'none-such'", target="s3://none-such/x")
    with fs.open_output_stream(f"{root}/mine.csv") as file:
        file.write(b"x")
    wrong("holds objects of something else")
    files = new_target(fs)
    export(SPARK, where(store), files)
    wrong("holds objects of something else", target=files)
    other = new_target(fs)
    write_deltalake(other, pa.table({"x": [1]}), storage_options=OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "_history_at", None)  # it may be long
        wrong("another program made the Delta table", target=other)
    run(store, made := new_target(fs))
    with pytest.raises(UsageError, match="holds objects of something else"):
        check_export(where(store), made, ExportOptions())
    (name,) = names(fs, made, "/_hastore/commits")
    path = f"{made.removeprefix('s3://')}/_hastore/commits/{name}"
    with fs.open_output_stream(path) as file:
        file.write(json.dumps({"format": 2}).encode())
    wrong("a newer version of hastore", target=made)
    fs.delete_file(path)
    wrong("has no state of its commit 1", StoreBrokenError, target=made)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("hastore.pipeline.places._ATTEMPTS", 1)
    wrong("Could(n't| not) connect.*AWS_ENDPOINT_URL.*run the same", StoreError)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b"])
def test_a_place_that_deltalake_takes_for_another_is_refused(store, fs, url, name):
    """The table would be at `a`, or `a b`, and its files at the place itself: nobody reads them."""
    given = ExportOptions(format="delta")
    for call in (check_export, lambda *_: run(store, f"{url}/{name}")):
        with pytest.raises(UsageError, match=f"{name}, which deltalake takes for another"):
            call(where(store), f"{url}/{name}", given)
    assert fs.get_file_info(url.removeprefix("s3://")).type == pafs.FileType.NotFound


@pytest.mark.parametrize("name", ["a b", "\u00e4", "a+b", "a%b", "x=y"])
def test_other_names_of_places_are_taken(store, url, name):
    assert run(store, f"{url}/{name}").messages == 40
    assert values(f"{url}/{name}") == bodies(MESSAGES[:40])
    assert run(store, f"{url}/{name}").messages == 0


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "a\\b", "a\nb"])
def test_a_folder_that_deltalake_takes_for_another_is_refused(store, tmp_path, monkeypatch, name):
    run_here(monkeypatch)
    run(store, str(tmp_path / "lake #1?"))
    with pytest.raises(UsageError, match="which deltalake takes for another"):
        run(store, str(tmp_path / name))
    assert not (tmp_path / name).exists()


def test_the_reader_of_the_documents_sees_the_messages(store, url):
    run(store, url)
    (block,) = [b for b in blocks_of("docs/pipeline-jobs.md") if "aws_allow_http" in b.text]
    names = {}
    exec(compile(block.text.replace("s3://lake/flights", url), "docs", "exec"), names)
    assert len(names["frame"]) == 40


def test_errors_of_delta_are_one_line_without_colours(url):
    target = DeltaObjectTarget(url)
    with pytest.raises(StoreError) as raised, target._named():
        raise OSError("Kernel error\n  \x1b[31m↳\x1b[0m Error performing GET")
    assert "Kernel error Error performing GET. Check" in str(raised.value)
    with pytest.raises(StoreError, match="Failed: conflict. Run the job again"), target._named():
        raise DeltaError("Failed:\n \x1b[31mconflict\x1b[0m")
