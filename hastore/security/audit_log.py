"""AuditLog: what was refused, and what administrators did, as JSON lines.

    {"time": "2026-11-22T18:30:00.123Z", "node": 1, "action": "authenticate", "outcome": "refused",
     "identity": "orders", "address": "10.0.0.7:40312", "reason": "..."}

Anyone who can reach a port can cause lines, so everything is bounded: the length of a line, the
lines of one source and of one action in WINDOW_MS, the lines that wait for the disk, the size of
the file and the number of its predecessors. Only what administrators have changed over the network
is always written. What was left out is counted:

    {"time": ..., "node": 1, "action": "authenticate", "outcome": "refused", "left_out": 5012}

A thread of its own writes, so that a slow disk holds nobody up. A disk that fails never stops the
node: `problem` says so, the lines that were lost are counted, and the next line tries again.
"""

import collections
import contextlib
import fcntl
import json
import logging
import os
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import StoreError
from hastore.fs.protocols import File, FileSystem
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

WINDOW_MS = 60_000.0
SOURCE_LINES = 10  # of one source, action and outcome in a window
ACTION_LINES = 100  # of one action and outcome in a window
MAX_KINDS = 500  # of actions with outcomes that are counted
MAX_WAITING = 2_000  # lines that wait for the disk
MAX_BYTES = 16 * 1024 * 1024  # of one file
KEPT_FILES = 4  # audit.log.1 to audit.log.4
RETRY_MS = 1_000.0
_MAX_TEXT = 64
_MAX_REASON = 400

Kind = tuple[str, str]  # action, outcome


@dataclass(slots=True)
class _Window:
    """The counts since `start_ms`."""

    start_ms: float
    of_source: dict[tuple[str, str, str], int] = field(default_factory=dict)
    of_kind: collections.Counter[Kind] = field(default_factory=collections.Counter)
    left_out: collections.Counter[Kind] = field(default_factory=collections.Counter)


class Note(Protocol):
    """`AuditLog.note`, for a client at `address`."""

    def __call__(
        self, action: str, *, outcome: str, identity: str | None, address: str, reason: str,
        whole: bool = False,
    ) -> None:  # fmt: skip
        """Note that `identity` at `address` tried `action`, and how it ended."""
        ...


