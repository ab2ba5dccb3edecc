"""Exports to Iceberg tables, without Spark: tasks run in this process, pyiceberg reads."""

import contextlib
import datetime
import json
import shutil
import sys
import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.types import LongType
from pyiceberg.utils.config import Config
from pyspark.sql import types as t

from hastore.cli.common import run_code
from hastore.cli.main import cli
from hastore.cli.pipeline import common
from hastore.errors import (
    HastoreError,
    StoreBrokenError,
    StoreError,
    StoreInUseError,
    UsageError,
)
from hastore.pipeline import export as export_job
from hastore.pipeline import iceberg as module
from hastore.pipeline.export import ExportOptions, check_export, export
from hastore.pipeline.iceberg import IcebergTarget
from hastore.pipeline.where import Where
from tests.documents.blocks import blocks_of
from tests.pipeline.s3 import client, new_target, s3_server
from tests.pipeline.test_export_commits import SMALL, SPARK, bodies, overwrite, run_here
from tests.pipeline.test_target import Crash, crash
from tests.spark.stores import numbered, write_store

DAY_MS = 24 * 3600 * 1000


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Run the tasks of exports in this process."""
    run_here(monkeypatch)


@pytest.fixture
def place(tmp_path):
    """A store with 40 of 60 messages, and a target."""
    messages = numbered(60)
    write_store(tmp_path / "store", messages[:40])
    return SimpleNamespace(
        store=tmp_path / "store", target=tmp_path / "lake", messages=messages, root=tmp_path
    )


@pytest.fixture
def lake(tmp_path, monkeypatch):
    """A catalog of pyiceberg's configuration, named `lake`."""
    variables = {
        "PYICEBERG_CATALOG__LAKE__URI": f"sqlite:///{tmp_path}/lake.db",
        "PYICEBERG_CATALOG__LAKE__WAREHOUSE": f"file://{tmp_path}/warehouse",
    }
    return configured(monkeypatch, variables)


