"""Recovery: find the log's end when a store is opened, and clear all bytes beyond it.

The end is the first offset with neither a valid record nor a blank that fills the rest of its file.
In a log of entries each entry must also continue the one before it, by index and term.
How long the scan takes depends on where it starts:

    limits page, clean stop or same boot    recovery_start: 32 to 64 MiB before the end, or
                                            flushed_offset if that is lower
    limits page, after a power loss         the file that holds flushed_offset
    no page (RocketMQ's own store)          the last three files after a clean stop, else all
    the page was lost                       all files

Synced bytes are never cut: an end below `flushed_offset` means damage or a missing file, and the
operator must decide. Bytes that were not synced are, in the boot that wrote them, written once more
before they are synced (`rewrite_unsynced`): an earlier sync of them may have failed.

`flushed_offset` is a lower bound: a slave whose replay has met damage syncs and confirms bytes far
beyond it, and after a power loss the page may be an old one. So in a log of records whole ones that
follow the end are damage too, and refused, unless a part of the record at the end may never have
been written, which shows as zeros up to the end of a sector: after a power loss, or if a sync has
failed in this boot. Where the log is cut although records may go that were synced or confirmed,
`Recovered.doubtful` says so: its node must not count as one that has all that it acknowledged.

A slave of a RocketMQ master keeps a record whose body's CRC is wrong, as the master has it. So of
RocketMQ's bytes a record with nothing but a wrong CRC belongs to the log, if it was synced. What
was not synced is cut there, and fetched again. Whether the master has it so is not known here: the
disk may have damaged it. So it is told, and looked at by whoever compares it with other nodes'.

A store that RocketMQ wrote does not say which bytes were synced. After a clean stop all of them
were. A whole record beyond the end then shows damage, if it is no older than the last record before
the end. The same is asked of a log whose page was lost; what is missing at its end cannot be seen,
so its node must not count as one that has all that it acknowledged.
"""

import logging
import re
from dataclasses import dataclass

from hastore.errors import StoreBrokenError, StoreError
from hastore.record.codec import check_unreadable, check_wrong_crc, find_parts
from hastore.record.layout import (
    BLANK_SIZE,
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    header_struct,
    store_at,
)
from hastore.record.log_format import (
    ENTRY_HEADER_BYTES,
    Check,
    EntryChain,
    LogFormat,
    read_header,
    record_places,
)
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.mapped_file_queue import MappedFile
from hastore.store.state.limits import RECOVERY_STEP_BYTES, Limits

log = logging.getLogger(__name__)

