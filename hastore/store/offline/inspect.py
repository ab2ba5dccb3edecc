"""Dump, verify and count the log of any store for `hastore log`; read-only.

A node may be using the store. `dump`, `verify` and `stat` read the log up to its last whole record
and ignore the readable offset. They also take a folder that holds log files directly, such as a
tail in `rescued/`, and a directory of DLedger with its entries. There the log ends at the first
entry that does not continue the one before it: DLedger leaves what it has truncated behind the end.
`verify` also compares the consume queues, and DLedger's index, with the log, item by item.
"""

import base64
import contextlib
import copy
import hashlib
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hastore.fs.filesystem import REAL, FileSystem, file_name, is_file_name
from hastore.record.codec import Record, decode_record
from hastore.record.layout import MIN_RECORD_SIZE
from hastore.record.log_format import (
    ENTRY_HEADER,
    ENTRY_HEADER_BYTES,
    INDEX_UNIT,
    INDEX_UNIT_BYTES,
    EntryChain,
    EntryHeader,
    pack_unit,
    read_header,
)
from hastore.store.derived.consume_queue import UNIT, UNIT_BYTES, is_directory_name
from hastore.store.derived.contract import Dispatched, inner_batch_of
from hastore.store.derived.scalar_walk import ScalarWalker
from hastore.store.offline.log_files import LogFile, LogFiles, committed_index, read_index, unit_of
from hastore.store.state.limits import read_limits

_NAMED_MAX = 100
_READ_BYTES = 1 << 16
_OPEN_MAX = 128  # queues whose files are known at a time
OnProgress = Callable[[int, int], None]  # bytes done, total bytes
_DAMAGES_MAX = 100  # damaged ranges listed; for further ranges only the bytes are counted
_PROGRESS_BYTES = 16 << 20
_OF_ENTRIES = (
    *("entries", "entries_without_crc"),
    *("ledger_begin_index", "ledger_end_index", "ledger_end_term"),
)


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of the log that should consist of records or blanks, but does not."""

    offset: int
    end_offset: int
    reason: str


@dataclass(slots=True)
class Stat:
    """The content of a log."""

    store: str
    files: int = 0
    file_size: int = 0
    min_offset: int = 0
    max_offset: int = 0  # the end of the last whole record
    records: int = 0
    blanks: int = 0
    record_bytes: int = 0
    blank_bytes: int = 0
    first_store_ms: int | None = None
    last_store_ms: int | None = None
    topics: dict[str, dict[str, int]] = field(default_factory=dict)
    damaged_at: int | None = None  # where `stat` ended before the log's end; None: all is counted
    damage: str | None = None  # what is there
    # Of a log of entries; None in a plain log.
    entries: int | None = None
    entries_without_crc: int | None = None  # DLedger's own, and those of earlier versions
    ledger_begin_index: int | None = None
    ledger_end_index: int | None = None
    ledger_end_term: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        every = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.entries is None:
            return {name: every[name] for name in every if name not in _OF_ENTRIES}
        return every


@dataclass(slots=True)
class Verification:
    """The result of `verify`."""

    stat: Stat
    damages: list[Damage] = field(default_factory=list)
    damaged_bytes: int = 0
    units: int = 0  # units of consume queues that agree with the log
    units_missing: int = 0  # replay has not reached their records yet
    units_wrong: list[str] = field(default_factory=list)
    units_wrong_count: int = 0
    index_units: int | None = None  # units of DLedger's index that agree; None in a plain log
    index_missing: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged; missing units are not damage."""
        return not self.damages and not self.units_wrong_count

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        of_entries = {}
        if self.index_units is not None:
            of_entries = {name: getattr(self.stat, name) for name in _OF_ENTRIES}
            of_entries |= {"index_units": self.index_units, "index_missing": self.index_missing}
        return {
            "store": self.stat.store,
            "ok": self.ok,
            "min_offset": self.stat.min_offset,
            "max_offset": self.stat.max_offset,
            "records": self.stat.records,
            "blanks": self.stat.blanks,
            "damaged_bytes": self.damaged_bytes,
            "damages": [asdict(found) for found in self.damages],
            "units": self.units,
            "units_missing": self.units_missing,
            "units_wrong": self.units_wrong_count,
            "wrong": self.units_wrong,
            **of_entries,
        }


