"""What the status page shows of the time before: an hour of figures, changes of role, groups' lag.

`StatusHistory` is one thread that looks at the node's status each second. All that it keeps is
bounded, in memory, and begins with the process. The groups' lag costs more, so it is read only
while somebody looks at the page, from committed positions that this thread reads for itself: the
API's thread is not asked, and no client waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hastore.bounded_log import BoundedLines
from hastore.clock import Clock
from hastore.errors import HastoreError
from hastore.server.api.commits import PositionTable
from hastore.service import OnFailure, Service

if TYPE_CHECKING:
    from hastore.ha.master.group_transfer import GroupTransferService
    from hastore.server.api.backend import ApiBackend
    from hastore.store.derived.consume_queue import ConsumeQueueTable

log = logging.getLogger(__name__)

LOOK_S = 1.0
STEP_MS = 10_000.0  # of a point
POINTS = 360  # an hour
CHANGES = 50
COUNTED_TOPICS = 1_000
WATCHED_MS = 30_000.0  # so long after a request the groups are read
GROUPS_MS = 5_000.0  # so often
ROWS = 2_000  # groups in topics whose lag is computed
_READ_MS = 500.0  # of positions, at a time
_PAUSE_S = 0.005  # between two reads, for the threads that serve clients

Status = Mapping[str, Any]


class Measured(NamedTuple):
    """What a node has counted. Only the differences of two of them say something."""

    messages: int | None = None  # in its log; None: it has too many topics to count them
    waits: int = 0  # of puts for their confirmation, those that were timed
    waited_ms: float = 0.0  # how long these took, together


def measured(queues: ConsumeQueueTable, transfer: GroupTransferService) -> Measured:
    """Count the messages of all queues, unless there are many, and the waits of puts."""
    messages = None
    if queues.topic_count <= COUNTED_TOPICS:
        messages = sum(end for topic in queues.topics().values() for _, end in topic.values())
    return Measured(messages, transfer.timed, transfer.timed_ms)


class Point(NamedTuple):
    """One step: averages of what flows, and the greatest of what waits. None: not known."""

    wall_ms: int  # its end
    bytes_per_s: float
    messages_per_s: float | None
    wait_ms: float | None  # of a put for its confirmation
    lag_bytes: int | None  # of the slave that is furthest behind; only a master knows it
    waiting_puts: int


class Recent:
    """The ring of points, and the changes of role. Pure; one thread calls `look`."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.changes: deque[dict[str, Any]] = deque(maxlen=CHANGES)
        self._role: tuple[Any, ...] | None = None
        self._begun: tuple[float, int, Measured] | None = None  # of this step
        self._lag: int | None = None
        self._waiting = 0

    def look(
        self, now_ms: float, wall_ms: int, status: Status, measure: Callable[[], Measured]
    ) -> None:
        """Take a status; `now_ms` is the monotonic time. `measure` is called once a step."""
        self._note_role(wall_ms, status)
        lags = [one["lag_bytes"] for one in status["slaves"] if one["lag_bytes"] is not None]
        if lags:
            self._lag = max(*lags, self._lag or 0)
        self._waiting = max(self._waiting, status["waiting_puts"])
        end = status["max_offset"]
        if self._begun is None:
            self._begun = now_ms, end, measure()
        elif now_ms - self._begun[0] >= STEP_MS:
            measured = measure()
            self.points.append(self._point(now_ms, wall_ms, end, measured))
            self._begun, self._lag, self._waiting = (now_ms, end, measured), None, 0

    def _point(self, now_ms: float, wall_ms: int, end: int, measured: Measured) -> Point:
        assert self._begun is not None
        begun_ms, begun_end, before = self._begun
        span_s = (now_ms - begun_ms) / 1000.0
        messages = took = None
        if measured.messages is not None and before.messages is not None:
            more = max(0, measured.messages - before.messages)  # a deleted topic had some
            messages = round(more / span_s, 2)
        if measured.waits > before.waits:
            spent_ms = measured.waited_ms - before.waited_ms
            took = round(spent_ms / (measured.waits - before.waits), 3)
        written = round(max(0, end - begun_end) / span_s, 1)  # a cut makes the log shorter
        return Point(wall_ms, written, messages, took, self._lag, self._waiting)

    def _note_role(self, wall_ms: int, status: Status) -> None:
        role = tuple(status[key] for key in ("role", "epoch", "master", "takes_default"))
        if role == self._role:
            return
        self._role = role
        change = {key: status[key] for key in ("role", "epoch", "master", "takes_default")}
        reason = status["default_refused"] if status["writable"] else status["reason"]
        self.changes.append({"wall_ms": wall_ms, **change, "reason": reason})


class Lag(NamedTuple):
    """How many messages a group has still to read in a topic; see metrics/node_metrics.py."""

    group: str
    topic: str
    queues: int
    lag: int


