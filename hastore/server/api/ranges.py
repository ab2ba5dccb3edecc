"""Digests and bytes of ranges of the log, computed in a thread of their own.

A digest of 16 MiB takes 1 to 10 ms, and much longer if the disk is slow. The API's thread hands the
requests over and sends the answers, so that no client waits for a digest. The thread reads pieces
of PIECE_BYTES. Reading and hashing release the interpreter's lock. While the log grows, the thread
works for SLICE_MS or one piece, then rests REST times as long, so that puts, or a slave's
replication, keep most of the processor and of the disk. Shorter slices would cost puts more: each
time it wakes, the thread takes the interpreter from them.

An answer states which epochs wrote the range. If the log was cut during the reading, the bytes read
may belong to two histories. So limits and history are looked at before and after: a cut lowers the
readable offset first, and changes the history before the offset can rise again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hastore.clock import Clock
from hastore.errors import StoreError, UsageError
from hastore.ha.rules.epochs import epochs_of
from hastore.protocol import api
from hastore.record.hashes import new_digest
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.service import OnFailure, Service

PIECE_BYTES = 512 * 1024
SLICE_MS = 2.0
REST = 9  # as a multiple of the time of work, while the log grows: a tenth of a core, as replay
REST_MAX_S = 0.02  # a piece that took longer has waited for the disk
GROWING_MS = 100.0  # the log counts as growing for this time after an append
MAX_RANGES_OF_ONE = 8  # requests of a connection that wait
MAX_RANGES = 64  # the same, of all connections
Answer = tuple[api.RangeReply, bytes | None]


@dataclass(frozen=True, slots=True)
class Done:
    """A request that was worked on: its answer, or the failure."""

    connection: Connection
    request: Any  # a RangeQuestion, a Query or an OwnQuery
    answer: tuple[Any, bytes | None] | Exception


class Pace:
    """How a thread that reads for clients shares the node with puts: slices of work, and rests."""

    def __init__(self, clock: Clock, log_end: Callable[[], int], stopping: threading.Event) -> None:
        """Prepare; `log_end()` is the end of the log, whose growth tells that there are puts."""
        self._clock = clock
        self._log_end = log_end
        self._stopping = stopping
        self._seen_end = 0  # the log's end when it was last looked at
        self._grown_ms = float("-inf")
        self._worked_ms = 0.0  # since the last rest
        self._begun_ms = 0.0

    def begin(self) -> None:
        """Begin to work."""
        self._begun_ms = self._clock.monotonic_ms()

    def rests(self) -> bool:
        """Whether a slice is over since the last one; if the log has grown, rest before."""
        now, end = self._clock.monotonic_ms(), self._log_end()
        if end != self._seen_end:
            self._seen_end, self._grown_ms = end, now
        self._worked_ms += now - self._begun_ms
        self._begun_ms = now
        if self._worked_ms < SLICE_MS:
            return False
        worked_ms, self._worked_ms = self._worked_ms, 0.0
        if now - self._grown_ms < GROWING_MS:
            self._stopping.wait(min(REST * worked_ms / 1000.0, REST_MAX_S))
        return True


class AnsweringService(Service):
    """A thread that works on requests of connections, and counts those without an answer."""

    def __init__(
        self, name: str, backend: ApiBackend, clock: Clock, on_done: Callable[[], None], *,
        on_failure: OnFailure,
    ) -> None:  # fmt: skip
        """Prepare; `on_done` is called from the thread after each request that has an answer."""
        super().__init__(name, on_failure=on_failure)
        self._backend = backend
        self._on_done = on_done
        self._pace = Pace(clock, lambda: backend.store.max_offset, self.stopping)
        self._of_one: dict[Connection, int] = {}  # used by the API's thread only
        self.pending = 0  # requests without an answer; the API's thread counts them
        self._done: deque[Done] = deque()

    def _count(self, connection: Connection) -> None:
        """Count one more request; called by the API's thread."""
        self._of_one[connection] = self._of_one.get(connection, 0) + 1
        self.pending += 1

    @property
    def has_done(self) -> bool:
        """Whether `pop_done` has something."""
        return bool(self._done)

    def pop_done(self) -> list[Done]:
        """Return the requests that were worked on since the last call; for the API's thread."""
        found = []
        while self._done:
            done = self._done.popleft()
            found.append(done)
            self.pending -= 1
            left = self._of_one[done.connection] - 1
            if left:
                self._of_one[done.connection] = left
            else:
                del self._of_one[done.connection]
        return found