class AuditLog(Service):
    """Write the audit log of `node` to `path`. `note` may be called from any thread; never raises.

    Lines are written between `start` and `stop`; those noted earlier wait. They are not synced one
    by one: a power loss may take the last ones.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        node: int,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_failure: OnFailure,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__("AuditLog", on_failure=on_failure)
        self.path = path
        self.problem: str | None = None
        self._fs = fs
        self._node = node
        self._clock = clock
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._window = _Window(clock.monotonic_ms())
        self._lost = 0  # lines, since the last one that was written
        self._counts: collections.Counter[Kind] = collections.Counter()  # since the start
        self._file: File | None = None
        self._end = 0
        self._next_try_ms = 0.0
        self._wakeup = threading.Event()

    def note(
        self,
        action: str,
        *,
        outcome: str,
        identity: str | None = None,
        address: str | None = None,
        reason: str = "",
        whole: bool = False,
    ) -> None:
        """Note that `identity` at `address` tried `action`, and how it ended.

        With `whole` the line is never left out for the number of others: an administrator could
        hide a change behind ten others.
        """
        fields: dict[str, object] = {"action": action, "outcome": outcome}
        for name, text in (("identity", identity), ("address", address)):
            if text is not None:
                fields[name] = _clipped(text, _MAX_TEXT)
        if reason:
            fields["reason"] = _clipped(reason, _MAX_REASON)
        source = (address or "").rpartition(":")[0] or identity or ""
        with self._lock:
            self._roll_window()
            if (action, outcome) in self._counts or len(self._counts) < MAX_KINDS:
                self._counts[action, outcome] += 1
            if not whole and not self._within_bounds((action, outcome), source[:_MAX_TEXT]):
                if self._window.left_out[action, outcome] == 1:
                    self._wakeup.set()  # the thread writes the count when the window ends
                return
            self._append(fields)
        self._wakeup.set()

    def counted(self) -> list[tuple[Kind, int]]:
        """Return how often what was noted since the start, left-out lines included."""
        with self._lock:
            return list(self._counts.items())

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        self._wakeup.set()

    def run(self) -> None:
        """Write the lines until `stopping` is set, then those that still wait."""
        while not self.stopping.is_set():
            self._write_waiting()
            self._wakeup.wait(self._pause_s())
            self._wakeup.clear()
        with self._lock:
            self._count_left_out()
        self._next_try_ms = 0.0
        self._write_waiting()
        self._close()

    def _within_bounds(self, kind: Kind, source: str) -> bool:
        window = self._window
        key = (*kind, source)
        count = window.of_source.get(key, 0)
        if count >= SOURCE_LINES or window.of_kind[kind] >= ACTION_LINES:
            window.left_out[kind] += 1
            return False
        window.of_source[key] = count + 1  # at most ACTION_LINES entries of one kind
        window.of_kind[kind] += 1
        return True

    def _roll_window(self) -> None:
        """Begin a new window if the last one is over. The lock is held."""
        now = self._clock.monotonic_ms()
        if now - self._window.start_ms >= WINDOW_MS:
            self._count_left_out()
            self._window = _Window(now)

    def _count_left_out(self) -> None:
        for (action, outcome), count in sorted(self._window.left_out.items()):
            self._append({"action": action, "outcome": outcome, "left_out": count})
        self._window.left_out.clear()

    def _append(self, fields: dict[str, object]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._lost += 1
            return
        self._waiting.append(self._line(fields))

    def _line(self, fields: dict[str, object]) -> bytes:
        at = datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC)
        time = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": time, "node": self._node, **fields}).encode() + b"\n"

    def _pause_s(self) -> float | None:
        """Return how long the thread may sleep: until a line can be tried, or the window ends."""
        with self._lock:
            if self._waiting:
                due_ms = self._next_try_ms
            elif self._window.left_out:
                due_ms = self._window.start_ms + WINDOW_MS
            else:
                return None
        return max(0.0, due_ms - self._clock.monotonic_ms()) / 1000.0

    def _write_waiting(self) -> None:
        while True:
            with self._lock:
                self._roll_window()
                if not self._waiting or self._clock.monotonic_ms() < self._next_try_ms:
                    return
                lost = self._lost
                line = self._waiting[0]
            try:
                if lost:
                    self._write(self._line({"action": "audit", "outcome": "failed", "lost": lost}))
                    with self._lock:
                        self._lost -= lost
                self._write(line)
            except (OSError, StoreError) as failure:
                self._failed(failure)
                return
            with self._lock:
                self._waiting.popleft()
            self._works()

    def _write(self, line: bytes) -> None:
        file = self._file
        if file is not None and (
            not self._fs.is_same_file(self.path, file)
            or os.fstat(file.fileno()).st_size < self._end
        ):
            self._close()  # somebody has moved, removed or emptied it
        elif file is not None and self._end and self._end + len(line) > self._max_bytes:
            self._rotate()
        if self._file is None:
            self._open()
        assert self._file is not None
        try:
            self._file.pwrite(line, self._end)
        except OSError:
            with contextlib.suppress(OSError):  # then half a line stays, as after a crash
                self._file.truncate(self._end)
            raise
        self._end += len(line)

    def _open(self) -> None:
        self._fs.make_dirs(os.path.dirname(self.path))
        file = self._fs.open(self.path, create=True)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            file.close()
            raise OSError(held.errno, "another process writes it") from held
        end = file.size
        if not end:  # a new file: it names identities and addresses
            os.fchmod(file.fileno(), 0o600)
        if end and file.pread(1, end - 1) != b"\n":  # a crash cut the last line
            file.pwrite(b"\n", end)
            end += 1
        self._file, self._end = file, end

    def _rotate(self) -> None:
        self._close()
        for number in range(KEPT_FILES, 0, -1):
            older = f"{self.path}.{number}"
            newer = self.path if number == 1 else f"{self.path}.{number - 1}"
            if self._fs.exists(newer):
                self._fs.rename(newer, older)

    def _failed(self, failure: Exception) -> None:
        self._close()
        self._next_try_ms = self._clock.monotonic_ms() + RETRY_MS
        why = getattr(failure, "strerror", None) or str(failure)
        problem = (
            f"the audit log {self.path} cannot be written: {why}; make room or correct "
            "security.audit_log"
        )
        if self.problem is None:
            log.error("%s", problem)
        self.problem = problem

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _works(self) -> None:
        if self.problem is not None:
            log.warning("the audit log %s is written again", self.path)
            self.problem = None


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
