"""Start a local Spark session that sees format "hastore", for the demo, the jobs and the tests."""

import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import hastore
from hastore.errors import HastoreError
from hastore.spark.java_runtime import find_java, java_home_for_spark

_TAIL_BYTES = 4_000
_LOOPBACK = "127.0.0.1"
_END_S = 30.0


def local_session(
    app_name: str,
    *,
    master: str = "local[*]",
    memory: str = "1g",
    settings: Mapping[str, str] | None = None,
    quiet: bool = True,
) -> SparkSession:
    """Return a session in this process's own JVM, on loopback, without a web page; takes 5 to 10 s.

    Workers run this interpreter and see this hastore, installed or not. With `quiet` the JVM's own
    output is kept aside, and shown only if it does not start. A session that is already active is
    returned as it is. Raises UsageError without a usable Java, HastoreError when Spark does not
    start. Stop it by `stop()`, the JVM ends with this process then; or by `end_session`.
    """
    # A pandas newer than this pyspark's is none of ours: nothing here uses pandas.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    conf = SparkConf().setAppName(app_name).setMaster(master)
    conf.setAll(list(_settings(memory).items()))
    conf.setAll(list((settings or {}).items()))
    if SparkContext._gateway is None:
        os.environ.update(_environment())
        _start(conf, quiet=quiet)
    else:
        SparkContext(conf=conf)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def end_session(spark: SparkSession) -> None:
    """Stop a session and its JVM, and wait until that has ended with all its workers.

    HastoreError when it does not end within 30 s. A later session in this process starts another.
    """
    spark.stop()
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is None:
        return
    jvm = gateway.proc
    gateway.shutdown()
    jvm.stdin.close()  # it ends when its parent's end of this pipe does
    try:
        jvm.wait(_END_S)
    except subprocess.TimeoutExpired as late:
        jvm.kill()
        jvm.wait()
        raise HastoreError(f"Spark's JVM did not end within {_END_S:g} s") from late


def _settings(memory: str) -> dict[str, str]:
    return {
        "spark.driver.memory": memory,
        "spark.driver.bindAddress": _LOOPBACK,
        "spark.driver.host": _LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        # An error of the source reads as its own text, not as Spark's frames.
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",  # 7 to 26 % faster than TCP
    }


def _environment() -> dict[str, str]:
    """Return what the JVM and its Python workers must find in their environment."""
    result = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "JAVA_HOME": str(java_home_for_spark(find_java())),
        "SPARK_LOCAL_IP": _LOOPBACK,
    }
    root = str(Path(hastore.__file__).resolve().parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # Run from a work tree: workers must find the package, Spark `pyspark_hastore`.
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != root]
        result["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return result


def _start(conf: SparkConf, *, quiet: bool) -> None:
    if not quiet:
        SparkContext(conf=conf)
        return
    with tempfile.TemporaryFile() as output:
        try:
            launch: Callable[..., Any] = launch_gateway
            gateway = launch(conf, {"stderr": output, "stdout": output})
            SparkContext(conf=conf, gateway=gateway)
        except (PySparkException, OSError) as error:
            raise HastoreError(f"Spark does not start: {error}\n{_tail(output)}") from error


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return output.read().decode("utf-8", "replace")
