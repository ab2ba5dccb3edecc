"""PositionReader: the thread that reads the committed positions before a group asks for them.

After a start the log may have millions of commits, which take minutes to read. This thread begins
with them at once, on slaves too, and goes on, so that a slave that becomes the master has them. It
paces itself, as all threads that read beside puts do, but not while a group waits for positions.
It saves what it has read now and then, and at the node's end (ReadCache).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from hastore.bounded_log import BoundedLines
from hastore.clock import Clock
from hastore.server.api.backend import ApiBackend
from hastore.server.api.commits import PositionTable, TableRead
from hastore.server.api.ranges import Pace
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks for what is new
STOP_S = 4.0  # a disk that hangs holds up the end of the node for no longer
MANY = 100_000  # commits, about a second of reading at full speed
SAVE_EACH = 50_000  # commits
SAVE_MS = 60_000.0  # and not more often than that
SAVE_AT_END = 1_000  # commits; fewer are read faster than a file is written


class ReadCache(Protocol):
    """What was read, kept beyond a restart: server/position_file.py."""

    def save(self, read: TableRead) -> None:
        """Replace what was kept. Raises OSError."""
        ...

    def load(self) -> TableRead | None:
        """Return what was kept; None if nothing was. Raises CorruptRecordError, OSError."""
        ...


class PositionReader(Service):
    """Keep the API's table of positions near the end of what may be read."""

    def __init__(
        self,
        table: PositionTable,
        lock: threading.Lock,
        backend: ApiBackend,
        clock: Clock,
        *,
        is_wanted: Callable[[], bool],
        on_read: Callable[[Exception | None], None],
        on_failure: OnFailure,
        file: ReadCache | None = None,
    ) -> None:
        """Prepare; `lock` is the API's, which all uses of `table` need; `file` keeps what is read.

        `is_wanted()`: whether somebody waits for positions. `on_read(failure)` is called with the
        lock, when all is read or with why not.
        """
        super().__init__("PositionReader", on_failure=on_failure)
        self._table, self._lock, self._store = table, lock, backend.store
        self._clock, self._file = clock, file
        self._saved, self._saved_ms = 0, float("-inf")  # how many commits had been read, and when
        self._to_save: TableRead | None = None  # once the disk has the log so far
        self._is_wanted, self._on_read = is_wanted, on_read
        self._pace = Pace(clock, lambda: backend.store.max_offset, self.stopping)
        self._warn = BoundedLines(log, clock=clock).write
        self._wakeup = threading.Event()

    def wake(self) -> None:
        """Let the thread look now, or see `stopping`."""
        self._wakeup.set()

    def run(self) -> None:
        """Read what is new until stopped."""
        self._restore()
        while not self.stopping.is_set():
            self._pace.begin()
            while not self.stopping.is_set() and self._step():
                if self._is_wanted():
                    self._pace.begin()
                else:
                    self._pace.rests()
                self._save()
            self._save()
            self._wakeup.wait(LOOK_S)
            self._wakeup.clear()
        if self._table.commits - self._saved >= SAVE_AT_END:
            self._write(self._copied())  # the log is synced when the store is closed

    def _restore(self) -> None:
        """Begin with what an earlier process has saved, if that is still valid."""
        try:
            read = None if self._file is None else self._file.load()
            if read is not None:
                self._table.restore(read)  # nobody else reads into the table before it is warm
        except Exception as failure:  # whatever it is: the log has all of that
            log.warning("hastore/positions-read is not used, the log is read instead: %s", failure)

    def _save(self) -> None:
        """Save what was read, if that is much; not before the log up to there is on the disk."""
        now_ms = self._clock.monotonic_ms()
        more = self._table.commits - self._saved
        if self._to_save is None and more >= SAVE_EACH and now_ms >= self._saved_ms + SAVE_MS:
            self._saved, self._saved_ms = self._table.commits, now_ms
            self._to_save = self._copied()
        if self._to_save is not None and self._store.flushed_offset > self._to_save.last.offset:
            self._write(self._to_save)
            self._to_save = None

    def _copied(self) -> TableRead | None:
        with self._lock:
            return self._table.copied()

    def _write(self, read: TableRead | None) -> None:
        if read is None or self._file is None:
            return
        try:
            self._file.save(read)
        except OSError as failure:  # a full disk, for example: the log has all of it
            self._warn("hastore/positions-read could not be written: %s", failure)

    def _step(self) -> bool:
        """Read one piece; return whether to go on with the next."""
        table = self._table
        with self._lock:
            if table.lent:  # a reader of the disk has it, and the API's thread goes on after it
                return False
            read = table.next_read()
            if read is None:
                self._on_read(None)
                return False
            table.lent = True
        found = failure = None
        try:
            found = read.run()
        except Exception as error:  # of this read: it is tried again
            failure = error
        with self._lock:
            table.lent = False
            if failure is not None:
                self._warn("the committed positions could not be read: %r", failure)
            ended = failure is None and table.take(read, found)
            if ended or failure is not None:
                self._on_read(failure)
        return not ended and failure is None

    def problems(self) -> list[str]:
        """Return that groups have to wait for their positions, or that there is no room soon."""
        left = 0 if self._table.warm else self._table.unread()
        full = self._table.problem()
        found = [] if full is None else [full]
        if left < MANY:
            return found
        return [
            *found,
            f"the committed positions are not read yet after this start: {left} commits are left,"
            " and until then groups that this node serves wait for their positions",
        ]
