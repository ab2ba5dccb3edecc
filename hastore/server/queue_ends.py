"""The master's statements of the next offsets of quiet queues (record/queue_ends.py).

The master makes one for each file of the log, once the file has begun: it covers the log before
that file. So the log states the offsets before any node's retention may remove the last records of
a queue, and retention finds room also if the disk is full.
"""

import logging
from collections.abc import Callable, Sequence

from hastore.clock import Clock
from hastore.errors import Status, StoreError
from hastore.record.queue_ends import PART_BYTES, QueueNext, build_queue_ends
from hastore.store.log_store import LogStore
from hastore.store.message_store import PutResult

log = logging.getLogger(__name__)

Put = Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]]

_SHARE = 4  # a statement takes at most this part of a log file, or it would fill the log
_PART_SHARE = 8  # and a record of it this part
_PUT_BYTES = 64 * 1024  # per append, so that clients' puts get their turn
_AT_ONCE = 64  # queues, whose last units are read from the disk
_REPLAY_S = 1.0


class QueueEndsWriter:
    """State the ends of quiet queues as master; used by retention's thread."""

    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.problem: str | None = None  # why nothing is stated, for the status

    def state(self, put: Put, pause: Callable[[], bool]) -> int:
        """Append a statement if the log lacks one for its last file; return its records' number.

        `pause()` is called between pieces of work; if it returns True, nothing more is appended.
        Raises OSError, StoreError, and the errors of `put`; the next call then tries again.
        """
        store, self.problem = self._store, None
        since = store.retention.last_file_offset
        if not since or (store.stated.since(store.max_offset) or 0) >= since:
            return 0
        if store.dispatched_offset < since:  # the queues lack records before the file
            return 0
        queues: list[QueueNext] = []
        for queue in store.queues.quiet_since(since):
            queues.append(queue)
            if len(queues) % _AT_ONCE == 0 and pause():
                return 0
        records = build_queue_ends(
            queues,
            since=since,
            ident=self._clock.wall_ms(),
            now_ms=self._clock.wall_ms(),
            part_bytes=min(PART_BYTES, store.file_size // _PART_SHARE),
        )
        size = sum(map(len, records))
        if size > store.file_size // _SHARE:
            self.problem = (
                f"{len(queues)} queues had no message lately, and their next offsets take {size}"
                " bytes, too many for a log file: they are not stated; raise"
                " store.commitlog_file_size"
            )
            return 0
        end = 0
        for piece in pieces(records):
            for results in put(piece):
                for result in results:
                    if result.status is not Status.PUT_OK:
                        raise StoreError(f"queue offsets could not be stated: {result.reason}")
                    end = result.end_offset or end
            if piece[-1] is not records[-1] and pause():
                return 0
        store.wait_dispatched(end, _REPLAY_S)
        log.info("the next offsets of %d quiet queues are stated before %d", len(queues), end)
        return len(records)


def pieces(records: Sequence[bytes]) -> list[list[bytes]]:
    """Divide records into appends of some 64 KiB."""
    pieces: list[list[bytes]] = []
    size = _PUT_BYTES
    for record in records:
        if size >= _PUT_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(record)
        size += len(record)
    return pieces
