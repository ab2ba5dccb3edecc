"""Run a job on Spark: its session, its tasks, their results and errors, a stop that stops Spark.

The tasks run in a thread of their own, so that the calling thread can show progress and react to
Ctrl-C. When the caller leaves, for whatever reason, Spark's tasks are cancelled. The session is one
of the job's own, or the one that spark-submit configured.
"""

import itertools
import logging
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import InheritableThread, SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import hastore.errors
from hastore.errors import HastoreError, StoreFullError, UsageError
from hastore.pipeline.progress import JobProgress
from hastore.spark.registering import register
from hastore.spark.session import END_SEEN_S, end_jvm, end_session, jvm_end, local_session
from hastore.spark.worker import SIGNALS, handled, uninterrupted


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
        with explained_end(app_name):
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


def has_ended() -> bool:
    """Whether this process had a JVM that has ended by itself, or was killed."""
    return jvm_end() is not None


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


Start = Callable[[], SparkSession]  # starts Spark, or returns the session that it has started


def check_session(spark: SparkSession) -> None:
    """Raise UsageError for a session of Spark Connect, which cannot run the jobs' tasks."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise UsageError(
            "jobs and DeltaBatches cannot run in a session of Spark Connect: give them a session of"
            " hastore.spark.session.local_session, or of a driver program, or run the command"
            " hastore pipeline"
        )


class Stopwatch:
    """The time of a job, without the start of Spark, which would hide how fast the job is."""

    def __init__(self, start: Start) -> None:
        """Begin to count."""
        self._start = start
        self._began_s = time.monotonic()

    def start(self) -> SparkSession:
        """Start Spark, or return the session, while the watch stands still."""
        paused_s = time.monotonic()
        try:
            return self._start()
        finally:
            self._began_s += time.monotonic() - paused_s

    @property
    def seconds(self) -> float:
        """Return the time so far, in seconds."""
        return round(time.monotonic() - self._began_s, 3)


Task = TypeVar("Task")
Result = TypeVar("Result")

_POLL_S = 0.1
_STOP_S = 30.0
_OWN_ERROR = re.compile(r"\bhastore\.errors\.(\w+): ([^\n]*)")

# The line of a traceback, Python's or Java's, that names the exception.
_CAUSE = re.compile(r"^(?:Caused by: )?([\w.]+(?:Error|Exception)(?:: .*)?)$", re.M)


# What Spark says of a worker that was killed: the one or the other, by what the worker was doing.
_WORKER_ENDED = re.compile(
    r"Python worker exited unexpectedly|"
    r"java\.net\.SocketException: [^\n]*(?:\n[^\n]+)*?api\.python\."
)


_DISK_FULL = re.compile("No space left on device|Disk quota exceeded")


@dataclass(frozen=True)
class _Ended(Generic[Result]):
    """What a task sends to the driver when it ends: its result, or the error that it raised."""

    index: int
    result: Result | None
    error: tuple[str, str] | None  # type and text


class _Listed(AccumulatorParam[list[Any]]):
    """An accumulator of lists. Spark applies the update of a task once, however often it runs."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:
        value1.extend(value2)
        return value1


def run_tasks(
    spark: SparkSession,
    name: str,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
) -> Generator[tuple[Task, Result], None, None]:
    """Run `function` on each task, one Spark task each; yield (task, result) as they end.

    `function` is called by name on the executors, so it is a function of a module, or a partial of
    one. Task and result are pickled, so they are small. A HastoreError that it raises
    ends the run at once and is raised here, with its type and text; Spark does not try such a task
    again. Any other failure is tried again as Spark is configured, then raised as HastoreError.
    Closing the iterator cancels what still runs: keep it in `contextlib.closing` when you may leave
    it early. A task that was cancelled, lost or slow may still run for a moment, or twice.
    """
    if not tasks:
        return
    context = spark.sparkContext
    ended: Accumulator[list[_Ended[Result]]] = context.accumulator([], _Listed())
    numbered = context.parallelize(list(enumerate(tasks)), len(tasks))

    def work() -> None:
        numbered.foreachPartition(lambda part: _run(function, part, ended))

    seen: set[int] = set()
    with _Group(context, name, work) as group:
        done = False
        for read in itertools.count():
            while len(ended.value) <= read and not done:
                done = group.wait(_POLL_S)
            if len(ended.value) <= read:
                break
            end = ended.value[read]
            if end.error is not None:
                raise _restore(*end.error)
            if end.index not in seen:
                seen.add(end.index)
                yield tasks[end.index], end.result  # type: ignore[misc]
        group.check()
    if len(seen) != len(tasks):
        raise HastoreError(
            f"{name}: Spark reported {len(seen)} of {len(tasks)} tasks as done; run the job again"
        )


def _run(
    function: Callable[[Task], Result],
    part: Iterable[tuple[int, Task]],
    ended: Accumulator[list[_Ended[Result]]],
) -> None:
    """Run the tasks of a partition (one). Runs on an executor."""
    for index, task in part:
        try:
            ended.add([_Ended(index, function(task), None)])
        except HastoreError as error:
            ended.add([_Ended(index, None, (type(error).__name__, str(error)))])


