"""Read hastore logs from Spark.

`register(spark)` makes the format "hastore" known in a session. `read_topic(spark, ...)` does this
too, and returns a topic as a DataFrame. Spark imports this package in every Python process that
looks for data sources, so it stays light.
"""

from hastore.spark.registering import register
from hastore.spark.topics import read_topic

__all__ = ["read_topic", "register"]