def dump(
    store: str,
    start: int | None = None,
    end: int | None = None,
    *,
    bodies: bool = False,
    fs: FileSystem = REAL,
) -> Iterator[dict[str, Any]]:
    """Yield an object for each record and blank that begins in [start, end), in the log's order.

    In a log of entries the objects are entries, each with its record, if it has one.

    `start` may lie inside a record. Stops at the first bytes that are neither a record nor a blank.
    With `bodies`, each record has a `body`, or a `body_base64` if the body is not UTF-8. Raises
    StoreError if there is no store.
    """
    with contextlib.closing(LogFiles(store, fs, bare_too=True)) as files:
        yield from _dump(files, start, end, bodies)


def place_of(item: Mapping[str, Any]) -> int:
    """Return where an item of `dump` begins in the log: an entry at `pos`, all else at `offset`."""
    return int(item["pos"] if "pos" in item else item["offset"])


def begin_of(store: str, fs: FileSystem = REAL) -> int | None:
    """Return where the log of a store, or of a folder, must begin; None if nothing says it.

    If a dump of all begins later, or not at all, the first record is damaged. Raises StoreError if
    there is no store.
    """
    with contextlib.closing(LogFiles(store, fs, bare_too=True)) as files:
        return files.stated_begin()


def _dump(
    files: LogFiles, start: int | None, end: int | None, bodies: bool
) -> Iterator[dict[str, Any]]:
    found = files.list()
    if not found:
        return
    form, check = files.form, files.form.chain()
    offset = found[0].start if start is None else max(start, found[0].start)
    if offset == found[0].start:
        offset = files.first_record_start(found)
    for file in found:
        if not file.start <= offset < file.end:
            continue
        if start is not None and file.start < start:
            # What was cut from the middle of a file has zeros before its begin: no walk gets there.
            walks = any(files.view(file)[:MIN_RECORD_SIZE])
            offset = files.record_start_at(file, offset, None if walks else start)
        data = files.view(file)
        while offset < file.end and (end is None or offset < end):
            at = offset - file.start
            size = check(data, at, file.size, offset)
            if size:
                raw = bytes(data[at : at + size])
                if form.check_item(raw, 0, size, offset) != size:
                    return  # the log was cut meanwhile
                fields = None
                if form.holds_record(raw, 0, size):
                    record = decode_record(raw, form.lead)
                    fields = record_fields(record, raw[form.lead :])
                    fields |= body_field(record.body) if bodies else {}
                if form.lead:
                    yield entry_fields(raw, fields) | _other_body(raw, fields, bodies=bodies)
                elif fields is not None:
                    yield fields
            else:
                size = form.check_blank(data, at, file.size)
                if not size:
                    return
                yield {"pos" if form.lead else "offset": offset, "size": size, "blank": True}
            offset += size


