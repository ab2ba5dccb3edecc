"""`hastore pipeline run`: the jobs of a file, one after the other, in one session of Spark.

A run that was interrupted is started again and goes on: `export` and `compact` by the positions in
their targets, so they run again and take what is new; `index` by its work folder. The results of
the other jobs are kept beside the file until the run has ended.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import click

from hastore.cli.common import (
    DONE,
    Stopped,
    complete_files,
    explain,
    fitting_table,
    keep_security,
    print_error,
    print_json,
    print_note,
    print_text,
    with_json,
)
from hastore.cli.pipeline import common
from hastore.cli.pipeline.common import (
    COLLECT,
    SHARED,
    SessionOptions,
    check_spark,
    check_submitted,
    with_session,
)
from hastore.cli.pipeline.jobs_file import JobsFile, PlannedJob, read_jobs
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import HastoreError, UsageError
from hastore.fs.filesystem import REAL

_JOBS = ("export", "compact", "audit", "index", "stats")
_INCREMENTAL = frozenset({"export", "compact"})  # a repeated one does only what is new
_KEPT_S = 6 * 3600  # so a daily run never reports what that of the day before has found
_OUTCOMES = {0: "done", 4: "differs"}
Result = dict[str, Any]  # of a job, as JSON has it


@click.command("run", short_help="Run the jobs of a file, and continue after an interruption.")
@click.argument("file", shell_complete=complete_files)
@click.option(
    "--state",
    metavar="FILE",
    help="Where results are kept until the run has ended (default: FILE.state).",
)
@click.option("--restart", is_flag=True, help="Begin anew after an interruption.")
@click.option("--keep-going", is_flag=True, help="Run the other jobs, too, after one has failed.")
@with_session
@with_json
def run_command(
    file: str,
    state: str | None,
    restart: bool,
    keep_going: bool,
    session: SessionOptions,
    as_json: bool,
) -> int:
    """Run the jobs that a YAML file lists, in its order, in one session of Spark.

    \b
        spark: {memory: 2g}
        jobs:
          - {job: export, path: data/node2, topic: [flights], target: lake/flights}
          - {job: audit, a: data/node1, b: data/node2}

    The keys are the options of the jobs; relative paths begin in the file's folder. A run that was
    interrupted, or that ended at a job that failed, continues when it is started again. Exit code
    0: all jobs are done, else that of the first job that is not (4: a difference was found).
    """
    check_spark()
    path = os.path.abspath(file)
    with _opened(path) as lines:
        text = lines.read()
        folder = click.get_current_context().parent
        assert folder is not None and isinstance(folder.command, click.Group)
        found = {name: folder.command.get_command(folder, name) for name in _JOBS}
        commands = {name: command for name, command in found.items() if command is not None}
        planned = read_jobs(file, text, commands)
        given = SessionOptions(
            session.master or planned.session.master,
            session.memory or planned.session.memory,
            planned.session.settings + session.settings,
        )
        check_submitted(given)
        kept = _Kept(os.path.abspath(state or f"{file}.state"), restart)
        keep_security(click.get_current_context())
        with contextlib.chdir(os.path.dirname(path)):
            run = _Run(replace(planned, session=given), kept, keep_going, as_json)
            return run.run(file)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    """Open the file, locked against a second run. Raises UsageError."""
    try:
        lines = open(path, encoding="utf-8")
    except OSError as failed:
        raise UsageError(
            f"{path} cannot be read; check its name and rights: {failed.strerror}"
        ) from failed
    with lines:
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise UsageError(f"another run of {path} is going on; wait until it ends") from held
        try:
            yield lines
        except UnicodeDecodeError as wrong:
            raise UsageError(f"{path} is not UTF-8; write it as such: {wrong}") from wrong


class _Kept:
    """The results of the jobs that a run has done, in a file until the run has ended."""

    def __init__(self, path: str, restart: bool) -> None:
        """Read the file. Raises UsageError if it is something else, or cannot be read.

        With `restart` too, which forgets what it has: the file is replaced, and removed at the end.
        """
        self._path = path
        self._results: dict[str, Result] = {}
        if not os.path.exists(path):
            return
        try:
            with open(path, encoding="utf-8") as file:
                kept = json.load(file)
            self._results = {
                name: {"job": one["job"], "at_s": float(one["at_s"]), "result": dict(one["result"])}
                for name, one in kept["hastore_pipeline_run"].items()
            }
        except OSError as failed:
            raise UsageError(
                f"{path} cannot be read ({failed.strerror}); give its user the right to read and "
                "write it, or name another file with --state"
            ) from failed
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as wrong:
            raise UsageError(
                f"{path} is not the state of an interrupted run; name another one with --state"
            ) from wrong
        if restart:
            self._results = {}

    def of(self, job: PlannedJob) -> Result | None:
        """Return the result of a job that need not run again: the same job, done lately."""
        found = self._results.get(job.name)
        if found is None or found["job"] != _digest(job):
            return None
        age_s = SYSTEM_CLOCK.wall_ms() / 1000 - found["at_s"]
        return dict(found["result"]) if 0 <= age_s < _KEPT_S else None

    def check(self) -> None:
        """Raise UsageError if the file cannot be written."""
        try:
            self._write()
            if not self._results:
                self.remove()
        except OSError as failed:
            raise UsageError(
                f"{self._path} cannot be written ({failed.strerror}), and the results of jobs are "
                "kept there until the run has ended: name a file that can be with --state"
            ) from failed

    def put(self, job: PlannedJob, result: Result) -> None:
        """Keep the result of a job that is done, durably. Raises OSError."""
        at_s = SYSTEM_CLOCK.wall_ms() / 1000
        self._results[job.name] = {"job": _digest(job), "at_s": at_s, "result": result}
        self._write()

    def _write(self) -> None:
        text = json.dumps({"hastore_pipeline_run": self._results}) + "\n"
        REAL.replace_bytes(self._path, text.encode())

    def remove(self) -> None:
        """Forget all: the next run begins anew."""
        with contextlib.suppress(FileNotFoundError):
            REAL.remove(self._path)


def _digest(job: PlannedJob) -> str:
    return hashlib.sha256(json.dumps([job.job, *job.arguments]).encode()).hexdigest()


class _Session:
    """The session of all jobs, from the first one that needs it; a new one if its JVM has ended."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._at_end = contextlib.ExitStack()
        self._spark: Any = None

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end.close()

    def get(self) -> Any:
        """Start Spark, or return the session that is there."""
        from hastore.pipeline.running import has_ended

        if self._spark is not None and has_ended():
            self._spark = None
            self._at_end.close()
        if self._spark is None:
            self._spark = self._at_end.enter_context(common._open("run", self._options))
        return self._spark


