"""What the commands of `hastore pipeline` share: options, the session, progress, a clean stop."""

import contextlib
import functools
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hastore.cli.common import (
    DONE,
    Decorator,
    Folder,
    Stopped,
    print_json,
    print_note,
    progress_bar,
    stderr,
    with_security,
)
from hastore.errors import UsageError
from hastore.pipeline.progress import JobProgress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pyspark.sql import SparkSession
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from hastore.pipeline.running import Start

    Summary = TypeVar("Summary", bound=DataclassInstance)


LINE_EVERY_S = 30.0
# In click's meta, if `hastore pipeline run` runs the job: what starts or returns the session of
# all jobs, and what takes the summary.
SHARED, COLLECT = "hastore.shared", "hastore.collect"


class Screen(JobProgress):
    """The progress of a job that people see."""

    def __init__(self) -> None:
        self.kept = "nothing was done"  # what remains if the job is stopped now
        self._is_terminal = stderr.is_terminal
        self._bars: Bars = progress_bar()
        self._task: TaskID | None = None
        self._text, self._unit = "", ""
        self._total: int | None = None
        self._done = 0
        self._next_line_s = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> "Screen":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Replace the bar of the step before."""
        self._text, self._total, self._unit, self._done = text, total, unit, 0
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(text, total=total, note=unit)
        self._print_line()

    def advance(self, amount: int) -> None:
        """Move the bar, or now and then print a line."""
        self._done += amount
        if self._task is not None:
            self._bars.advance(self._task, amount)
        self._print_line()

    def keep(self, text: str) -> None:
        """Remember what a stop leaves."""
        self.kept = text

    def _print_line(self) -> None:
        now_s = time.monotonic()
        if self._is_terminal or now_s < self._next_line_s:
            return
        self._next_line_s = now_s + LINE_EVERY_S
        if self._total is None and not self._done:
            print_note(self._text)  # a step without a count
            return
        total = "" if self._total is None else f" of {self._total:,}"
        print_note(f"{self._text}: {self._done:,}{total} {self._unit}".rstrip())


_SUBMITTED = "submitted"  # the context's object if spark-submit runs the command
_DEFAULT_MASTER = "local[*]"
_DEFAULT_MEMORY = "1g"


@dataclass(frozen=True)
class SessionOptions:
    """How a command starts Spark; None means that the option was not given."""

    master: str | None
    memory: str | None
    settings: tuple[tuple[str, str], ...]


with_path: Decorator = click.option(
    "--path",
    type=Folder(),
    metavar="DIR",
    help="Read this store: the folder with commitlog/ or dledger-*/, in use or not.",
)
with_servers: Decorator = click.option(
    "--servers", metavar="ADDR,ADDR", help="Read from these running nodes instead."
)
with_topics: Decorator = click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="T",
    help="Take this topic; may be repeated (default: all topics).",
)
with_pattern: Decorator = click.option(
    "--pattern", metavar="REGEX", help="Take the topics whose whole name matches."
)

with_internal: Decorator = click.option(
    "--exclude-internal",
    is_flag=True,
    help="Leave out topics in which delayed and half messages wait, or that repeat messages.",
)


def with_where(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --path, --servers, --topic, --pattern and --exclude-internal."""
    for add in (with_internal, with_pattern, with_topics, with_servers, with_path):
        function = add(function)
    return function


def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --master, --memory and --conf, which arrive together as `session`; and --security."""

    def parse(pairs: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        for pair in pairs:
            if not pair.partition("=")[0].startswith("spark.") or "=" not in pair:
                raise UsageError(f"--conf {pair}: write spark.NAME=VALUE")
        return tuple((name, value) for name, _, value in (pair.partition("=") for pair in pairs))

    function = with_security(function)

    @functools.wraps(function)
    def called(
        *args: Any, master: str | None, memory: str | None, conf: tuple[str, ...], **kwargs: Any
    ) -> Any:
        return function(*args, session=SessionOptions(master, memory, parse(conf)), **kwargs)

    for add in (
        click.option(
            "--conf", multiple=True, metavar="K=V", help="Set a Spark setting; may be repeated."
        ),
        click.option("--memory", metavar="SIZE", help="Memory of the driver's JVM (default: 1g)."),
        click.option(
            "--master",
            metavar="URL",
            help="Run on this Spark master, e.g. spark://host:7077 (default: local[*]).",
        ),
    ):
        called = add(called)
    return called


def run_job(
    name: str,
    job: "Callable[[Start, JobProgress], Summary]",
    session: SessionOptions,
    *,
    check: Callable[[], object],
    as_json: bool,
    show: "Callable[[Summary], None]",
    judge: "Callable[[Summary], int]" = lambda _summary: DONE,
) -> int:
    """Run a job in a session, print its summary, and return the exit code of the command.

    Starting Spark takes seconds, so `check` first raises what is wrong and can be known without it.
    The job checks the same again, and starts Spark by calling what it gets, if it needs Spark at
    all. The summary is a dataclass of JSON values; `judge` prints on stderr what is wrong in it,
    and returns the exit code. With `as_json` the summary is the last line. If a signal stops the
    job, this prints what remains, and the command exits with 128 plus the signal's number, as after
    Ctrl-C: 130.
    """
    check_spark()
    from hastore.pipeline.running import SignalStop, explained_end

    check_submitted(session)
    meta = click.get_current_context().meta
    screen = Screen()
    stopped = SignalStop()
    try:
        with screen, stopped.raised(), contextlib.ExitStack() as at_end:
            screen.begin("check the arguments", None, "")
            check()

            @functools.cache
            def start() -> "SparkSession":
                screen.begin("start Spark", None, "")
                spark: SparkSession = (
                    meta[SHARED]() if SHARED in meta else at_end.enter_context(_open(name, session))
                )
                stopped.listen()  # again: pyspark has set a handler of its own for SIGINT
                return spark

            with explained_end(name):
                summary = job(start, screen)
    except BaseException as error:
        number = stopped.number
        if number is None and isinstance(error, KeyboardInterrupt):
            number = signal.SIGINT  # pyspark's handler had it, while the session was made
        if number is None:
            raise
        text = f"stopped: {screen.kept}; run the same command again to continue"
        print_note(text)
        raise Stopped(128 + number, text) from error
    if not as_json:
        show(summary)
    code = judge(summary)
    if COLLECT in meta:
        meta[COLLECT](asdict(summary))
    elif as_json:
        print_json(asdict(summary))
    return code


def check_spark() -> None:
    """Raise UsageError if pyspark or pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as missing:
        raise UsageError(
            f'this job needs {missing.name}: pip install "hastore[spark]"'
        ) from missing


def _is_submitted() -> bool:
    return bool(click.get_current_context().find_root().obj == _SUBMITTED)


def check_submitted(session: SessionOptions) -> None:
    """Raise UsageError if spark-submit runs the command, and Spark's options are given here."""
    if _is_submitted() and session != SessionOptions(None, None, ()):
        raise UsageError("give --master, --memory and --conf to spark-submit, not to the job")


def _open(name: str, session: SessionOptions) -> Any:
    from hastore.pipeline.running import own_session, submitted_session

    if _is_submitted():
        return submitted_session(f"hastore {name}")
    return own_session(
        f"hastore {name}",
        master=session.master or _DEFAULT_MASTER,
        memory=session.memory or _DEFAULT_MEMORY,
        settings=dict(session.settings),
    )
