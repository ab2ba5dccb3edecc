"""Exports to ORC files, without Spark: tasks run in this process."""

from pathlib import Path

import pyarrow as pa
import pyarrow.orc as orc
import pytest

from hastore.errors import UsageError
from hastore.pipeline import export as export_job
from hastore.pipeline.export import ExportOptions, check_export, export
from hastore.pipeline.orc_files import OrcWriter, check_orc
from hastore.pipeline.where import Where
from hastore.spark.arrow.schema import Column, projection_of
from tests.pipeline.test_export_commits import SMALL, SPARK, bodies, overwrite, run_here
from tests.spark.stores import numbered, write_store

ORC = ExportOptions(format="orc", file_bytes=SMALL)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "lz4", "gzip", "none"])
def test_each_run_adds_what_is_new(tmp_path, monkeypatch, compression):
    store, target, messages = tmp_path / "store", tmp_path / "target", numbered(40)
    write_store(store, messages[:30])
    run_here(monkeypatch)
    where = Where(str(store), topics=("t",))
    options = ExportOptions(format="orc", file_bytes=SMALL, compression=compression)
    export(SPARK, where, str(target), options)
    overwrite(store, messages)
    assert export(SPARK, where, str(target), options).messages == 10
    files = list(Path(target).glob("topic=t/date=*/part-*.orc"))
    found = [value for file in files for value in orc.read_table(file)["value"].to_pylist()]
    assert sorted(found) == bodies(messages)
    kinds = {orc.ORCFile(file).compression for file in files}
    assert kinds == {{"gzip": "ZLIB", "none": "UNCOMPRESSED"}.get(compression, compression.upper())}
    with pytest.raises(UsageError, match="a target of `hastore pipeline export --format orc`"):
        check_export(where, str(target), ExportOptions())


def test_what_orc_cannot_do_is_refused(tmp_path):
    with pytest.raises(UsageError, match="ORC files are not merged: leave out --merge"):
        export_job.check_options(ExportOptions(format="orc", merge=True))
    check_orc(projection_of(Column).arrow_schema())
    with pytest.raises(UsageError, match=r"the column pause \(duration.*--format parquet"):
        check_orc(pa.schema([("pause", pa.duration("us"))]))


def test_a_file_of_a_task_that_failed_before_its_first_rows_is_closed(tmp_path):
    OrcWriter(str(tmp_path / "x"), "snappy").close()
    assert (tmp_path / "x").stat().st_size == 0
