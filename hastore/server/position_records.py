"""Records of HASTORE_POSITIONS: made, and read out of what a pull returns."""

import logging
from collections.abc import Iterator

from hastore.errors import CorruptRecordError
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.positions import CommitBody, decode_commit, encode_commit
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
