"""Register format "hastore" without a call.

Spark looks into top-level modules named `pyspark_*` for a `DefaultSource`.

Spark imports this module in every application that uses any Python data source, so it stays light:
the source loads numpy, pyarrow and the client only when a hastore query is planned.
"""

from hastore.spark.source import HastoreDataSource as DefaultSource

__all__ = ["DefaultSource"]
