"""The Spark session of a job: one of its own, or the one that spark-submit configured."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from hastore.spark.interrupts import uninterrupted
from hastore.spark.registering import register
from hastore.spark.session import end_jvm, end_session, local_session


@contextmanager
def own_session(
    app_name: str, *, master: str, memory: str, settings: Mapping[str, str]
) -> Iterator[SparkSession]:
    """Start a session on `master`; stop it and its JVM at the end.

    A Ctrl-C that comes while the session is being stopped has no effect: that takes a few seconds,
    and interrupted it would leave a JVM behind.
    """
    children = _children()
    try:
        spark = local_session(app_name, master=master, memory=memory, settings=settings)
    except BaseException:
        with uninterrupted():
            end_jvm()
            _end(_children() - children)  # a JVM that has not connected yet
        raise
    try:
        yield spark
    finally:
        with uninterrupted():
            end_session(spark)


@contextmanager
def submitted_session(app_name: str) -> Iterator[SparkSession]:
    """Use the session that spark-submit configured; stop it at the end."""
    spark = SparkSession.builder.appName(app_name).getOrCreate()
    try:
        register(spark)
        yield spark
    finally:
        with uninterrupted():
            spark.stop()


def _children() -> set[int]:
    """Return the processes that this thread has started and that still run."""
    listed = Path("/proc/thread-self/children")
    return {int(pid) for pid in listed.read_text().split()} if listed.exists() else set()


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
