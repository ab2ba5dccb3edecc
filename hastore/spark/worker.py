"""The process that hastore runs in, when Spark is around: its version, signals, errors, time zone.

Spark calls a data source in Python processes of its own: one that plans on the driver, and workers
that run tasks on the executors. There hastore reports short errors and ends without a traceback;
in other processes these functions do nothing. A job's own process waits with Ctrl-C while it does
what must not be divided. Only the main thread handles signals; elsewhere nothing is changed.
"""

import contextlib
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pyspark
from pyspark import TaskContext

from hastore.errors import HastoreError, UsageError
from hastore.service import Service, raise_failure

MIN_SPARK = (4, 2)  # the first in which a Python source limits what a stream's batch reads
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_spark_version(version: str = pyspark.__version__) -> None:
    """Raise UsageError if this pyspark is older than MIN_SPARK."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < MIN_SPARK:
        least = ".".join(map(str, MIN_SPARK))
        raise UsageError(
            f"format 'hastore' needs Spark {least} or later; this is pyspark {version}"
        )


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Handle the first signal that comes in the body when the body has ended; drop later ones."""
    came: list[int] = []
    try:
        with handled(lambda number, _frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals in the body have no effect. Child processes do not inherit this."""
    with handled(lambda _number, _frame: None):
        yield


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` handle the signals in the body, and the handlers from before afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


_IS_SPARKS = "SPARK_PYTHON_RUNTIME"  # Spark sets it in its Python processes
_WATCH, _WATCH_STEP_S = "hastore-parent", 1.0
_HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"  # Spark reads it when it reports an exception
_PUSHES_FILTERS = os.path.join("pyspark", "sql", "worker", "data_source_pushdown_filters.py")
ZONE = "spark.sql.session.timeZone"
ZONE_VARIABLE = "HASTORE_SESSION_TIME_ZONE"  # `register` sets it: no planning process is told


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Let Spark report a HastoreError by its sentence, without the Python traceback before it.

    Spark ends the process after it has reported the exception, so the setting does not outlive it.
    The tracebacks of other exceptions are kept: they are defects.
    """
    try:
        yield
    except HastoreError:
        if _IS_SPARKS in os.environ:
            os.environ[_HIDE_TRACEBACK] = "1"
        raise


def end_quietly() -> None:
    """End this worker without a traceback if Spark has closed its connection when it writes to it.

    Spark closes the connection when a query needs no more rows, as after `limit` or `show`. A
    worker that still writes, or waits for its next task, would print a BrokenPipeError or a
    ConnectionResetError, and end. With this it just ends. Broken connections of others are still
    errors.
    """
    frame = _daemon_frame()
    if frame is None or threading.current_thread() is not threading.main_thread():
        return
    # SIGPIPE comes with every BrokenPipeError, also in the calls of `worker` after this one.
    poll = select.poll()
    poll.register(frame.f_locals["sock"], getattr(select, "POLLRDHUP", 0))  # errors always count

    def on_broken_pipe(number: int, interrupted: FrameType | None) -> None:
        if poll.poll(0):
            os._exit(1)

    signal.signal(signal.SIGPIPE, on_broken_pipe)
    # No signal comes with a ConnectionResetError, which only ends a write of this call.
    output = frame.f_locals["outfile"]
    if "write" not in vars(output):
        for name in ("write", "flush"):
            setattr(output, name, _ending(getattr(output, name)))


def _ending(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_or_end(*data: Any) -> Any:
        try:
            return write(*data)
        except ConnectionResetError:
            os._exit(1)

    return write_or_end


def _daemon_frame() -> FrameType | None:
    """Return the frame of `worker` of pyspark.daemon, which holds the connection to Spark."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "worker" and frame.f_globals.get("__file__", "").endswith(
            "daemon.py"
        ):
            return frame if {"sock", "outfile"} <= frame.f_locals.keys() else None
    return None


def end_with_parent() -> None:
    """Let this process of a stream's source end when Spark's JVM, which has started it, has ended.

    Nobody else ends it: a source that waits for nodes would outlive the JVM for as long as it may
    wait. In other processes than Spark's this does nothing.
    """
    if _IS_SPARKS in os.environ and _WATCH not in (one.name for one in threading.enumerate()):
        _ParentWatch().start()


class _ParentWatch(Service):
    """Ends this process when the process that has started it has ended."""

    def __init__(self) -> None:
        super().__init__(_WATCH, on_failure=raise_failure)
        self._parent = os.getppid()

    def run(self) -> None:
        while os.getppid() == self._parent:
            if self.stopping.wait(_WATCH_STEP_S):
                return
        os._exit(1)


def is_told_filters() -> bool:
    """Whether Spark is about to tell a query's filters to the reader that the caller makes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_PUSHES_FILTERS):
            return True
        frame = frame.f_back
    return False


def session_zone() -> str | None:
    """Return the time zone that the session had when the format was registered; None if unknown."""
    return os.environ.get(ZONE_VARIABLE)


def zone_of_task() -> str | None:
    """Return the session's time zone, as a task sees it; None if the session never set one."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(ZONE)


def check_zone(assumed: str | None) -> None:
    """Raise UsageError if the plan read a time in another zone than the session now has."""
    current = zone_of_task()
    if assumed is not None and current not in (None, assumed):
        raise UsageError(
            f"a timestamp without a time zone was read in {assumed}, but the session's zone is "
            f"now {current}: call hastore.spark.register(spark) again, or write the zone"
        )
