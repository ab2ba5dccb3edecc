"""Refuse a Spark that is too old for the data source, in one sentence."""

import re

import pyspark

from hastore.errors import UsageError

MIN_SPARK = (4, 2)  # the first in which a Python source limits what a stream's batch reads


def check_spark_version(version: str = pyspark.__version__) -> None:
    """Raise UsageError if this pyspark is older than MIN_SPARK."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < MIN_SPARK:
        least = ".".join(map(str, MIN_SPARK))
        raise UsageError(
            f"format 'hastore' needs Spark {least} or later; this is pyspark {version}"
        )
