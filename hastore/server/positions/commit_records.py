"""Records of HASTORE_POSITIONS: made, and read out of what a pull returns."""

import errno
import logging
from collections.abc import Iterator
from typing import Protocol

from hastore.clock import Clock
from hastore.errors import CorruptRecordError
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.positions import CommitBody, decode_commit, encode_commit
from hastore.record.codec import build_record, decode_record
from hastore.record.host import NO_HOST
from hastore.store.message_store import PullResult, PullStatus

log = logging.getLogger(__name__)

PATIENCE_MS = 10_000.0
QUEUE = 0  # of the topic; all commits are in it


def commit_key(group: str) -> str:
    """Return the key under which the index has a group's commits; KEYS are parted by blanks."""
    return "_".join(group.split()) or "_"


def commit_record(body: CommitBody, now_ms: int) -> bytes:
    """Return the record that keeps positions; `now_ms` is wall time."""
    return build_record(
        POSITIONS_TOPIC,
        encode_commit(body),
        queue_id=QUEUE,
        properties=[("KEYS", commit_key(body.group))],
        born_timestamp_ms=now_ms,
        born_host=NO_HOST,
    )


class PullSource(Protocol):
    """What commits are read from: a store's MessageReader."""

    def pull(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_messages: int,
        max_bytes: int,
        limit_offset: int,
    ) -> PullResult:
        """Read records of a queue that end at or below `limit_offset`."""
        ...


class CommitReader:
    """Reads commits one behind the other, past those that cannot be read.

    One that lies in a bad sector is lost, and no more than that one. But only once the disk has not
    read it for PATIENCE_MS: until then it is an error, for it may come back. Where the log's newest
    bytes are read that holds of damage too: they may be cut in this very moment.
    """

    def __init__(self, clock: Clock, *, near_end: bool) -> None:
        """`near_end`: the log may be cut below what is read."""
        self._clock = clock
        self._near_end = near_end
        self._failing: tuple[int, float] | None = None  # at which queue offset, since when

    def next(
        self, source: PullSource, at: int, *, max_messages: int, max_bytes: int, limit_offset: int
    ) -> tuple[bytes, int] | None:
        """Return the next commits and the queue offset to go on at; None behind the last.

        OSError, StoreError.
        """
        try:
            found = source.pull(
                POSITIONS_TOPIC, QUEUE, at,
                max_messages=max_messages, max_bytes=max_bytes, limit_offset=limit_offset,
            )  # fmt: skip
        except (CorruptRecordError, OSError) as failure:
            if not is_lost(failure):
                raise
            if self._near_end or isinstance(failure, OSError):
                now = since = self._clock.monotonic_ms()
                if self._failing is not None and 0 <= at - self._failing[0] <= 1:
                    since = self._failing[1]  # the same, or the next one in the same sector
                self._failing = at, since
                if now - since < PATIENCE_MS:
                    raise
            log.warning("a position is lost: %s", failure)
            return b"", at + 1
        if self._failing is not None and found.next_queue_offset > self._failing[0]:
            self._failing = None
        if found.status is PullStatus.OFFSET_TOO_SMALL:  # retention was faster
            return b"", found.next_queue_offset
        return (found.records, found.next_queue_offset) if found.count else None


def is_lost(failure: Exception) -> bool:
    """Whether a read that failed so may never do better."""
    return not isinstance(failure, OSError) or failure.errno == errno.EIO


def read_commits(records: bytes) -> Iterator[tuple[int, CommitBody | None]]:
    """Yield the offset in the log of each record, and what it says.

    None, and a line in the log, where somebody has put something else into the topic.
    """
    at = 0
    while at < len(records):
        record = decode_record(records, at)
        at += record.size
        try:
            yield record.physical_offset, decode_commit(record.body)
        except CorruptRecordError as failure:
            log.warning("no position at offset %d: %s", record.physical_offset, failure)
            yield record.physical_offset, None