class _Run:
    """One run: its jobs, and what came of them."""

    def __init__(self, file: JobsFile, kept: _Kept, keep_going: bool, as_json: bool) -> None:
        self._file = file
        self._kept = kept
        self._keep_going = keep_going
        self._as_json = as_json
        self._results: list[Result] = []
        self._code = DONE  # of the first job that is not done
        self._error: tuple[str, str] | None = None  # type and text, of the same

    def run(self, name: str) -> int:
        """Run the jobs, print the summary, and return the exit code."""
        from hastore.pipeline.running import SignalStop

        if any(job.job not in _INCREMENTAL for job in self._file.jobs):
            self._kept.check()
        began_s = time.monotonic()
        stop = SignalStop()
        try:
            with stop.raised(), contextlib.ExitStack() as at_end:
                session = at_end.enter_context(_Session(self._file.session))
                click.get_current_context().meta[SHARED] = session.get
                for number, job in enumerate(self._file.jobs, 1):
                    self._take(job, f"job {number} of {len(self._file.jobs)}: {job.name}")
                    if self._code >= 128 or (self._code and not self._keep_going):
                        break
        except KeyboardInterrupt:  # between two jobs
            number = 128 + (stop.number or signal.SIGINT)
            text = "stopped; run the same command again to continue"
            print_note(text)
            self._fail(number, ("Stopped", text))
        except HastoreError as error:  # Spark does not end; the jobs are done
            code, text = explain(error, name)
            print_error(text)
            self._fail(code, (type(error).__name__, text))
        if self._code == DONE or (self._keep_going and self._code < 128):
            self._forget()
        self._print(name, round(time.monotonic() - began_s, 3))
        return self._code

    def _take(self, job: PlannedJob, title: str) -> None:
        """Run a job, or take the result that an interrupted run has kept."""
        kept = self._kept.of(job)
        if kept is not None:
            self._results.append({**kept, "resumed": True})
            return
        print_note(title)
        result: Result = {"name": job.name, "job": job.job, "resumed": False, "summary": None}
        began_s = time.monotonic()
        code, error = self._call(job, result)
        result |= {"exit_code": code, "seconds": round(time.monotonic() - began_s, 3)}
        if error is not None:
            result |= {"error": error[1], "type": error[0]}
        self._results.append(result)
        if code != DONE:
            self._fail(code, error and (error[0], f"{job.name}: {error[1]}"))
        elif job.job not in _INCREMENTAL:
            self._keep(job, result)

    def _keep(self, job: PlannedJob, result: Result) -> None:
        """Keep the result of a job; if that fails, say so: the job is done, and others may be."""
        try:
            self._kept.put(job, result)
        except OSError as failed:
            text = f"its result is not kept, so it runs again if this run does not end: {failed}"
            result["not_kept"] = text
            print_note(f"{job.name}: {text}")

    def _forget(self) -> None:
        try:
            self._kept.remove()
        except OSError as failed:
            print_note(
                f"the run has ended, but its results are still kept ({failed}): remove the file, "
                "or give --restart; a run within 6 hours would take them over"
            )

    def _call(self, job: PlannedJob, result: Result) -> tuple[int, tuple[str, str] | None]:
        """Run a job's command; return its exit code, and type and text of an error."""
        context = click.get_current_context()
        context.meta[COLLECT] = lambda summary: result.update(summary=summary)
        words = [*(("--json",) if self._as_json else ()), *job.arguments]
        try:
            with job.command.make_context(job.job, words, parent=context) as inner:
                return job.command.invoke(inner), None
        except Stopped as stop:
            return stop.exit_code, ("Stopped", stop.text)
        except BrokenPipeError:
            raise
        except (click.ClickException, HastoreError, OSError) as error:
            code, text = explain(error, job.name)
            print_error(f"{job.name}: {text}")
            return code, (type(error).__name__, " ".join(text.split()))

    def _fail(self, code: int, error: tuple[str, str] | None) -> None:
        if self._code == DONE or code >= 128:
            self._code, self._error = code, error

    def _print(self, name: str, seconds: float) -> None:
        left = [job.name for job in self._file.jobs[len(self._results) :]]
        if self._as_json:
            said: Result = {"file": name, "exit_code": self._code, "jobs": self._results}
            said |= {"not_run": left, "seconds": seconds}
            if self._error is not None:
                said["type"], said["error"] = self._error
            print_json(said)
            return
        rows = [
            [
                one["name"],
                one["job"],
                _OUTCOMES.get(one["exit_code"], "stopped" if one["exit_code"] >= 128 else "failed"),
                "before" if one["resumed"] else f"{one['seconds']:.1f} s",
            ]
            for one in self._results
        ]
        rows += [[job.name, job.job, "not run", ""] for job in self._file.jobs[len(rows) :]]
        for line in fitting_table(["name", "job", "result", "time"], rows, width=None):
            print_text(line)
