"""Find where records begin and end in an open log, mostly by their headers alone.

Cuts, retention and reads use these functions, which change nothing. Recovery, which checks every
byte, has its own scan (recovery.py).
"""

from hastore.record.codec import stated_time_ms
from hastore.record.layout import BLANK_SIZE, HEADER_SIZES, MIN_RECORD_SIZE
from hastore.store.log.commit_log import CommitLog

_HEADER_BYTES_MAX = max(HEADER_SIZES.values())
_SKIPPED_MAX = 1000  # entries without a record before the first one of a file that has one


def store_timestamp_ms(log: CommitLog, offset: int) -> int | None:
    """Return the store timestamp of the record at `offset`; None if no record is there.

    Only the record's header is read, because its body may have megabytes. Any thread may call this.
    Raises StoreError if retention removed the record meanwhile, OSError if the disk cannot read it.
    """
    with log.view(offset, _HEADER_BYTES_MAX) as view:
        if len(view) < MIN_RECORD_SIZE:
            return None
        return stated_time_ms(view, 0, log.max_offset - offset, offset)


def first_store_timestamp_ms(log: CommitLog, offset: int) -> int | None:
    """Return the store timestamp of the first record from the item at `offset` on, in its file.

    Returns None if that item is no record or entry, or if many entries have no record. Raises as
    `store_timestamp_ms` does.
    """
    form, lead = log.form, log.form.lead
    file_end = offset - offset % log.file_size + log.file_size
    for _ in range(_SKIPPED_MAX if lead else 1):
        found = store_timestamp_ms(log, offset + lead) if offset + lead < log.max_offset else None
        if found is not None or not lead or offset + lead >= file_end:
            return found
        with log.view(offset, lead) as view:
            size = form.announced(view, 0, len(view))
        if not size or offset + size >= min(file_end, log.max_offset):
            return None
        offset += size
    return None


def whole_end(log: CommitLog, start: int) -> int:
    """Walk from the item at `start`, and return the end of the last whole record or blank.

    Reads sizes and magics only, and checks no CRC. The caller holds the log's lock.
    """
    offset, end, form = start, log.max_offset, log.form
    while offset < end:
        left = log.file_size - offset % log.file_size
        with log.map_view(offset, left) as view:
            have = len(view)
            at = 0
            while have - at >= BLANK_SIZE:
                size = form.announced(view, at, have)
                if size > have - at:
                    return offset + at
                if not size:
                    # A blank is whole if it is all in the log.
                    size = form.check_blank(view, at, left) if left == have else 0
                if not size:
                    return offset + at
                at += size
        if at < left:
            return offset + at
        offset += left
    return offset


def cut_point(log: CommitLog, offset: int) -> int:
    """Return the last end of a whole record or blank at or below `offset`.

    This is `offset` itself if a record is known to end there, or if a valid record or blank begins
    there. Otherwise the function walks the records from the start of the file that holds `offset`.
    The caller holds the log's lock.
    """
    start = max(log.min_offset, offset - offset % log.file_size)
    if _is_record_end(log, offset):
        return offset
    end = whole_end(log, start)
    if end <= offset:
        return end
    while True:
        with log.map_view(start + log.form.size_at, 4) as view:
            size = int.from_bytes(view)
        if start + size > offset:
            return start
        start += size


def _is_record_end(log: CommitLog, offset: int) -> bool:
    if offset in (log.min_offset, log.record_end) or offset % log.file_size == 0:
        return True
    if offset >= log.max_offset:
        return False
    with log.map_view(offset, log.file_size) as view:
        size, form = len(view), log.form
        return bool(form.check_item(view, 0, size, offset) or form.check_blank(view, 0, size))