def entry_fields(raw: bytes, record: dict[str, Any] | None) -> dict[str, Any]:
    """Return a whole entry's fields; `record` are those of the record in it, None without one."""
    header = EntryHeader(*ENTRY_HEADER.unpack_from(raw))
    found: dict[str, Any] = {
        "index": header.index,
        "term": header.term,
        "pos": header.pos,
        "size": header.size,
        "magic": header.magic,
        "channel": header.channel,
        "chain_crc": header.chain_crc,
        "body_crc": header.body_crc,
        "body_size": header.body_size,
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    return found if record is None else found | {"record": record}


def _other_body(raw: bytes, record: dict[str, Any] | None, *, bodies: bool) -> dict[str, str]:
    """Return the body of an entry that has no record, if bodies are wanted."""
    return body_field(raw[ENTRY_HEADER_BYTES:]) if bodies and record is None else {}


def record_fields(record: Record, raw: bytes) -> dict[str, Any]:
    """Return a record as `hastore log dump --json` prints it."""
    return {
        "offset": record.physical_offset,
        "size": len(raw),
        "magic": record.magic,
        "topic": record.topic,
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "body_crc": record.body_crc,
        "body_size": len(record.body),
        "sys_flag": record.sys_flag,
        "flag": record.flag,
        "born_ms": record.born_timestamp_ms,
        "born_host": record.born_host.text,
        "store_ms": record.store_timestamp_ms,
        "store_host": record.store_host.text,
        "reconsume_times": record.reconsume_times,
        "prepared_offset": record.prepared_transaction_offset,
        "properties": [list(pair) for pair in record.property_pairs],
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def body_field(body: bytes) -> dict[str, str]:
    """Return a body for JSON: as `body`, or as `body_base64` if it is not UTF-8."""
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def stat(store: str, *, fs: FileSystem = REAL, progress: OnProgress | None = None) -> Stat:
    """Count a log's records by topic, up to its end or the first damage; raises StoreError.

    `damaged_at` of the result says whether it was damage.
    """
    found = _examine(store, fs, progress, checked=False)
    if found.damages:
        first = found.damages[0]
        found.stat.damaged_at, found.stat.damage = first.offset, first.reason
    return found.stat


def verify(
    store: str, *, fs: FileSystem = REAL, progress: OnProgress | None = None
) -> Verification:
    """Check every record (CRC, offset, lengths) and compare the queues; continue after damage.

    Raises StoreError if there is no store.
    """
    return _examine(store, fs, progress, checked=True)


def _examine(
    store: str, fs: FileSystem, progress: OnProgress | None, *, checked: bool
) -> Verification:
    with contextlib.closing(LogFiles(store, fs, bare_too=True)) as files:
        return _Examination(store, fs, files, progress, checked).examine()


class _Examination:
    """One pass over a log, for `verify` if `checked`, else for `stat`."""

    def __init__(
        self,
        store: str,
        fs: FileSystem,
        files: LogFiles,
        progress: OnProgress | None,
        checked: bool,
    ) -> None:
        self._fs = fs
        self._files = files
        self._form = files.form
        self._check = files.form.chain()
        self._progress = progress
        self._checked = checked
        self._walker = ScalarWalker()
        alone = files.is_bare or files.is_alone
        self._queues = QueueCheck(store, fs) if checked and not alone else None
        ledger = files.ledger if checked else None
        self._index = None if ledger is None else IndexCheck(fs, ledger)
        limits = read_limits(fs, store)
        self._known_end = None if limits is None else limits.flushed_offset
        self.stat = Stat(store)
        self.result = Verification(self.stat)

    def examine(self) -> Verification:
        """Walk all files and return the result."""
        found = self._files.list()
        result, seen = self.result, self.stat
        seen.files = len(found)
        if not found:
            return result
        seen.file_size = found[0].size
        offset = seen.min_offset = seen.max_offset = self._files.first_record_start(found)
        total = found[-1].end - offset
        for number, file in enumerate(found):
            if number and file.start != found[number - 1].end:
                self._damaged(found[number - 1].end, file.start, "files are missing")
                if not self._checked:
                    break
            if offset >= file.end:
                continue
            try:
                reached = self._through(file, found[number:], max(offset, file.start))
            except FileNotFoundError:
                reached = file.end  # retention removed the file meanwhile
            if self._progress is not None:
                self._progress((reached or file.end) - seen.min_offset, total)
            if reached is None:
                break
            offset = reached
        stopped = bool(result.damages) and not self._checked
        if self._known_end is not None and seen.max_offset < self._known_end and not stopped:
            self._damaged(seen.max_offset, self._known_end, "synced bytes are missing")
        self._check_committed()
        if self._queues is not None:
            checked = self._queues
            result.units, result.units_missing = checked.units, checked.missing
            result.units_wrong, result.units_wrong_count = checked.wrong, checked.wrong_count
        if self._index is not None:
            index = self._index
            result.index_units, result.index_missing = index.units, index.missing
            result.units_wrong = [*result.units_wrong, *index.wrong]
            result.units_wrong_count += index.wrong_count
        return result

    def _check_committed(self) -> None:
        """Report the entries that the checkpoint knows to be committed, and the log lacks."""
        ledger, seen = self._files.ledger, self.stat
        if ledger is None or not self._checked:
            return
        committed = committed_index(self._fs, ledger)
        if committed > (-1 if seen.ledger_end_index is None else seen.ledger_end_index):
            unit = unit_of(self._fs, ledger, committed)
            end = seen.max_offset if unit is None else max(seen.max_offset, sum(unit))
            self._damaged(seen.max_offset, end, f"entries up to {committed} are committed")

    def _through(self, file: LogFile, files: list[LogFile], offset: int) -> int | None:
        """Walk a file from a record start, past damage; return the next start, or None to stop."""
        while True:
            offset = self._walk_file(file, offset)
            if offset >= file.end:
                return offset
            if self._known_end is not None and offset >= self._known_end:
                return None  # a torn tail that recovery cuts; not damage
            later = self._next_good(files, offset + 1)
            if later is None:
                return None
            data, at = self._files.view(file), offset - file.start
            if self._valid(data, at, file, offset):
                continue  # a node was still writing the record when the walk read it
            check, why = self._check, "no valid record"
            if isinstance(check, EntryChain):
                why = check.why_not(data, at, file.size, offset)
            self._damaged(offset, later, why)
            if not self._checked:
                return None
            self._check = self._form.chain()
            if later >= file.end:
                return later
            offset = later

    def _next_good(self, files: list[LogFile], offset: int) -> int | None:
        """Find the next valid record in `files`, from `offset` on; None if there is none."""
        for file in files:
            at = max(offset, file.start)
            while (found := self._files.find_record(file, at)) is not None:
                if self._continues(file, found):
                    return found
                at = found + 1
        return None

    def _continues(self, file: LogFile, place: int) -> bool:
        """Whether an entry may belong to this log; not if it was truncated."""
        chain = self._check
        if not isinstance(chain, EntryChain):
            return True
        header = read_header(self._files.view(file), place - file.start, file.size, place)
        return header is not None and (
            header.index > (chain.next_index or 0) and header.term >= chain.term
        )

    def _valid(self, data: memoryview, at: int, file: LogFile, offset: int) -> bool:
        """Whether the item at `offset` is valid now, after the ones before it."""
        check = copy.copy(self._check)  # the walk has still to take the item
        return bool(
            check(data, at, file.size, offset) or self._form.check_blank(data, at, file.size)
        )

    def _walk_file(self, file: LogFile, offset: int) -> int:
        """Walk a file's records and blank from a record start; return where they end."""
        data, end, seen = self._files.view(file), file.size, self.stat
        at, last_shown = offset - file.start, offset
        while at < end:
            place = file.start + at
            size = self._check(data, at, end, place)
            if size:
                self._count_item(data[at : at + size], place, size)
            elif size := self._form.check_blank(data, at, end):
                seen.blanks += 1
                seen.blank_bytes += size
            else:
                break
            at += size
            seen.max_offset = file.start + at
            if self._progress is not None and place - last_shown >= _PROGRESS_BYTES:
                last_shown = place
                self._progress(place - seen.min_offset, max(file.end, 1) - seen.min_offset)
        return file.start + at

    def _count_item(self, raw: memoryview, offset: int, size: int) -> None:
        chain, seen, lead = self._check, self.stat, self._form.lead
        if isinstance(chain, EntryChain):
            seen.entries = (seen.entries or 0) + 1
            seen.entries_without_crc = (seen.entries_without_crc or 0) + (not chain.crc)
            if seen.ledger_begin_index is None:
                seen.ledger_begin_index = chain.first_index
            seen.ledger_end_index = (chain.next_index or 0) - 1
            seen.ledger_end_term = chain.term
            if self._index is not None:
                self._index.compare_entry(seen.ledger_end_index, offset, size, chain.term)
        if self._form.holds_record(raw, 0, size):
            self._count_record(raw[lead:], offset + lead, size - lead)

    def _count_record(self, raw: memoryview, offset: int, size: int) -> None:
        walk = self._walker.walk(raw, offset, size)
        if not walk.batch:  # the log was cut meanwhile
            return
        record, seen = walk.batch[0], self.stat
        seen.records += 1
        seen.record_bytes += size
        if seen.first_store_ms is None:
            seen.first_store_ms = record.store_timestamp_ms
        seen.last_store_ms = record.store_timestamp_ms
        topic = seen.topics.get(record.topic)
        if topic is None:
            topic = seen.topics[record.topic] = {"records": 0, "bytes": 0, "queues": 0}
        topic["records"] += 1
        topic["bytes"] += size
        topic["queues"] = max(topic["queues"], record.queue_id + 1)
        if self._queues is not None:
            self._queues.compare_record(record)

    def _damaged(self, offset: int, end_offset: int, reason: str) -> None:
        self.result.damaged_bytes += end_offset - offset
        if len(self.result.damages) < _DAMAGES_MAX:
            self.result.damages.append(Damage(offset, end_offset, reason))


class _UnitCheck:
    """Count the units that agree with the log, are missing (not written yet) or are wrong."""

    def __init__(self) -> None:
        self.units = 0
        self.missing = 0
        self.wrong: list[str] = []
        self.wrong_count = 0

    def _count(self, found: bytes, expected: bytes, describe: Callable[[], str]) -> None:
        if not found.strip(b"\0"):
            self.missing += 1
        elif found == expected:
            self.units += 1
        else:
            self.wrong_count += 1
            if len(self.wrong) < _NAMED_MAX:
                self.wrong.append(describe())


class IndexCheck(_UnitCheck):
    """Compare the index of a DLedger directory with its log, one entry at a time."""

    def __init__(self, fs: FileSystem, ledger: str) -> None:
        super().__init__()
        self._fs = fs
        self._ledger = ledger
        self._start, self._bytes = 0, b""

    def compare_entry(self, index: int, pos: int, size: int, term: int) -> None:
        """Check the unit of a sound entry."""
        found = self._unit_at(index * INDEX_UNIT_BYTES)

        def describe() -> str:
            shown = INDEX_UNIT.unpack(found) if len(found) == INDEX_UNIT_BYTES else found
            return f"the unit of entry {index} at {pos} is {shown!r}"

        self._count(found, pack_unit(index, term, pos, size), describe)

    def _unit_at(self, byte: int) -> bytes:
        at = byte - self._start
        if not 0 <= at < len(self._bytes):
            self._bytes = read_index(self._fs, self._ledger, byte, _READ_BYTES)
            self._start, at = byte, 0
        return self._bytes[at : at + INDEX_UNIT_BYTES]


class QueueCheck(_UnitCheck):
    """Compare consume queues with the log, one record at a time."""

    def __init__(self, root: str, fs: FileSystem) -> None:
        super().__init__()
        self._root = root
        self._fs = fs
        self._queues: dict[tuple[str, int], _QueueMap] = {}

    def compare_record(self, record: Dispatched) -> None:
        """Check a record's unit; prepared records and inner batches are not checked."""
        if not record.takes_unit or inner_batch_of(record) is not None:
            return
        if record.queue_id < 0 or record.queue_offset < 0 or not is_directory_name(record.topic):
            return
        key = record.topic, record.queue_id
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= _OPEN_MAX:
                self._queues.clear()
            directory = f"{self._root}/consumequeue/{record.topic}/{record.queue_id}"
            queue = self._queues[key] = _QueueMap(self._fs, directory)
        found = queue.unit(record.queue_offset)
        expected = record.offset, record.size, record.tags_code
        self._count(
            found,
            UNIT.pack(*expected),
            lambda: (
                f"{record.topic} queue {record.queue_id} queue offset {record.queue_offset}:"
                f" {UNIT.unpack(found)} instead of {expected}"
            ),
        )


class _QueueMap:
    """One queue's files; one of them is mapped at a time."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._starts = [
            int(name) // UNIT_BYTES for name in fs.list_dir(directory) if is_file_name(name)
        ]
        self._start = 0
        self._map: mmap.mmap | bytes = b""

    def unit(self, queue_offset: int) -> bytes:
        """Return the 20 bytes of a queue offset; empty when no file has it."""
        at = (queue_offset - self._start) * UNIT_BYTES
        found = self._map[at : at + UNIT_BYTES] if at >= 0 else b""
        if not found and self._select(queue_offset):
            at = (queue_offset - self._start) * UNIT_BYTES
            found = self._map[at : at + UNIT_BYTES]
        return found if len(found) == UNIT_BYTES else b""

    def _select(self, queue_offset: int) -> bool:
        below = [start for start in self._starts if start <= queue_offset]
        if not below or (self._map and below[-1] == self._start):
            return False
        self._start = below[-1]
        path = f"{self._directory}/{file_name(self._start * UNIT_BYTES)}"
        self._map = b""
        try:
            with contextlib.closing(self._fs.open(path, writable=False)) as file:
                self._map = file.map() if file.size else b""
        except FileNotFoundError:  # retention removed it
            return False
        return True
