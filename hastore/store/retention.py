"""Which commit log files have outlived their time: whole files, oldest first, never the last."""

import errno
from collections.abc import Sequence

from hastore.clock import Clock
from hastore.config.model import RetentionConfig
from hastore.record.codec import layout_of
from hastore.record.layout import (
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
    store_at,
)
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.mapped_file import MappedFile


def first_store_timestamp_ms(commit_log: CommitLog, offset: int) -> int | None:
    """Return the store timestamp of the record at `offset`; None when there is none."""
    with commit_log.view(offset, MIN_RECORD_SIZE) as view:
        if len(view) < MIN_RECORD_SIZE:
            return None
        size, magic = SIZE_AND_MAGIC.unpack_from(view)
    if magic not in (V1_MAGIC, V2_MAGIC):
        return None
    with commit_log.view(offset, size) as view:
        layout = layout_of(view, 0, len(view))
        if layout is None:
            return None
        at = store_at(layout[3])
        return int.from_bytes(view[at : at + 8], signed=True)


def expired_files(
    commit_log: CommitLog, retention: RetentionConfig, clock: Clock, hold_offset: int
) -> int:
    """Return how many of the oldest files may go.

    A file is as old as the first record behind it, which is stored no earlier than its last one.
    Bytes at or beyond `hold_offset` stay: someone is still being sent them, or replay lags.
    """
    files = commit_log.queue.files
    count = 0
    for place, file in enumerate(files[:-1]):
        if file.end > min(hold_offset, commit_log.max_offset):
            break
        too_many = (
            retention.max_size_bytes is not None
            and (len(files) - place) * commit_log.file_size > retention.max_size_bytes
        )
        if not too_many and not _too_old(commit_log, retention, clock, files[place + 1 :]):
            break
        count += 1
    return count


def _too_old(
    commit_log: CommitLog, retention: RetentionConfig, clock: Clock, behind: Sequence[MappedFile]
) -> bool:
    """Whether a file is too old, by the first record of the files `behind` it that can be read: a
    bad sector, or damage, is to keep no file for ever.
    """
    if retention.max_age_ms is None:
        return False
    for file in behind:
        if file.start >= commit_log.max_offset:
            break
        try:
            stored_ms = first_store_timestamp_ms(commit_log, file.start)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            stored_ms = None
        if stored_ms is not None:
            return clock.wall_ms() - stored_ms > retention.max_age_ms
    return False
