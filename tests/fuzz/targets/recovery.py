"""Recovery of a log whose files and limits page are any bytes: it opens, or says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from hastore.errors import StoreError
from hastore.fs.memory import MemoryFileSystem
from hastore.record.codec import check_unreadable, pack_blank
from hastore.record.log_format import fill_in_crcs, pack_entry_blank, pack_header
from hastore.service import raise_failure
from hastore.store.log import recovery
from hastore.store.log.commit_log import CommitLog, StoreHealth
from hastore.store.log.entry_index import EntryIndex
from hastore.store.log.recovery import clear_beyond, recover, rewrite_unsynced
from hastore.store.state.entry_state import EntryState
from hastore.store.state.limits import Limits
from tests.fuzz import kit
from tests.fuzz.targets.entries import entries_of
from tests.fuzz.targets.log_walks import records

FILE = 1024
FILES = 4
HEAD = 13  # flags, then six numbers: see `_limits`
CLEAN, SAME_BOOT, FROM_ROCKETMQ, PAGE, KNOWN, ENTRIES, FLOOR, WINDOWS = (1 << n for n in range(8))
WINDOW = 100  # bytes of one read, with WINDOWS: so records are cut by its end
REACHES = (
    recover, rewrite_unsynced, clear_beyond, recovery._refuse_damage, recovery._refuse_headless,
    recovery._record_after, recovery._longer, recovery._refuse_other_body,
)  # fmt: skip
LEAST = kit.Least(0.3, 3)


def _head(flags: int, *numbers: int) -> bytes:
    numbers = (*numbers, *(0,) * (6 - len(numbers)))
    return bytes((flags,)) + b"".join(number.to_bytes(2) for number in numbers)


def plain_log(count: int) -> tuple[bytes, int]:
    """Return the files of a log of so many records, and where it ends."""
    out, number = bytearray(), 0
    while number < count:
        raw = records(1, len(out), queue_offset=number, body=b"x" * (number % 5))
        left = FILE - len(out) % FILE
        if len(raw) + 8 > left:
            out += pack_blank(left) + bytes(left - 8)
            continue
        out += raw
        number += 1
    return bytes(out), len(out)


def entry_log(count: int) -> tuple[bytes, int]:
    """Return one file of entries, and where it ends."""
    raw, _ = entries_of(count)
    return raw, len(raw)


def seeds() -> list[bytes]:
    """Return logs after clean stops, kills and power losses, whole and damaged."""
    log, end = plain_log(18)
    entries, last = entry_log(4)
    half = next(at for at in range(end // 2, end) if log[at + 4 : at + 8] == b"\xda\xa3\x20\xa7")
    limits = (end, end, 0, half, 0, 0)
    torn = log[: end - 20]
    hole = log[:half] + bytes(30) + log[half + 30 :]
    full = (
        entries + pack_entry_blank(FILE - last) + bytes(FILE - last - 8) if last < FILE else entries
    )
    return [
        _head(PAGE | CLEAN | SAME_BOOT, *limits) + log,
        _head(PAGE | SAME_BOOT, half, end) + torn,
        _head(PAGE, half, end) + hole,
        _head(PAGE, end, end) + hole,
        _head(PAGE) + b"",
        _head(PAGE | FLOOR, end, end, 0, 0, half) + log[:half],
        _head(CLEAN) + log,
        _head(CLEAN) + hole,
        _head(0) + hole,
        _head(KNOWN) + hole,
        _head(CLEAN) + bytes(91) + log[91:],
        _head(0) + b"",
        _head(PAGE, 5) + b"",
        _head(PAGE | FROM_ROCKETMQ) + log,
        _head(PAGE | ENTRIES, last) + entries,
        _head(ENTRIES | CLEAN) + entries,
        _head(ENTRIES) + entries[:-7],
        _head(ENTRIES) + full,
        _head(ENTRIES | CLEAN) + entries[:60] + b"\xff" + entries[61:],
        _head(ENTRIES)
        + kit.golden("dledger-terms/store/dledger-n0/data/00000000000000000000", 900),
        _head(PAGE | SAME_BOOT | WINDOWS, half, end) + torn,
        _head(ENTRIES | WINDOWS) + entries,
        _head(ENTRIES) + other_body(),
        _head(PAGE | SAME_BOOT, 0, end) + log + bytes(60),
    ]


def other_body() -> bytes:
    """Return an entry of another program, whose body is no record."""
    raw = bytearray(pack_header(0, 1, 0, 40) + b"another program's " * 2 + b"data")
    fill_in_crcs(raw, 0)
    return bytes(raw)


def _limits(data: bytes) -> Limits:
    """Return a limits page whose numbers are those of the input, in the order that pages keep."""
    flushed, end, start, following, _, first = (
        int.from_bytes(data[at : at + 2]) % (FILES * FILE + 1) for at in range(1, HEAD, 2)
    )
    low, middle, high = sorted((start, following, end))
    return Limits(1, bytes(16), FILE, first, flushed, high, low, middle)


@contextlib.contextmanager
def opened(data: bytes, content: bytes) -> Iterator[tuple[MemoryFileSystem, CommitLog]]:
    """Lay the files of a log, and load them."""
    fs = MemoryFileSystem()
    entries = None
    if data[0] & ENTRIES:
        entries = EntryIndex(fs, "/s/dledger-n1/index", EntryState(fs, "/s"))
    log = CommitLog(fs, "/s", FILE, StoreHealth(), on_failure=raise_failure, entries=entries)
    fs.make_dirs(log.directory)
    fs.make_dirs("/s/hastore")
    for start in range(0, len(content), FILE):
        part = content[start : start + FILE].ljust(FILE, b"\0")
        fs.replace_bytes(f"{log.directory}/{start:020d}", part)
    try:
        log.queue.load(FILE)
        yield fs, log
    finally:
        for mapped in log.queue.files:
            mapped.release()
        fs.remove_tree("/s")


def _content(fs: MemoryFileSystem, log: CommitLog) -> bytes:
    names = fs.list_dir(log.directory)
    return b"".join(fs.read_bytes(f"{log.directory}/{name}") for name in names if name.isdigit())


def one(data: bytes) -> None:
    """Recover a log: nothing below what was synced is cut, and all that is left is valid."""
    kit.refuse(len(data) >= HEAD, "no flags")
    flags, content = data[0], data[HEAD : HEAD + FILES * FILE]
    content = content.ljust(-(-len(content) // FILE) * FILE, b"\0")
    limits = _limits(data) if flags & PAGE else None
    floor = int.from_bytes(data[9:11]) % (FILES * FILE) if flags & FLOOR else None
    window = WINDOW if flags & WINDOWS else recovery._WINDOW_BYTES
    with opened(data, content) as (fs, log), mock.patch.object(recovery, "_WINDOW_BYTES", window):
        try:
            with kit.documented(StoreError):
                found = recover(
                    log, limits, clean=bool(flags & CLEAN), same_boot=bool(flags & SAME_BOOT),
                    floor=floor, from_rocketmq=bool(flags & FROM_ROCKETMQ),
                    page_lost=limits is None and bool(flags & KNOWN),
                )  # fmt: skip
        finally:
            assert _content(fs, log) == content, "recovery changes nothing"
        flushed = limits.flushed_offset if limits is not None else 0
        protected = flushed if floor is None else min(flushed, floor)
        assert protected <= found.end, "what was synced is never cut in silence"
        assert found.min_offset <= found.end <= max(len(content), found.min_offset)
        starts = _starts(log, content, found)
        if limits is not None and flags & SAME_BOOT:
            # A page of hastore's has the end of a record there: only then this cannot fail.
            with kit.documented(*(() if flushed in starts else (StoreError,))):
                rewrite_unsynced(log, found, flushed)
        if log.queue.files:
            clear_beyond(log, found, flushed)
            left = _content(fs, log)
            assert left[: found.end] == content[: found.end], "the log is as it was"
            assert not any(left[found.end :]), "nothing is left beyond the end"


def _starts(log: CommitLog, content: bytes, found: recovery.Recovered) -> set[int]:
    """Read the log once more from where recovery began; return where its items begin and end."""
    check = log.form.chain()
    at = found.scanned_from
    starts = {at}
    while at < found.end:
        stop = at - at % FILE + FILE
        size = check(content, at, stop, at)
        if not size and found.unreadable:
            size = check_unreadable(content, at, stop, at)
        if not size:
            size = log.form.check_blank(content, at, stop)
        assert size, f"no valid item at {at}, and the log ends at {found.end}"
        at += size
        starts.add(at)
    assert at == found.end or found.end <= found.scanned_from
    if at == found.end and at < len(content):
        stop = at - at % FILE + FILE
        assert not check(content, at, stop, at), f"a valid item at {at}, the end, is lost"
        assert not log.form.check_blank(content, at, stop), f"the log goes on behind {at}"
    return starts