def run_action(
    spark: SparkSession, name: str, action: Callable[[], Result], progress: JobProgress
) -> Result:
    """Run an action of DataFrames, such as `frame.collect`, and return its result.

    The progress bar shows the tasks that have ended. Raises HastoreError, of the type that the
    source raised, if the action fails.
    """
    results: list[Result] = []
    context = spark.sparkContext
    tracker = context.statusTracker()

    def work() -> None:
        # Else Spark does not find a Python data source by its name when a DataFrame is written.
        spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]
        results.append(action())

    with _Group(context, name, work) as group:
        shown = total = 0
        while not group.wait(_POLL_S):
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group.id)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
            known = sum(stage.numTasks for stage in stages if stage)
            completed = sum(stage.numCompletedTasks for stage in stages if stage)
            if known != total:  # adaptive execution adds stages while it runs
                progress.begin(name, known, "tasks")
                total, shown = known, 0
            progress.advance(completed - shown)
            shown = completed
        group.check()
    return results[0]


class _Group:
    """A thread that runs Spark jobs as one job group; the group is cancelled at the end."""

    def __init__(self, context: SparkContext, name: str, work: Callable[[], object]) -> None:
        self.id = f"hastore-{uuid.uuid4()}"
        self._context = context
        self._name = name
        self._error: BaseException | None = None
        self._ended = threading.Event()

        def run() -> None:
            try:
                context.setJobGroup(self.id, name, interruptOnCancel=True)
                work()
            except BaseException as error:
                self._error = error
            finally:
                self._ended.set()

        self._thread = InheritableThread(target=run, daemon=True)

    def __enter__(self) -> "_Group":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended.is_set():
            try:
                self._context.cancelJobGroup(self.id)
            except (Py4JError, OSError):
                return  # the JVM has ended, and its tasks with it
            self._ended.wait(_STOP_S)

    def wait(self, seconds: float) -> bool:
        """Wait until the work has ended, `seconds` at most; return whether it has."""
        return self._ended.wait(seconds)

    def check(self) -> None:
        """Raise the failure of the work, after it has ended."""
        if self._error is not None:
            raise explain(self._name, self._error) from self._error


def explain(name: str, error: BaseException) -> BaseException:
    """Return the HastoreError for a failure that Spark reported; defects are returned unchanged."""
    if isinstance(error, HastoreError) or not isinstance(
        error, PySparkException | Py4JError | OSError
    ):
        return error
    gone = _jvm_gone(name, error)
    if gone is not None:
        return gone
    text = str(error)
    own = _OWN_ERROR.search(text)
    if own is not None:
        return _restore(own[1], own[2].strip())
    causes: list[str] = _CAUSE.findall(text)
    python = [line for line in causes if not line.startswith(("org.", "java.", "py4j."))]
    if not python and _WORKER_ENDED.search(text):
        return HastoreError(
            f"{name}: a Python worker ended unexpectedly. Most often the machine or the container "
            "was out of memory, and the kernel killed it (see dmesg): run fewer tasks at a time "
            "(--master local[1]; on a cluster a lower spark.executor.cores), or add memory"
        )
    if _DISK_FULL.search(text):
        return StoreFullError(
            f"{name}: no room is left on a disk that Spark writes to; free space where the target "
            "and Spark's temporary files are (/tmp, or --conf spark.local.dir=DIR), and run the "
            "same command again"
        )
    first = text.strip().splitlines()[:1] or [type(error).__name__]
    return HastoreError(f"{name}: Spark failed: {(python or causes[-1:] or first)[0]}")


@contextmanager
def explained_end(name: str) -> Iterator[None]:
    """Raise HastoreError instead of what any call to Spark's JVM fails with once it has ended."""
    try:
        yield
    except (Py4JError, OSError) as error:
        gone = _jvm_gone(name, error)
        if gone is None:
            raise
        raise gone from error


def _jvm_gone(name: str, error: BaseException) -> HastoreError | None:
    """Return what to say if the error comes from the end of Spark's JVM."""
    if isinstance(error, Py4JJavaError) or not isinstance(error, Py4JError | ConnectionError):
        return None
    code = jvm_end(END_SEEN_S)
    if code is None:
        return None
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return HastoreError(
        f"{name}: Spark's JVM ended ({how}). Most often the machine or the container was out of "
        "memory, and the kernel killed it (see dmesg): run fewer tasks at a time (--master "
        "local[1]), or add memory; if the JVM itself was out of memory, raise --memory. Then run "
        "the same command again"
    )


def _restore(kind: str, text: str) -> HastoreError:
    """Return an error of a type of hastore.errors, by its name."""
    found = getattr(hastore.errors, kind, None)
    if isinstance(found, type) and issubclass(found, HastoreError):
        try:
            return found(text)
        except TypeError:  # a type with further arguments
            pass
    return HastoreError(text)


class SignalStop:
    """Turns the first signal into a KeyboardInterrupt, and ignores the ones after it.

    If those interrupted the end of the job, processes would be left behind.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal; None before it

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Handle signals in the body.

        Py4J logs the KeyboardInterrupt of a call to the JVM, with its traceback; that is left out.
        """
        log = logging.getLogger()
        log.addFilter(self._is_no_interrupt)
        try:
            with handled(self._on_signal):
                yield
        finally:
            log.removeFilter(self._is_no_interrupt)

    def listen(self) -> None:
        """Handle signals again, after other code has set handlers of its own in the body."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _is_no_interrupt(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("KeyboardInterrupt while sending command")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            raise KeyboardInterrupt
