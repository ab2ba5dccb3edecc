"""The bare source of the benchmarks: it yields what the reader yields, from files."""

from pyspark.sql.datasource import CaseInsensitiveDict

from benchmarks.spark.bare_source import BareSource, prepare
from hastore.spark.source import HastoreDataSource
from tests.spark.stores import numbered, write_store


def test_the_bare_source_yields_the_batches_of_the_reader_a_file_for_each_task(tmp_path):
    write_store(tmp_path / "store", [*numbered(5), ("t", 1, {"body": b"of another queue"})])
    source = HastoreDataSource(CaseInsensitiveDict(path=str(tmp_path / "store"), subscribe="t"))
    reader = source.reader(source.schema())
    prepare(reader, tmp_path / "bare")
    bare = BareSource(CaseInsensitiveDict(path=str(tmp_path / "bare"))).reader(source.schema())
    tasks = reader.partitions()
    assert len(tasks) == 2
    for one, other in zip(tasks, bare.partitions(), strict=True):
        assert list(bare.read(other)) == list(reader.read(one))