class InOrderService(AnsweringService):
    """Works on one request at a time, in the order of their arrival.

    An entry begins with a connection and its request.
    """

    def __init__(
        self, name: str, backend: ApiBackend, clock: Clock, on_done: Callable[[], None], *,
        on_failure: OnFailure,
    ) -> None:  # fmt: skip
        """Prepare; `on_done` is called from the thread after each request that has an answer."""
        super().__init__(name, backend, clock, on_done, on_failure=on_failure)
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._work = threading.Event()

    def _accept(self, entry: tuple[Any, ...], most_of_one: int, most: int) -> bool:
        """Take an entry; False if too many wait. Called by the API's thread."""
        connection = entry[0]
        if self._of_one.get(connection, 0) >= most_of_one or self.pending >= most:
            return False
        self._count(connection)
        self._waiting.append(entry)
        self._work.set()
        return True

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        self._work.set()

    def run(self) -> None:
        """Work until stopped; requests that still wait then get no answer."""
        while not self.stopping.is_set():
            self._work.wait()
            self._work.clear()
            while self._waiting and not self.stopping.is_set():
                entry = self._waiting.popleft()
                answer: tuple[Any, bytes | None] | Exception
                try:
                    answer = self._work_on(entry)
                except Exception as failure:  # this request's failure; the API answers with it
                    answer = failure
                self._done.append(Done(entry[0], entry[1], answer))
                self._on_done()
                self._rest()

    def _work_on(self, entry: Any) -> tuple[Any, bytes | None]:
        """Return the reply to the request of an entry, and its payload; may raise."""
        raise NotImplementedError

    def _rest(self) -> None:
        """Rest before the next request, if the work itself has not."""


class RangeService(InOrderService):
    """Answer AskDigest and AskBytes, one request at a time, in the order of their arrival."""

    def __init__(
        self,
        backend: ApiBackend,
        clock: Clock,
        on_done: Callable[[], None],
        *,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `on_done` is called from the thread after each request that has an answer."""
        super().__init__("RangeService", backend, clock, on_done, on_failure=on_failure)

    # -- called by the API's thread ----------------------------------------------------------------

    def accept_range(self, connection: Connection, request: api.RangeQuestion) -> str | None:
        """Take a request; return why not if too many wait. Raises UsageError for a wrong range."""
        is_digest = isinstance(request, api.AskDigest)
        most = api.MAX_DIGEST_BYTES if is_digest else api.MAX_RANGE_BYTES
        if not 0 <= request.end - request.start <= most:
            raise UsageError(
                f"the range [{request.start}, {request.end}) must have 0 to {most} bytes"
            )
        if isinstance(request, api.AskDigest):
            new_digest(request.algorithm)
        if not self._accept((connection, request), MAX_RANGES_OF_ONE, MAX_RANGES):
            return "too many digests wait"
        return None

    # -- the thread --------------------------------------------------------------------------------

    def _work_on(self, entry: tuple[Connection, api.RangeQuestion]) -> Answer:
        """Read the range under one history; again if the history changed meanwhile."""
        connection, request = entry
        history = self._backend.history()
        while True:
            found = self._read(connection, request) if self._is_readable(request) else None
            before, history = history, self._backend.history()
            if history == before:
                break
        if not self._is_readable(request):
            found = None
        return self._answer(request, found, history)

    def _answer(
        self,
        request: api.RangeQuestion,
        found: bytes | None,
        history: Sequence[tuple[int, int]],
    ) -> Answer:
        store = self._backend.store
        epochs = epochs_of(history, request.start, request.end) if found is not None else []
        limits = store.min_offset, store.readable_offset
        if isinstance(request, api.AskDigest):
            return api.RangeDigest(request.rid, found, *limits, epochs), None
        return api.RangeBytes(request.rid, found is not None, *limits, epochs), found

    def _is_readable(self, request: api.RangeQuestion) -> bool:
        store = self._backend.store
        return store.min_offset <= request.start and request.end <= store.readable_offset

    def _read(self, connection: Connection, request: api.RangeQuestion) -> bytes | None:
        """Return the digest or the bytes; None if a part of the range is gone by now."""
        digest = new_digest(request.algorithm) if isinstance(request, api.AskDigest) else None
        pieces: list[bytes] = []
        at, store = request.start, self._backend.store
        while at < request.end:
            if connection.ended or self.stopping.is_set():
                return None  # nobody gets the answer
            self._pace.begin()
            try:
                with store.view(at, min(request.end - at, PIECE_BYTES)) as view:
                    if not view:
                        return None  # the log was cut here
                    if digest is not None:
                        digest.update(view)
                    else:
                        pieces.append(bytes(view))
                    at += len(view)
            except (StoreError, UsageError):
                if self._is_readable(request):
                    raise
                return None  # removed by retention, or cut away
            if at < request.end or digest is not None:
                self._pace.rests()
        return b"".join(pieces) if digest is None else digest.digest()