def configured(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # read when it was imported


def where(store):
    return Where(str(store), topics=("t",))


def run(place, target=None, **options):
    target = place.target if target is None else target
    return export(SPARK, where(place.store), str(target), options_of(options))


def options_of(options):
    return ExportOptions(**{"format": "iceberg", **options})


@contextlib.contextmanager
def table_of(target):
    """The table in a target's own catalog."""
    with SqlCatalog("hastore", uri=f"sqlite:///{target}/catalog.db") as catalog:
        yield catalog.load_table("hastore.messages")


def files_of(target):
    files = sorted(target.glob("data/*/*/*.parquet"))
    return [pq.read_table(file, partitioning=None) for file in files]


def write_anew(store, messages):
    shutil.rmtree(store)
    write_store(store, messages)


def values(target):
    with table_of(target) as table:
        return sorted(table.scan(selected_fields=("value",)).to_arrow()["value"].to_pylist())


def test_each_run_adds_what_is_new_with_the_columns_of_a_delta_table(place):
    check_export(where(place.store), str(place.target), options_of({}))
    assert not place.target.exists()
    small = {"file_bytes": SMALL, "headers": True, "metadata": True}
    summary = run(place, **small)
    assert (summary.messages, summary.target, summary.commits) == (40, str(place.target), 1)
    assert summary.files > 2
    overwrite(place.store, place.messages)
    again = run(place)
    assert (again.messages, again.taken_over) == (20, ("--headers", "--metadata"))
    assert run(place).messages == 0
    assert values(place.target) == bodies(place.messages)
    run(place, place.root / "delta", **(small | {"format": "delta"}))
    deltalake = pytest.importorskip("deltalake")
    other = deltalake.DeltaTable(str(place.root / "delta")).to_pyarrow_table()
    with table_of(place.target) as table:
        assert len(table.snapshots()) == 2
        found = table.scan().to_arrow()
    assert found.schema.names == other.schema.names
    by = [("offset", "ascending")]
    # pyiceberg reads texts and bytes as the large types.
    rows, others = found.sort_by(by).to_pylist(), other.sort_by(by).to_pylist()
    for row in rows:
        row["headers"] = row["headers"] or None  # pyiceberg 0.12 reads null lists as empty ones
    assert rows == others
    assert all(file["headers"].null_count for file in files_of(place.target))
    with pytest.raises(UsageError, match="was with --metadata"):
        check_export(where(place.store), str(place.target), options_of({"metadata": False}))


def test_files_have_numbers_partitions_and_statistics_for_readers_that_skip_files(place):
    days = [
        (topic, queue, {**fields, "store_timestamp_ms": n * DAY_MS})
        for n, (topic, queue, fields) in enumerate(numbered(3))
    ]
    far = ("t", 0, {"body": b"far", "store_timestamp_ms": 2**62 // 1000})
    write_anew(place.store, [*days, far])
    assert run(place).files == 4
    with table_of(place.target) as table:
        files = table.inspect.files().to_pylist()
        assert [one["partition"] for one in sorted(files, key=lambda one: one["file_path"])] == [
            {"topic": "t", "date": day}
            for day in [*(datetime.date(1970, 1, n) for n in (1, 2, 3)), None]
        ]
        kept = table.scan("offset = 1")
        (task,) = kept.plan_files()
        assert "date=1970-01-02" in task.file.file_path
        assert kept.to_arrow()["value"].to_pylist() == [numbered(3)[1][2]["body"]]
        assert table.scan("date = '1970-01-03' and topic = 't'").count() == 1
        numbers = {one.name: one.field_id for one in table.schema().fields}
    (path,) = place.target.glob("data/topic=t/date=1970-01-01/*.parquet")
    schema = pq.read_schema(path)
    assert {f.name: int(f.metadata[b"PARQUET:field_id"]) for f in schema} == numbers


def test_a_column_that_was_renamed_and_one_that_was_added_do_not_stop_the_export(place):
    run(place, headers=True)
    with table_of(place.target) as table:
        with table.update_schema() as update:
            update.rename_column("offset", "position").add_column("mine", LongType())
    overwrite(place.store, place.messages)
    assert run(place).messages == 20
    with table_of(place.target) as table:
        found = table.scan().to_arrow()
    assert sorted(found["position"].to_pylist()) == list(range(60))
    assert found["mine"].null_count == 60


KINDS = (  # Spark would parse the DDL, and none runs here
    t.StructType()
    .add("a", t.ByteType())
    .add(
        "b",
        t.StructType()
        .add("c", t.ArrayType(t.IntegerType()))
        .add("d", t.MapType(t.StringType(), t.DecimalType(9, 2))),
    )
    .add("e", t.TimestampType())
    .add("f", t.DateType())
    .add("g", t.BooleanType())
    .add("h", t.FloatType())
)


def test_json_columns_of_every_kind(place, monkeypatch):
    body = {
        "a": 7,
        "b": {"c": [1, 2], "d": {"x": 1.25}},
        "e": "2026-11-22T10:00:00",
        "f": "2026-11-22",
        "g": True,
        "h": 0.5,
    }
    write_anew(
        place.store,
        [("t", 0, {"body": json.dumps(body).encode()}), ("t", 0, {"body": b"none"})],
    )
    monkeypatch.setattr("hastore.pipeline.export_options.parse_schema", lambda _: KINDS)
    summary = run(place, json_schema="a TINYINT, b STRUCT<...>", keep_value=False)
    assert summary.corrupt_bodies == 1
    with table_of(place.target) as table:
        first, second = table.scan().to_arrow().sort_by("offset").to_pylist()
    assert first["b"]["c"] == [1, 2] and str(dict(first["b"]["d"])["x"]) == "1.25"
    assert (first["a"], str(first["f"]), first["g"], first["h"]) == (7, "2026-11-22", True, 0.5)
    assert first["e"] == datetime.datetime(2026, 11, 22, 10, tzinfo=datetime.UTC)
    assert (second["a"], second["_corrupt"]) == (None, b"none")


@pytest.mark.parametrize("moment", ["make", "files", "before", "within", "after"])
def test_a_run_that_is_killed_at_any_moment_leaves_each_message_once(place, monkeypatch, moment):
    """The catalog's own step is `commit_table`: before it nothing counts, and after it all does."""
    if moment != "make":
        run(place)
        overwrite(place.store, place.messages)
    append, commit_table = IcebergTarget._append, SqlCatalog.commit_table

    def append_and_die(*args):
        append(*args)
        raise Crash

    def write_and_die(self, *args):
        monkeypatch.setattr(SqlCatalog, "_write_metadata", crash)
        commit_table(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        if moment == "make":
            patch.setattr(export_job, "_write_all", crash)
        elif moment == "files":
            patch.setattr(IcebergTarget, "commit", crash)
        elif moment == "before":
            patch.setattr(IcebergTarget, "_append", crash)
        elif moment == "within":
            patch.setattr(SqlCatalog, "commit_table", write_and_die)
        else:
            patch.setattr(IcebergTarget, "_append", append_and_die)
        run(place, headers=True if moment == "make" else None)
    monkeypatch.undo()
    run_here(monkeypatch)
    there = {"make": 0, "after": 60}.get(moment, 40)
    assert len(values(place.target)) == there
    store = 40 if moment == "make" else 60
    assert run(place).messages == store - there
    assert values(place.target) == bodies(place.messages[:store])


def test_a_table_of_a_run_that_died_before_its_first_commit_gets_the_columns_of_the_next_run(
    place, monkeypatch
):
    """The options of that run bind nobody: it has stored nothing."""
    write_anew(place.store, [("t", 0, {"body": b'{"a": 1}'})])
    kinds = iter([t.StructType().add("a", one) for one in (t.IntegerType(), t.StringType())])
    monkeypatch.setattr("hastore.pipeline.export_options.parse_schema", lambda _: next(kinds))
    for options in ({}, {"json_schema": "a int"}):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(IcebergTarget, "commit", crash)
            run(place, **options)
    # A number for the text, or no number at all: a file that no reader could take.
    assert run(place, json_schema="a string", headers=True, metadata=True).corrupt_bodies == 1
    with table_of(place.target) as table:
        found = table.scan().to_arrow()
    assert found["a"].to_pylist() == [None] and found["_corrupt"].to_pylist() == [b'{"a": 1}']
    assert {"headers", "physicalOffset"} <= set(found.column_names)


def test_rows_of_another_program_in_a_table_without_a_commit_are_not_dropped(place, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(IcebergTarget, "commit", crash)
        run(place)
    with table_of(place.target) as table:
        day = datetime.date(2026, 11, 22)
        table.append(pa.table({"topic": ["t"], "date": [day], "offset": [7]}))
    with pytest.raises(UsageError, match="has other columns than this export, and rows of another"):
        run(place, headers=True)
    with table_of(place.target) as table:
        assert table.scan().to_arrow()["offset"].to_pylist() == [7]


def test_a_commit_whose_answer_is_lost_is_found(place, monkeypatch):
    commit_table = SqlCatalog.commit_table

    def lost(error):
        def commit(self, *args):
            monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
            commit_table(self, *args)
            raise error

        monkeypatch.setattr(SqlCatalog, "commit_table", commit)

    lost(CommitFailedException("repeated by the transport"))
    assert run(place).commits == 1
    overwrite(place.store, place.messages)
    lost(OSError("no answer"))
    with pytest.raises(OSError, match="no answer"):
        run(place)
    assert run(place).messages == 0
    assert values(place.target) == bodies(place.messages)


@pytest.mark.parametrize("moment", ["tasks", "commit"])
def test_of_two_runs_at_once_the_one_that_commits_later_is_refused(place, monkeypatch, moment):
    """At the moment of the commit too, when pyiceberg would try again on the other run's table."""
    run(place)
    overwrite(place.store, place.messages)

    def other():
        monkeypatch.undo()
        run_here(monkeypatch)
        assert run(place).messages == 20

    commit_table = SqlCatalog.commit_table
    if moment == "tasks":
        run_here(monkeypatch, lambda _: other())
    else:
        monkeypatch.setattr(
            SqlCatalog, "commit_table", lambda *args: (other(), commit_table(*args))[1]
        )
    with pytest.raises(StoreInUseError, match="another run has exported to"):
        run(place)
    assert values(place.target) == bodies(place.messages)


def test_two_first_runs_at_once_make_one_table(place, monkeypatch):
    make = IcebergTarget._make

    def make_after_another_run(self, schema):
        monkeypatch.setattr(IcebergTarget, "_make", make)
        assert run(place).messages == 40
        return make(self, schema)

    monkeypatch.setattr(IcebergTarget, "_make", make_after_another_run)
    with pytest.raises(StoreInUseError, match="another run has made the Iceberg table"):
        run(place)
    assert values(place.target) == bodies(place.messages[:40])


def test_a_first_run_is_refused_if_another_one_makes_the_table_anew(place, monkeypatch):
    """Its files have the numbers of the columns of the table that it knew."""

    def other(_):
        monkeypatch.undo()
        with monkeypatch.context() as patch, pytest.raises(Crash):
            run_here(patch)
            patch.setattr(IcebergTarget, "commit", crash)
            run(place, headers=True)

    run_here(monkeypatch, other)
    with pytest.raises(StoreError, match=r"UUID .* run the same command again"):
        run(place)
    run_here(monkeypatch)
    assert run(place, headers=True).messages == 40
    assert values(place.target) == bodies(place.messages[:40])


def test_a_commit_goes_on_when_another_program_has_changed_the_table(place, monkeypatch):
    run(place)
    overwrite(place.store, place.messages)
    with table_of(place.target) as table, table.transaction() as change:
        change.set_properties({"commit.retry.num-retries": "2", "commit.retry.min-wait-ms": "0"})
    commit_table, tries = SqlCatalog.commit_table, []

    def after_a_deletion(self, *args):
        tries.append(1)
        if len(tries) in deleted:
            with monkeypatch.context() as patch:
                patch.setattr(SqlCatalog, "commit_table", commit_table)
                with table_of(place.target) as table:
                    table.delete(f"offset = {len(tries)}")
        return commit_table(self, *args)

    deleted = {1, 2}
    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", after_a_deletion)
        assert run(place).messages == 20
    assert len(tries) == 3
    kept = [message for n, message in enumerate(place.messages) if n not in deleted]
    assert values(place.target) == bodies(kept)
    assert run(place).messages == 0
    overwrite(place.store, [*place.messages, place.messages[0]])
    deleted = {4, 5, 6}
    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", after_a_deletion)
        with pytest.raises(HastoreError, match="other programs changed"):
            run(place)
    assert run(place).messages == 1


def test_a_table_that_was_set_back_is_refused_and_old_snapshots_may_go(place):
    run(place)
    overwrite(place.store, place.messages)
    run(place)
    with table_of(place.target) as table:
        first, last = (one.snapshot_id for one in table.snapshots())
        table.manage_snapshots().set_current_snapshot(snapshot_id=first).commit()
    with pytest.raises(StoreBrokenError, match="up to 1, but commit 2 took place.*set back"):
        run(place)
    with table_of(place.target) as table:
        table.manage_snapshots().set_current_snapshot(snapshot_id=last).commit()
        table.delete("offset = 5")
        table.maintenance.expire_snapshots().by_id(first).commit()
        table.maintenance.expire_snapshots().by_id(last).commit()
    overwrite(place.store, [*place.messages, place.messages[0]])
    assert run(place).messages == 1
    assert len(values(place.target)) == 60


def test_no_commit_is_made_before_the_time_of_the_one_before(place, monkeypatch):
    """Iceberg for Java, Go and Rust reads no table whose commits go back by more than a minute."""
    now_s = time.time()

    def clock(context, ahead_s):
        now = SimpleNamespace(time=lambda: now_s + ahead_s)
        context.setattr("pyiceberg.table.snapshots.time", now)
        wall = SimpleNamespace(wall_ms=lambda: int(1000 * (now_s + ahead_s)))
        context.setattr(module, "SYSTEM_CLOCK", wall)

    with monkeypatch.context() as context:
        clock(context, 3_600)
        run(place)
    overwrite(place.store, place.messages)
    with pytest.raises(HastoreError, match=r"time is \d+ s ahead of this machine's clock"):
        run(place)
    with table_of(place.target) as table:
        assert len(table.snapshots()) == 1
    with monkeypatch.context() as context:
        clock(context, 3_550)  # as near as the clocks of two machines may be
        assert run(place).messages == 20
    assert values(place.target) == bodies(place.messages)


def test_a_range_without_messages_is_committed_too(place, monkeypatch):
    """Retention removed them; the positions go on, and exclude another run."""
    run(place)
    with IcebergTarget(str(place.target)) as target:
        target.prepare(pa.schema([]))
        target.commit({**target.state, "note": 1}, [])
    with IcebergTarget(str(place.target)) as target:
        assert (target.number, target.state["note"]) == (2, 1)
    assert values(place.target) == bodies(place.messages[:40])


def test_a_table_in_a_catalog_of_the_configuration(place, lake):
    options = {"catalog": "lake", "table": "flights.raw.messages"}
    given = options_of(options)
    check_export(where(place.store), None, given)
    summary = export(SPARK, where(place.store), None, given)
    assert (summary.messages, summary.target) == (40, "lake.flights.raw.messages")
    overwrite(place.store, place.messages)
    assert export(SPARK, where(place.store), None, given).messages == 20
    with load_catalog("lake") as catalog:
        table = catalog.load_table("flights.raw.messages")
        assert table.location().startswith(f"file://{place.root}/warehouse")
        assert table.scan().count() == 60
    with pytest.raises(UsageError, match="lies at .*warehouse.*; leave out --target"):
        run(place, **options)
    other = {**options, "table": "flights.other"}
    assert run(place, **other).messages == 60
    assert run(place, **other).messages == 0  # the target may be given again
    assert list(place.target.glob("data/*/*/*.parquet"))


def test_a_table_in_a_bucket(place, monkeypatch):
    with s3_server() as variables:
        url = new_target(client())
        s3 = {
            "ENDPOINT": variables["AWS_ENDPOINT_URL"],
            "REGION": "us-east-1",
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "secret",
        }
        given = {f"PYICEBERG_CATALOG__LAKE__S3__{name}": value for name, value in s3.items()}
        given["PYICEBERG_CATALOG__LAKE__URI"] = f"sqlite:///{place.root}/lake.db"
        configured(monkeypatch, given)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        options = {"catalog": "lake", "table": "a.b"}
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(IcebergTarget, "_append", crash)
            run(place, url, **options)
        assert run(place, url.replace("s3:", "s3a:"), **options).messages == 40
        overwrite(place.store, place.messages)
        assert run(place, url, **options).messages == 20
        with load_catalog("lake") as catalog:
            table = catalog.load_table("a.b")
            paths = table.inspect.files()["file_path"].to_pylist()
            assert all(path.startswith(f"{url}/data/topic=t/") for path in paths)
            found = table.scan().to_arrow()["value"].to_pylist()
        assert sorted(found) == bodies(place.messages)


def test_what_cannot_be_a_target_is_said_before_anything_is_written(place, lake, monkeypatch):
    def wrong(text, target=place.target, error=UsageError, **options):
        with pytest.raises(error, match=text):
            target = None if target is None else str(target)
            check_export(where(place.store), target, options_of(options))

    wrong("leave out --merge", merge=True)
    wrong("are for --format iceberg", format="delta", catalog="lake", table="a.b")
    wrong("give --catalog and --table together", catalog="lake")
    for name in ("x", "a.", ".b", "a..b"):
        wrong("write NAMESPACE.NAME", catalog="lake", table=name)
    wrong("needs a catalog elsewhere", "s3://bucket/x")
    wrong("give a target", None, format="delta")
    wrong("has one of the characters", place.root / "a#b")
    wrong("pyiceberg knows no catalog 'none'.*CATALOG__NONE__URI", catalog="none", table="a.b")
    file = place.root / "file"
    file.touch()
    wrong("is a file; name a folder", file)
    wrong("holds files of something else", place.store)
    run(place, place.root / "parquet", format="parquet")
    wrong("holds files of something else", place.root / "parquet")
    with load_catalog("lake") as catalog:
        catalog.create_namespace("a")
        catalog.create_table("a.b", pa.schema([("x", pa.int64())]))
    wrong("another program made the Iceberg table lake.a.b", None, catalog="lake", table="a.b")
    monkeypatch.setenv("PYICEBERG_CATALOG__GONE__URI", f"sqlite:///{place.root}/no/folder.db")
    configured(monkeypatch, {})
    wrong("gone.a.b: OperationalError.*run the same", None, StoreError, catalog="gone", table="a.b")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "hastore.pipeline.iceberg")
        patch.setitem(sys.modules, "pyiceberg.catalog", None)
        wrong(r'pip install "hastore\[iceberg\]"')
    assert sorted(one.name for one in place.root.iterdir()) == [
        *("file", "lake.db", "parquet", "store", "warehouse")
    ]


def test_a_table_that_was_changed_too_much_is_refused(place):
    run(place)
    for properties, error, text in (
        ({"hastore-export.format": "2"}, UsageError, "a newer version of hastore"),
        ({"hastore-export.state": "{"}, StoreBrokenError, "property hastore-export.state of"),
    ):
        with table_of(place.target) as table:
            before = {name: table.properties[name] for name in properties}
            with table.transaction() as change:
                change.set_properties(properties)
        with pytest.raises(error, match=text):
            run(place)
        with table_of(place.target) as table, table.transaction() as change:
            change.set_properties(before)
    with table_of(place.target) as table, table.update_spec() as update:
        update.remove_field("date")
    with pytest.raises(UsageError, match="no longer partitioned by topic and date"):
        run(place)


def test_the_commands_and_the_reader_of_the_documents(place, lake, monkeypatch, capsys):
    monkeypatch.setattr(common, "_open", lambda *_: contextlib.nullcontext(SPARK))
    places = {"data/node2": place.store, "lake/flights-table": place.target}
    places["topic flights"] = "topic t"

    def here(text):
        for shown, own in places.items():
            text = text.replace(shown, str(own))
        return text

    blocks = [block.text for block in blocks_of("docs/pipeline-jobs.md")]
    (commands,) = [text for text in blocks if "--format iceberg" in text]
    for line in commands.splitlines():
        _, *words = here(line).split()
        assert run_code(cli, "hastore", [*words, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["messages"], said["commits"]) == (40, 1)
        assert said["target"] in (str(place.target), "lake.raw.flights")
    names = {}
    text = here(next(text for text in blocks if "SqlCatalog" in text))
    text = text.replace("2026-11-22", "1970-01-01")
    exec(compile(text, "docs", "exec"), names)
    assert len(names["flights"]) == 40
    names["catalog"].close()


def test_locations_that_an_export_can_write_to():
    assert module._root("file:///a/b/") == module._root("file:/a/b") == "/a/b"
    assert module._root("s3a://b/c/") == "s3://b/c"
    with pytest.raises(UsageError, match="to folders and to s3:// only"):
        module._root("gs://b/c")


@pytest.mark.parametrize("target", ["a#b", "a?b", "s3://none-such/a#b"])
def test_a_table_of_a_catalog_is_not_made_where_its_files_are_not_found(place, lake, target):
    """pyiceberg ends a location at # and ?: all of its own files would be one, `a`."""
    target = target if "://" in target else place.root / target
    with pytest.raises(UsageError, match="one of the characters # [?]"):
        run(place, target, catalog="lake", table="raw.t")
    assert not (place.root / "a").exists()
