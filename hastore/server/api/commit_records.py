"""Build the records of the topic HASTORE_POSITIONS, and read them from the results of pulls.

The API (commits.py) and retention (kept_positions.py) share this. A CommitReader belongs to one
thread.
"""

import errno
import logging
from collections.abc import Iterator
from typing import Protocol

from hastore.clock import Clock
from hastore.errors import CorruptRecordError
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import CommitBody, decode_commit, encode_commit
from hastore.record.codec import NO_HOST, Record, build_record, decode_record
from hastore.store.message_store import PullResult, PullStatus

log = logging.getLogger(__name__)

PATIENCE_MS = 10_000.0  # how long reads of a commit may fail before it counts as lost
QUEUE = 0  # all commits are in this queue of the topic


def commit_key(group: str) -> str:
    """Return the index key of a group's commits: "_" replaces spaces, which separate KEYS."""
    return "_".join(group.split()) or "_"


def commit_record(body: CommitBody, now_ms: int) -> bytes:
    """Return a commit as a record; `now_ms` is wall time."""
    return build_record(
        POSITIONS_TOPIC,
        encode_commit(body),
        queue_id=QUEUE,
        properties=[("KEYS", commit_key(body.group))],
        born_timestamp_ms=now_ms,
        born_host=NO_HOST,
    )


class PullSource(Protocol):
    """The source of commits; implemented by a store's MessageReader."""

    def pull(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_messages: int,
        max_bytes: int,
        limit_offset: int,
        check_bodies: bool = True,
        codes: frozenset[int] | None = None,
    ) -> PullResult:
        """Read records of a queue that end at or below `limit_offset`; see MessageReader."""
        ...

    def pull_few(
        self, topic: str, queue_id: int, at: int, max_messages: int, max_bytes: int, limit: int
    ) -> PullResult | None:  # fmt: skip
        """Return what `pull` returns, in the plain case; None in any other."""
        ...


class CommitReader:
    """Read commits in order, and skip unreadable ones.

    A read of a commit in a bad sector raises for PATIENCE_MS, because the disk may recover. After
    that, this one commit counts as lost. A damaged commit counts as lost immediately, but with
    `near_end` only after PATIENCE_MS, because the damage may be a cut of the log during the read.
    """

    def __init__(self, clock: Clock, *, near_end: bool) -> None:
        """Prepare; with `near_end`, a read may reach bytes that a rewind cuts meanwhile."""
        self._clock = clock
        self._near_end = near_end
        self._failing: tuple[int, float] | None = None  # (queue offset, since when in ms)

    def next(
        self, source: PullSource, at: int, *, max_messages: int, max_bytes: int, limit_offset: int
    ) -> tuple[bytes, int] | None:
        """Return the next commits and the queue offset after them; None at the end.

        Raises OSError, StoreError.
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
                    since = self._failing[1]  # the same commit, or the next one in the same sector
                self._failing = at, since
                if now - since < PATIENCE_MS:
                    raise
            log.warning("a committed position is lost: %s", failure)
            return b"", at + 1
        if self._failing is not None and found.next_queue_offset > self._failing[0]:
            self._failing = None
        if found.status is PullStatus.OFFSET_TOO_SMALL:  # retention has removed it
            return b"", found.next_queue_offset
        return (found.records, found.next_queue_offset) if found.count else None


def is_lost(failure: Exception) -> bool:
    """Whether the cause is damage or a bad sector (EIO), so that later reads may fail too."""
    return not isinstance(failure, OSError) or failure.errno == errno.EIO


def read_commits(records: bytes) -> Iterator[tuple[int, CommitBody | None]]:
    """Yield each record's offset in the log, and its commit.

    A client may have put a record that is not a commit. This is logged, and None is yielded
    instead of a commit.
    """
    for record, body in read_commit_records(records):
        yield record.physical_offset, body


def read_commit_records(records: bytes) -> Iterator[tuple[Record, CommitBody | None]]:
    """Yield each record with its commit, as `read_commits` does."""
    at = 0
    while at < len(records):
        record = decode_record(records, at)
        at += record.size
        try:
            yield record, decode_commit(record.body)
        except CorruptRecordError as failure:
            log.warning("no commit at offset %d: %s", record.physical_offset, failure)
            yield record, None
