"""Let Spark find the format "hastore" by itself.

Spark looks for a `DefaultSource` in top-level modules named `pyspark_*`. It imports this module in
every application that uses any Python data source, so the module stays light: the source imports
numpy, pyarrow and the client only when a hastore query is planned.
"""

from hastore.spark.source import HastoreDataSource as DefaultSource

__all__ = ["DefaultSource"]