_SYS_FLAG = header_struct("sys_flag")
_WINDOW_BYTES = 4 << 20
_FOREIGN_FILES = 3
_SECTOR = 512  # bytes that a disk writes as a whole
_ZEROS = re.compile(rb"\0+")
_NOWHERE = 1 << 62  # beyond any offset of a log


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of the scan: the log is [min_offset, end)."""

    min_offset: int
    end: int
    scanned_from: int
    records: int
    last_store_timestamp_ms: int  # of the last record read; 0 without any
    recovery_start: int = 0  # the next recovery may start here, or at next_recovery_start
    next_recovery_start: int = 0
    chain: EntryChain | None = None  # the entries read, in a log of entries
    unreadable: bool = False  # whether records that cannot be decoded belong to the log
    doubtful: bool = False  # whether records may be cut that were synced or confirmed
    wrong_crcs: tuple[int, ...] = ()  # where records are that belong to the log with a wrong CRC


@dataclass(slots=True)
class _Scan:
    end: int
    recovery_start: int
    next_recovery_start: int
    unreadable: bool
    rewrite: bool
    check: Check
    form: LogFormat
    synced: int  # from here on a power loss may have taken sectors
    kept: int  # up to here records with a wrong CRC belong to the log
    wrong_crcs: list[int]  # where they are
    records: int = 0
    last_store_timestamp_ms: int = 0
    torn: bool = False  # it ended at a record that is whole but for zeros in its texts


def recover(
    commit_log: CommitLog,
    limits: Limits | None,
    *,
    clean: bool,
    same_boot: bool,
    floor: int | None = None,
    from_rocketmq: bool = False,
    rocketmq_end: int = 0,
    page_lost: bool = False,
) -> Recovered:
    """Find the log's end; changes nothing.

    `floor` is the offset of a cut that was begun (its intent is on the disk): bytes beyond it may
    be missing. `from_rocketmq` means that this node copied the log from a RocketMQ master. A record
    that cannot be decoded only because of its topic's length then belongs to the log.
    `rocketmq_end` is where the bytes end that it copied from one, also earlier. `page_lost`
    means that hastore wrote this log, though there are no `limits`. Raises StoreBrokenError if
    synced bytes are missing or damaged.
    """
    queue = commit_log.queue
    first = queue.start
    if limits is not None and queue.files and limits.first_offset > first:
        first = min(limits.first_offset, queue.end)
    elif limits is not None and not queue.files:
        first = limits.first_offset
    flushed = limits.flushed_offset if limits is not None else first
    protected = flushed if floor is None else min(flushed, floor)
    if not queue.files:
        if protected > first:
            raise _broken(commit_log, first, protected, "no file is there")
        return Recovered(first, first, first, 0, 0, first, first)
    start = _start_of_scan(
        commit_log, limits, first, clean=clean and not page_lost, same_boot=same_boot
    )
    power_lost = limits is not None and not clean and not same_boot
    scan = _scan(
        commit_log, start,
        unreadable=from_rocketmq and limits is not None,
        synced=flushed if power_lost else _NOWHERE,
        kept=0 if limits is None or commit_log.form.lead else min(protected, rocketmq_end),
    )  # fmt: skip
    _tell_wrong_crcs(scan.wrong_crcs)
    if scan.end < protected:
        raise _broken(commit_log, scan.end, protected, "no valid record is at their start")
    if limits is None and scan.form.lead:
        _refuse_other_body(commit_log, scan)
    if limits is None and scan.end == first:
        _refuse_headless(commit_log, first)
    if page_lost and (floor is None or scan.end < floor):
        _refuse_damage(commit_log, scan, commit_log.remedy)
    elif limits is None and clean and scan.end > first:
        _refuse_damage(commit_log, scan, _AS_ROCKETMQ.format(scan.end))
    doubtful = limits is not None and _is_doubtful(
        commit_log, scan, limits, floor, clean=clean, same_boot=same_boot
    )
    return Recovered(
        first,
        scan.end,
        start,
        scan.records,
        scan.last_store_timestamp_ms,
        scan.recovery_start,
        scan.next_recovery_start,
        scan.check if isinstance(scan.check, EntryChain) else None,
        scan.unreadable,
        doubtful,
        tuple(scan.wrong_crcs),
    )


def rewrite_unsynced(commit_log: CommitLog, recovered: Recovered, flushed: int) -> None:
    """Write the bytes from `flushed` to the end that was found once more, as they are.

    After a failed sync the kernel counts pages as written that are not on the disk, and a later
    sync of them says success. Once they are written again, it is true. The kernel may also have
    dropped such a page since `recover` read it, so what is written is checked once more. Pieces of
    at most 4 MiB, or one record, are in memory. Each file is synced before the next is read. Raises
    StoreError if the bytes are not those that `recover` read.
    """
    start = max(flushed, recovered.min_offset)
    if start >= recovered.end:
        return
    scan = _scan(commit_log, start, unreadable=recovered.unreadable, rewrite=True)
    if scan.end != recovered.end:
        raise StoreError(
            f"{commit_log.directory}: the log ended at {recovered.end}, and on a second reading at"
            f" {scan.end}: its disk loses pages; check the disk, then start the node again"
        )


def clear_beyond(commit_log: CommitLog, recovered: Recovered, synced: int) -> None:
    """Zero the bytes beyond the end, remove later files, and sync the log from `synced` on."""
    commit_log.truncate(recovered.end)
    queue = commit_log.queue
    if queue.files:
        queue.note_names()
    queue.sync(min(synced, recovered.end), recovered.end)


def _start_of_scan(
    commit_log: CommitLog, limits: Limits | None, first: int, *, clean: bool, same_boot: bool
) -> int:
    queue = commit_log.queue
    last_file = max(first, queue.files[-1].start)
    if limits is None:
        back = _FOREIGN_FILES if clean else len(queue.files)
        return max(first, queue.files[-min(back, len(queue.files))].start)
    if clean or same_boot:
        start = min(limits.recovery_start, limits.flushed_offset)
        if first <= start < queue.end:
            return start
        return last_file if start >= queue.end else first
    start = limits.flushed_offset - limits.flushed_offset % commit_log.file_size
    return min(max(first, start), last_file)


def _scan(
    commit_log: CommitLog,
    start: int,
    *,
    unreadable: bool,
    rewrite: bool = False,
    synced: int = _NOWHERE,
    kept: int = 0,
) -> _Scan:
    """Read records from `start` to the log's end; with `unreadable` also undecodable ones.

    With `rewrite` what was read is written again, once it is known to be sound. From `synced` on a
    sector of a record may be missing. Up to `kept` records may have a wrong CRC.
    """
    form = commit_log.form
    check = form.chain(units=not rewrite)
    scan = _Scan(start, start, start, unreadable, rewrite, check, form, synced, kept, [])
    for file in commit_log.queue.one_by_one():
        if file.end <= scan.end:
            continue
        goes_on = _scan_file(file, scan)
        if rewrite:  # before it is closed: of a closed file the kernel may forget a failed write
            file.sync()
        if not goes_on:
            break
    return scan


def _scan_file(file: MappedFile, scan: _Scan) -> bool:
    """Move `scan` through one file; returns whether the file's end was reached.

    Reads by pread, so that a bad sector is an OSError; through the map it would be a SIGBUS.
    """
    wanted = _WINDOW_BYTES
    form, check_item, lead = scan.form, scan.check, scan.form.lead
    while scan.end < file.end:
        position = scan.end - file.start
        left = file.size - position
        if scan.end - scan.next_recovery_start >= RECOVERY_STEP_BYTES:
            scan.recovery_start, scan.next_recovery_start = scan.next_recovery_start, scan.end
        data = memoryview(file.file.pread(min(wanted, left), position))
        at, end = 0, len(data)
        while size := (
            check_item(data, at, end, scan.end)
            or (scan.unreadable and check_unreadable(data, at, end, scan.end))
            or _with_wrong_crc(data, at, end, scan)
        ):
            if not lead and scan.end >= scan.synced and _is_torn(data, at, end, position):
                scan.torn = True
                return False
            if not lead or form.holds_record(data, at, size):
                flags = _SYS_FLAG.unpack_from(data, at + lead)[0]
                stamp = at + lead + store_at(flags)
                scan.last_store_timestamp_ms = int.from_bytes(data[stamp : stamp + 8], signed=True)
                scan.records += 1
            at += size
            scan.end += size
        # What fills a blank up means nothing, so only its head need be in the window.
        blank = form.check_blank(data, at, left) if end - at >= BLANK_SIZE else 0
        if scan.rewrite and at + blank:
            file.file.pwrite(data[: at + min(blank, BLANK_SIZE)], position)
        if scan.end == file.end:
            return True
        if blank:
            scan.end += blank
        elif at and end < left:
            wanted = _WINDOW_BYTES  # the next window begins at a record
        else:
            wanted = _longer(form, data, at, scan.end, left)
            if not wanted:
                return False
    return True


def _with_wrong_crc(data: memoryview, at: int, end: int, scan: _Scan) -> int:
    """Return the size of a record that stays in the log with a wrong CRC, and note it; or 0."""
    size = check_wrong_crc(data, at, end, scan.end) if scan.end < scan.kept else 0
    if not size or scan.end + size > scan.kept:
        return 0
    scan.wrong_crcs.append(scan.end)
    return size


def _tell_wrong_crcs(places: list[int]) -> None:
    if places:
        log.warning(
            "the record at %d, of a RocketMQ master, has a wrong CRC (one of %d records): it stays "
            "in the log, as RocketMQ's slaves keep what their master has. If other nodes have "
            "it with a right CRC, this node's disk is damaged; `hastore log verify` tells more",
            places[0], len(places),
        )  # fmt: skip


def _is_torn(data: memoryview, at: int, end: int, position: int) -> bool:
    """Whether a part of a record's topic or properties was never written: only its body has a CRC.

    What is missing is zeros, up to the end of a sector, or of the texts where the sector goes on.
    Zeros that a client has put in there end elsewhere, but for one time in some hundreds: then the
    record cannot be told from a torn one. `position` is that of `data` in the file.
    """
    parts = find_parts(data, at, end)
    if parts is None:  # RocketMQ's, and unreadable
        return False
    topic_at, topic_length, properties_at = parts[6:9]
    texts = (topic_at, topic_at + topic_length), (properties_at, at + parts[0])
    for low, stop in texts:
        for zeros in _ZEROS.finditer(data[low:stop]):
            first, last = position + low + zeros.start(), position + low + zeros.end()
            edge = -(-first // _SECTOR) * _SECTOR  # the first one at or behind the first zero
            # Whole sectors may be missing, and a client's zeros follow them.
            lacks_sectors = first == edge and last - first >= _SECTOR
            ends_there = last % _SECTOR == 0 or last == position + stop
            if edge <= last and (ends_there or lacks_sectors):
                return True
    return False


def _longer(form: LogFormat, data: memoryview, at: int, offset: int, left: int) -> int:
    """Return the size of the item at `at`, if it ends beyond `data`, and in the file; else 0.

    It lies at `offset` of the log. The lengths in its header must fit its size: a damaged size
    would have all the rest of the file read, which is `left` bytes from the begin of `data` on.
    """
    end = len(data)
    size = form.announced(data, at, end)
    if end < at + size <= left and form.may_begin(data, at, end, offset):
        return size
    return 0


def _refuse_headless(commit_log: CommitLog, first: int) -> None:
    """Raise StoreBrokenError if the first file has data, but no record at its start.

    After a resync a log may begin inside its first file. Only the limits page says where, and it is
    missing here.
    """
    head = commit_log.queue.files[0].view
    size = len(head)
    if any(head[:8]):
        return  # a write of the first record was torn
    step = 1 << 20
    for at in range(0, size, step):
        if any(bytes(head[at : at + step]).strip(b"\0")):
            raise StoreBrokenError(
                f"{commit_log.directory}: data follow, but no record is at {first}; nothing was"
                f" cut: {commit_log.remedy}"
            )


_AS_ROCKETMQ = (
    "restore the file from a backup or another node, or, to give up all from {} on as RocketMQ"
    " would, create a file `abort` in the store"
)


def _refuse_damage(commit_log: CommitLog, scan: _Scan, remedy: str) -> None:
    """Raise StoreBrokenError if whole records follow a damaged one: a cut would lose them.

    Older whole records beyond the end are no sign of damage: RocketMQ leaves them when it cuts a
    log. In a log of entries those are of an older term, or continue no entry.
    """
    found = _record_after(commit_log, scan)
    if found is not None:
        raise _damaged(commit_log, scan.end, found, remedy)


def _is_doubtful(
    commit_log: CommitLog,
    scan: _Scan,
    limits: Limits,
    floor: int | None,
    *,
    clean: bool,
    same_boot: bool,
) -> bool:
    """Whether a cut at the end may take records that were synced or confirmed.

    Raises StoreBrokenError if the end is no work of a crash, but of damage: see the module's text.
    """
    short = same_boot and scan.end < limits.record_end
    if short:
        log.error(
            "the log ends at %d, %d bytes before the end that was noted during this boot: something"
            " outside hastore damaged it",
            scan.end,
            limits.record_end - scan.end,
        )
    kept = _NOWHERE if floor is None else floor
    if scan.form.lead or scan.end >= kept:
        return short
    power_lost = not clean and not same_boot
    found = _record_after(commit_log, scan, patient=False)
    if found is None or found >= kept:
        confirmed = 0 if power_lost else min(limits.confirmed_offset, kept)
        return short or _has_confirmed(commit_log, scan, confirmed)
    unwritten = _may_be_unwritten(commit_log, scan)
    if power_lost:  # of what was not synced, any sector may be missing
        return scan.torn or not unwritten
    if not clean and unwritten:  # a sync failed, and the kernel dropped the page
        return True
    if not clean and scan.unreadable and _is_wrong_crc(commit_log, scan):
        return True  # as the RocketMQ master has it, which sends it again
    raise _damaged(commit_log, scan.end, found, commit_log.remedy)


def _is_wrong_crc(commit_log: CommitLog, scan: _Scan) -> bool:
    """Whether nothing but its CRC is wrong with the record at the end."""
    found = _announced_at(commit_log, scan)
    if found is None:
        return False
    file, size = found
    data = file.file.pread(size, scan.end - file.start)
    return bool(check_wrong_crc(data, 0, len(data), scan.end))


def _announced_at(commit_log: CommitLog, scan: _Scan) -> tuple[MappedFile, int] | None:
    """Return the file of the scan's end, and the size that a record states there, or 0."""
    file = commit_log.queue.find(scan.end)
    if file is None:
        return None
    head = file.file.pread(SIZE_AND_MAGIC.size, scan.end - file.start)
    size = scan.form.announced(head, 0, len(head))
    return file, size if size <= file.end - scan.end else 0


