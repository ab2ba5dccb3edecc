"""Make the format "hastore" known in a Spark session, and its workers able to import hastore."""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

import hastore
from hastore.errors import UsageError
from hastore.spark.source import HastoreDataSource
from hastore.spark.worker import ZONE, ZONE_VARIABLE, check_spark_version

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_PATH_VARIABLE = "PYTHONPATH"
_SERVERS_PYTHON = (
    "install hastore where the server runs, and set PYSPARK_PYTHON before the server starts (for "
    'remote("local[...]"): os.environ["PYSPARK_PYTHON"] = sys.executable)'
)
_WORKERS_PYTHON = (
    "install it there, or choose another by PYSPARK_PYTHON or register(spark, python=...)"
)
_CHOICES = ("spark.pyspark.python", "spark.sql.execution.pyspark.python")


def register(spark: "SparkSession", *, python: str | None = None) -> None:
    """Make `spark.read.format("hastore")` work in this session; may be called again.

    Call it once per session, also after `spark.stop()` and for `spark.newSession()`. Where Spark
    runs on this machine alone (master `local[...]`), Python workers run this interpreter
    afterwards, unless PYSPARK_PYTHON or spark.pyspark.python chooses another. `python` chooses one,
    for example on a cluster whose workers have it under the same path. If hastore is not installed
    but imported from a folder, workers search that folder too. Times without a time zone are in the
    session's zone at the time of this call.

    Raises UsageError if Spark is too old, if the Python that plans queries does not find hastore,
    or if `python` is given with Spark Connect: there the server chooses.
    """
    check_spark_version()
    context: SparkContext | None = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is None:
        if python is not None:
            raise UsageError(f"with Spark Connect the server chooses the Python; {_SERVERS_PYTHON}")
        spark.dataSource.register(HastoreDataSource)
        _check_importable(spark, "the Spark Connect server's Python", _SERVERS_PYTHON)
        return
    if python is not None or _may_choose(spark, context):
        context.pythonExec = python or sys.executable
    folder = import_folder()
    if folder is not None:
        given = context.environment.get(_PATH_VARIABLE, "")
        context.environment[_PATH_VARIABLE] = put_first(folder, given)
    context.environment[ZONE_VARIABLE] = str(spark.conf.get(ZONE))
    with _active(spark):
        spark.dataSource.register(HastoreDataSource)
    if context.pythonExec != sys.executable:
        whose = f"the Python of this session's workers, {context.pythonExec},"
        _check_importable(spark, whose, _WORKERS_PYTHON)


@contextlib.contextmanager
def _active(spark: "SparkSession") -> Iterator[None]:
    """Make a session the active one: Spark refuses names that another active session knows."""
    jvm: Any = spark._jvm
    sessions = getattr(jvm, "org.apache.spark.sql.classic.SparkSession")
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def _check_importable(spark: "SparkSession", whose: str, remedy: str) -> None:
    """Plan a query of nothing, to see whether the Python that plans queries finds hastore."""
    try:
        _ = spark.read.format(HastoreDataSource.name()).load("/", mode="log").schema
    except PySparkException as error:
        if "No module named 'hastore'" not in str(error):
            raise
        raise UsageError(f"{whose} does not find hastore; {remedy}") from None


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
