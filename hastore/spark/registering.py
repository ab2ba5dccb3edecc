"""Make the format "hastore" known in a Spark session, and its workers able to import hastore."""

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import hastore
from hastore.spark.worker import ZONE, ZONE_VARIABLE

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_PATH_VARIABLE = "PYTHONPATH"
_CHOICES = ("spark.pyspark.python", "spark.sql.execution.pyspark.python")


def register(spark: "SparkSession", *, python: str | None = None) -> None:
    """Make `spark.read.format("hastore")` work in this session; may be called again.

    Call it once per session, also after `spark.stop()`. Where Spark runs on this machine alone
    (master `local[...]`), Python workers run this interpreter afterwards, unless PYSPARK_PYTHON or
    spark.pyspark.python chooses another. `python` chooses one, for example on a cluster whose
    workers have it under the same path. If hastore is not installed but imported from a folder,
    workers search that folder too. Times without a time zone are in the session's zone at the time
    of this call.
    """
    from hastore.spark.source import HastoreDataSource

    context: SparkContext | None = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is not None:
        if python is not None or _may_choose(spark, context):
            context.pythonExec = python or sys.executable
        folder = import_folder()
        if folder is not None:
            given = context.environment.get(_PATH_VARIABLE, "")
            context.environment[_PATH_VARIABLE] = put_first(folder, given)
        context.environment[ZONE_VARIABLE] = str(spark.conf.get(ZONE))
    spark.dataSource.register(HastoreDataSource)


def _may_choose(spark: "SparkSession", context: "SparkContext") -> bool:
    """Return whether the workers run here, and nobody has chosen an interpreter for them."""
    chosen = "PYSPARK_PYTHON" in os.environ or any(spark.conf.get(n, None) for n in _CHOICES)
    return str(context.master).startswith("local") and not chosen


def import_folder() -> str | None:
    """Return the folder from which hastore is imported, or None if it is installed there."""
    folder = str(Path(hastore.__file__).resolve().parent.parent)
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return None if folder in {str(Path(path).resolve()) for path in installed} else folder


def put_first(folder: str, paths: str) -> str:
    """Return a PYTHONPATH with a folder before the others."""
    others = [path for path in paths.split(os.pathsep) if path and path != folder]
    return os.pathsep.join([folder, *others])
