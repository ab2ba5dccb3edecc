"""Read hastore logs from Spark.

`register(spark)` makes the format "hastore" known in a session. `read_topic(spark, ...)` does this
too, and returns a topic as a DataFrame. `lag(query)` says how far a stream is behind. Spark imports
this package in every Python process that looks for data sources, so it stays light.
"""

from hastore.spark.registering import register
from hastore.spark.topics import QueueLag, lag, read_topic

__all__ = ["QueueLag", "lag", "read_topic", "register"]