class GroupLags:
    """The lag of the groups that have committed positions here; one thread calls this."""

    def __init__(self, backend: ApiBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._table: PositionTable | None = None

    def forget(self) -> None:
        """Free what was read."""
        self._table = None

    def read(self, pause: Callable[[float], bool]) -> tuple[list[Lag], int] | None:
        """Return the lags and how many more there are; None if not all positions are read yet.

        `pause(seconds)` waits, and returns True if the reading should end. Raises OSError,
        HastoreError.
        """
        if self._table is None:
            self._table = PositionTable(self._backend, self._clock)
        table, until_ms = self._table, self._clock.monotonic_ms() + _READ_MS
        while (read := table.next_read()) is not None and not table.take(read, read.run()):
            if pause(_PAUSE_S) or self._clock.monotonic_ms() > until_ms:
                return None
        pairs = sorted(table.pairs())
        rows = []
        for group, topic in pairs[:ROWS]:
            row = self._lag(table, group, topic)
            if row is not None:
                rows.append(row)
            if len(rows) % 50 == 49 and pause(_PAUSE_S):
                return None
        return rows, max(0, len(pairs) - ROWS)

    def _lag(self, table: PositionTable, group: str, topic: str) -> Lag | None:
        """Return the lag in the queues that the log still has; None if it has none."""
        store, queues, behind = self._backend.store, 0, 0
        for queue, place in table.find(group, topic).items():
            known = store.reader.readable_range(topic, queue, store.readable_offset)
            if known is not None:
                queues += 1
                behind += max(0, known[1] - max(known[0], place.queue_offset))
        return Lag(group, topic, queues, behind) if queues else None


class StatusHistory(Service):
    """Look at the status each second; any thread may read what was seen.

    `measure` returns what the node has counted, see `measured`. What fails is logged, and looked at
    again: nothing here ends the node.
    """

    def __init__(
        self,
        backend: ApiBackend,
        clock: Clock,
        *,
        measure: Callable[[], Measured],
        on_failure: OnFailure,
    ) -> None:
        super().__init__("StatusHistory", on_failure=on_failure)
        self._backend = backend
        self._clock = clock
        self._measure = measure
        self._warn = BoundedLines(log, clock=clock).write
        self._lock = threading.Lock()  # for what other threads read
        self._recent = Recent()
        self._lags: tuple[list[Lag], int] | None = None  # None: not read yet
        self._groups = GroupLags(backend, clock)
        self._asked_ms = float("-inf")
        self._groups_ms = float("-inf")
        self._wakeup = threading.Event()

    def run(self) -> None:
        """Look until stopped."""
        while not self.stopping.is_set():
            try:
                self.look()
            except Exception as failure:
                self._warn("the status page could not look at the status: %r", failure)
            try:
                self._read_groups()
            except (OSError, HastoreError) as failure:
                self._warn("the status page could not read the groups' positions: %s", failure)
            self._wakeup.wait(LOOK_S)
            self._wakeup.clear()

    def wake(self) -> None:
        """Let the thread see `stopping`, or that somebody looks."""
        self._wakeup.set()

    def look(self) -> None:
        """Look once."""
        status, clock = self._backend.status(), self._clock
        with self._lock:
            self._recent.look(clock.monotonic_ms(), clock.wall_ms(), status, self._measure)

    def _read_groups(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._asked_ms > WATCHED_MS:
            if self._lags is not None:
                self._groups.forget()
                with self._lock:
                    self._lags = None
            return
        if self._lags is not None and now_ms - self._groups_ms < GROUPS_MS:
            return
        found = self._groups.read(self.stopping.wait)
        if found is not None:
            self._groups_ms = now_ms
            with self._lock:
                self._lags = found

    def shown(self, may_see: Callable[[Lag], bool]) -> dict[str, Any]:
        """Return what the page shows, ready for JSON; groups that the viewer may not see left out.

        To be asked this makes the thread read the groups.
        """
        now_ms = self._clock.monotonic_ms()
        first, self._asked_ms = now_ms - self._asked_ms > WATCHED_MS, now_ms
        if first:
            self._wakeup.set()
        with self._lock:
            points, changes = list(self._recent.points), list(self._recent.changes)
            lags = self._lags
        rows = [] if lags is None else [one for one in lags[0] if may_see(one)]
        rows.sort(key=lambda one: (-one.lag, one))
        return {
            "now_ms": self._clock.wall_ms(),
            "points": {name: [getattr(one, name) for one in points] for name in Point._fields},
            "changes": changes[::-1],
            "groups": {
                "read": lags is not None,
                "rows": [one._asdict() for one in rows[:100]],
                "more": max(0, len(rows) - 100) + (0 if lags is None else lags[1]),
            },
        }
