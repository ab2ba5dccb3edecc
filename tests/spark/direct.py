"""Read with the data source's classes as Spark calls them, without Spark: it takes milliseconds."""

from pyspark.sql.datasource import CaseInsensitiveDict

from hastore.spark.source import HastoreDataSource


def batches(schema=None, **options):
    """Plan a batch read with these options and run its tasks; return their Arrow batches."""
    source = HastoreDataSource(CaseInsensitiveDict(options))
    reader = source.reader(source.schema() if schema is None else schema)
    return [batch for part in reader.partitions() for batch in reader.read(part)]


def rows(**options):
    """Return the rows of a batch read as dictionaries."""
    return [row for batch in batches(**options) for row in batch.to_pylist()]
