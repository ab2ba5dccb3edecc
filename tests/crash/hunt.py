"""The hunt: a workload is recorded, each of its crash states is recovered from and checked.

A part of the recoveries is crashed in turn, recovered from, and checked again.
"""

import contextlib
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hastore.errors import HastoreError
from tests.crash.effects import Promise
from tests.crash.inline import without_threads
from tests.crash.points import Budget, CrashState, points
from tests.crash.recording import RecordingFileSystem
from tests.crash.violation import Violation

Check = Callable[[RecordingFileSystem, Any, random.Random], Any]


@dataclass(frozen=True)
class Workload:
    """What is recorded: `run(fs, seed)` makes it, its `go(steps)` carries it out."""

    name: str
    run: Callable[[RecordingFileSystem, int], Any]
    check: Check
    steps: int
    patches: Callable[[], list[Any]] = list


@dataclass
class Finding:
    """A state in which a promise is broken, and what replays it."""

    workload: str
    seed: int
    state: int  # its number in the round
    point: int
    what: str
    reason: str
    trace: str

    def __str__(self) -> str:
        return (
            f"{self.workload}, round {self.seed}, state {self.state}, after effect {self.point}"
            f" ({self.what}): {self.reason}"
        )


@dataclass
class Report:
    """What a hunt has covered and found; two of them can be added."""

    states: int = 0
    again: int = 0  # states of a second crash, during or after recovery
    kinds: Counter[str] = field(default_factory=Counter)  # kill, subset, torn, length, two names
    effects: Counter[str] = field(default_factory=Counter)  # the last effect before the crash
    files: Counter[str] = field(default_factory=Counter)  # workload: file that a state was about
    unordered: int = 0  # states in which a journal's order of names does not hold
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Add what another round has covered and found."""
        self.states += other.states
        self.again += other.again
        self.unordered += other.unordered
        self.kinds += other.kinds
        self.effects += other.effects
        self.files += other.files
        self.findings += other.findings


_NUMBERS = re.compile(r"(?<=/)(\d{17}|\d{20}|\d{12}\.\d+)$")
_FOLDERS = re.compile(
    r"^/\w+/(rescued|consumequeue|index|hastore/dropped|hastore/reserve|backups?|rebuild.tmp"
    r"|restoring\.tmp)/.*"
)


def file_of(path: str) -> str:
    """Return which durable file a path is, with one name for all files of a log or a folder."""
    path = re.sub(r"(\.tmp|\.taken|\.damaged)$", "", path)
    path = _FOLDERS.sub(r"/x/\1/*", path)
    path = _NUMBERS.sub("*", path)
    return re.sub(r"^/\w+/", "", path)


@contextlib.contextmanager
def prepared(workload: Workload) -> Iterator[None]:
    """Let stores run without threads, and with the patches of a workload."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_threads())
        for one in workload.patches():
            stack.enter_context(one)
        yield


def hunt(
    workload: Workload,
    seed: int,
    budget: Budget,
    *,
    most: int = 1 << 30,
    share: float = 1.0,
    second: float = 0.2,
    stop_at: int = 1 << 30,
    look: bool = True,
) -> Report:
    """Check the crash states of one round of a workload.

    `most` states are checked, of a `share` of all points. After a share of `second` of them, a
    crash during recovery follows. The hunt ends early with `stop_at` findings. Without `look` the
    states are only counted.
    """
    report = Report()
    with prepared(workload):
        fs = RecordingFileSystem()
        run = workload.run(fs, seed)
        run.go(workload.steps)
        chance = random.Random(seed)
        chosen = {at for at in range(len(fs.effects) + 1) if chance.random() < share}
        for state in points(fs.start, fs.effects, chance, budget, chosen):
            report.states += 1
            _count(report, workload, state)
            try:
                if look:
                    _try(workload, state, fs.boot, chance, report, second)
            except (Violation, HastoreError, OSError, AssertionError, ValueError) as failure:
                report.findings.append(_finding(workload, seed, report.states, state, failure))
            if report.states >= most or len(report.findings) >= stop_at:
                break
        fs.close()
    return report


def _finding(
    workload: Workload, seed: int, number: int, state: CrashState, failure: Exception
) -> Finding:
    order = "" if state.in_order else ", names out of order"
    what = f"{state.cause.kind} of {state.place or 'all'}, {state.kind}{order}"
    reason = f"{type(failure).__name__}: {failure}"
    trace = "".join(traceback.format_exception(failure, limit=-6))
    return Finding(workload.name, seed, number, state.point, what, reason, trace)


def _count(report: Report, workload: Workload, state: CrashState) -> None:
    report.kinds[state.kind] += 1
    report.effects[state.cause.kind] += 1
    report.unordered += not state.in_order
    places = {file_of(one) for one in (state.place, *state.pending) if one}
    report.files.update(f"{workload.name}: {one}" for one in places)


def _try(
    workload: Workload, state: CrashState, boot: Any, chance: random.Random, report: Report,
    second: float,
) -> None:  # fmt: skip
    """Recover from a crash; perhaps crash that recovery, and recover again."""
    check_files(state)
    fs = RecordingFileSystem(state.files, state.directories, state.promise)
    if state.kind == "kill":
        fs.boot = boot
    try:
        workload.check(fs, state.promise.note, chance)
        if chance.random() >= second or not fs.effects:
            return
        at = chance.randrange(len(fs.effects))
        # The power fails now: what recovery had not synced is lost.
        for later in points(fs.start, fs.effects, chance, Budget(1, 1, kills=0.0), {at, at + 1}):
            report.again += 1
            check_files(later)
            other = RecordingFileSystem(later.files, later.directories, later.promise)
            try:
                workload.check(other, later.promise.note, chance)
            except (Violation, HastoreError, AssertionError) as failure:
                what = f"a second crash after effect {later.point} of recovery, {later.cause.kind}"
                raise Violation(f"{what} of {later.place}, {later.kind}: {failure}") from failure
            finally:
                other.close()
    finally:
        fs.close()


def check_files(state: CrashState) -> None:
    """A state file has its old or its new content, as a whole, and is never gone."""
    promise: Promise = state.promise
    for path, contents in promise.files.items():
        found = state.files.get(path)
        if found not in contents:
            raise Violation(
                f"{path} is {_text(found)}, not {' or '.join(_text(one) for one in contents)}"
            )


def _text(content: bytes | None) -> str:
    return "absent" if content is None else f"{content[:60]!r} ({len(content)} bytes)"
