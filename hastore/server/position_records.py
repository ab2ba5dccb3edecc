"""Records of HASTORE_POSITIONS: made, and read out of what a pull returns."""

import errno
import logging
from collections.abc import Iterator

from hastore.errors import CorruptRecordError
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.positions import CommitBody, decode_commit, encode_commit
from hastore.server.api_backend import ApiStore
from hastore.store.host import NO_HOST
from hastore.store.record import build_record, decode_record

log = logging.getLogger(__name__)

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


def pull_commits(
    store: ApiStore, at: int, *, max_messages: int, max_bytes: int, limit_offset: int
) -> tuple[bytes, int] | None:
    """Return the next commits and the queue offset to go on at; None behind the last.

    One that is damaged, or lies in a bad sector, is passed by: what it said is lost, but no more.
    OSError, StoreError.
    """
    try:
        found = store.pull(
            POSITIONS_TOPIC, QUEUE, at,
            max_messages=max_messages, max_bytes=max_bytes, limit_offset=limit_offset,
        )  # fmt: skip
    except (CorruptRecordError, OSError) as failure:
        if not is_lost(failure):
            raise
        log.warning("a position is lost: %s", failure)
        return b"", at + 1
    if found.status.name == "OFFSET_TOO_SMALL":  # retention was faster
        return b"", found.next_queue_offset
    return (found.records, found.next_queue_offset) if found.count else None


def is_lost(failure: Exception) -> bool:
    """Whether a read that failed so will never do better."""
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