def _has_confirmed(commit_log: CommitLog, scan: _Scan, confirmed: int) -> bool:
    """Whether a record at or behind the end is confirmed: slaves report parts of records, too."""
    if scan.end >= confirmed:
        return False
    found = _announced_at(commit_log, scan)
    size = (found[1] if found is not None else 0) or MIN_RECORD_SIZE
    return scan.end + size <= confirmed


def _may_be_unwritten(commit_log: CommitLog, scan: _Scan) -> bool:
    """Whether a part of the record at the end may never have been written to the disk.

    Such a part is zeros up to the end of a sector. If the record's size is not known, that part
    begins in its first bytes.
    """
    found = _announced_at(commit_log, scan)
    if found is None:
        return False
    file, size = found
    position, head = scan.end - file.start, SIZE_AND_MAGIC.size
    stop = -(-(position + (size or head)) // _SECTOR) * _SECTOR
    data = file.file.pread(min(stop, file.size) - position, position)
    edges = range(_SECTOR - position % _SECTOR, len(data) + 1, _SECTOR)
    if size:
        return any(not data[edge - 1] for edge in edges)
    return any(not any(data[min(edge, head) - 1 : edge]) for edge in edges)


def _refuse_other_body(commit_log: CommitLog, scan: _Scan) -> None:
    """Raise StoreBrokenError if the log goes on with an entry whose body is no record."""
    file = commit_log.queue.find(scan.end)
    if file is None:
        return
    position = scan.end - file.start
    head = file.file.pread(ENTRY_HEADER_BYTES, position)
    size = scan.form.announced(head, 0, len(head))
    raw = file.file.pread(min(size, file.size - position), position)
    header = read_header(raw, 0, len(raw), scan.end)
    body = raw[ENTRY_HEADER_BYTES:]
    if header is None or (body and not (any(body[:8]) and any(body[8:]))):
        return  # no entry, or a torn one
    chain = scan.check
    assert isinstance(chain, EntryChain)
    follows = chain.next_index in (None, header.index) and header.term >= chain.term
    if follows and not scan.form.holds_record(raw, 0, len(raw)):
        raise StoreBrokenError(
            f"{commit_log.directory}: the body of entry {header.index} at {scan.end} is no RocketMQ"
            " record; nothing was cut: hastore opens what RocketMQ wrote through DLedger, not the"
            " stores of other programs (`hastore log dump` reads them)"
        )


def _record_after(commit_log: CommitLog, scan: _Scan, *, patient: bool = True) -> int | None:
    """Return the first whole record after the end that was stored no earlier than the last one.

    Unless it is `patient`, the search ends after many zeros, which is where nothing was written. So
    a start reads little of a new file.
    """
    lead = scan.form.lead
    known = None if patient else _announced_at(commit_log, scan)
    sought = scan.end + (known[1] if known is not None else 0)
    zeros = 0
    for file in commit_log.queue.one_by_one():
        at = max(scan.end + 1, file.start) - file.start
        while at + lead + SIZE_AND_MAGIC.size <= file.size:
            data = file.file.pread(min(_WINDOW_BYTES, file.size - at), at)
            if not patient:
                zeros = 0 if data.strip(b"\0") else zeros + len(data)
                if zeros >= _WINDOW_BYTES and file.start + at >= sought:
                    return None
            for place in record_places(data, lead):
                if _is_record(file, at + place, scan):
                    return file.start + at + place
            at += max(len(data) - lead - SIZE_AND_MAGIC.size + 1, 1)
    return None


def _is_record(file: MappedFile, at: int, scan: _Scan) -> bool:
    form, chain = scan.form, scan.check
    head = file.file.pread(form.lead + SIZE_AND_MAGIC.size, at)
    size = form.announced(head, 0, len(head))
    if not 0 < size <= file.size - at:
        return False
    data = file.file.pread(size, at)
    if form.check_item(data, 0, len(data), file.start + at) != size:
        return False
    if isinstance(chain, EntryChain):
        header = read_header(data, 0, size, file.start + at)
        assert header is not None
        return header.index > (chain.next_index or 0) and header.term >= chain.term
    flags = _SYS_FLAG.unpack_from(data, 0)[0]
    stamp = store_at(flags)
    stored_ms = int.from_bytes(data[stamp : stamp + 8], signed=True)
    return stored_ms >= scan.last_store_timestamp_ms


def _damaged(commit_log: CommitLog, at: int, found: int, remedy: str) -> StoreBrokenError:
    return StoreBrokenError(
        f"{commit_log.directory}: the record at {at} is damaged, and whole records follow from"
        f" {found} on; nothing was cut: {remedy}"
    )


def _broken(commit_log: CommitLog, start: int, end: int, why: str) -> StoreBrokenError:
    return StoreBrokenError(
        f"{commit_log.directory}: bytes [{start}, {end}) were synced, but {why}; nothing was cut:"
        f" {commit_log.remedy}"
    )
