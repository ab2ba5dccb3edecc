"""The start of a node of mode classic after a crash, as Node does it, and what must be there."""

import contextlib
import random
import struct
from dataclasses import replace

from hastore.server.kept_positions import KeptPositions
from hastore.store.log_store import LogStore
from tests.crash.classic import Note, Version
from tests.crash.effects import SECTOR
from tests.crash.inline import step
from tests.crash.node import FILE_SIZE, ROOT, Parts, Ticks, start
from tests.crash.recording import RecordingFileSystem
from tests.crash.violation import Violation
from tests.store.kit import log_has

_CHECKPOINT = struct.Struct(">qqqqq")


def check(fs: RecordingFileSystem, note: Note, chance: random.Random) -> Note:
    """Start a node on what a crash has left; return what must be there from now on.

    Raises Violation. What the start itself does to the disk is recorded.
    """
    checkpoint = _read_checkpoint(fs)
    clock = Ticks()
    clock.ms += 10_000_000
    parts = Parts(fs, clock)
    fs.promise(note)
    start(parts)
    try:
        version = found_version(parts.store, fs, note)
        store = parts.store
        begin, end = store.min_offset, store.max_offset
        derived = max(begin, version.derived, *version.begins)
        after = replace(version, begins=frozenset({begin}), derived=derived, synced=end)
        now = Note((after,), note.mending)
        fs.promise(now)
        while step(store.replay):
            continue
        if store.replay.blocked_reason is not None and not note.mending:
            raise Violation(store.replay.blocked_reason)
        if len({id(one.book) for one in note.versions}) == 1:  # no cut is under way
            check_checkpoint(checkpoint, version, begin, end)
        if not note.mending:
            # Retention removes what is derived from expired records before the records.
            check_derived(store, version, derived, end, chance)
        check_positions(parts.kept, version, begin, end)
        check_state(parts, end)
        if chance.random() < 0.3:
            store._keep()
        if chance.random() < 0.3:
            store.close()
            parts.state.end_cleanly()
        return now
    finally:
        with contextlib.suppress(Exception):
            parts.store.close()


def found_version(store: LogStore, fs: RecordingFileSystem, note: Note) -> Version:
    """Return the log of the note that the store has, byte for byte."""
    reasons = []
    for version in reversed(note.versions):  # a log that was cut is the new one
        reason = _differs(store, fs, version, note.mending)
        if not reason:
            return version
        reasons.append(reason)
    raise Violation("; or ".join(reasons))


def _differs(store: LogStore, fs: RecordingFileSystem, version: Version, mending: range) -> str:
    begin, end, book = store.min_offset, store.max_offset, version.book
    if begin not in version.begins:
        return f"the log begins at {begin}, not at {sorted(version.begins)}"
    if end < version.synced:
        return f"the log [{begin}, {end}) lacks synced bytes up to {version.synced}"
    if end > begin and end not in book.ends:
        return f"the log ends at {end}, where no record ends"
    for at in range(begin - begin % FILE_SIZE, end, FILE_SIZE):
        low, high = max(at, begin), min(at + FILE_SIZE, end)
        with store.view(low, high - low) as view:
            found, wanted = bytearray(view), bytearray(book.data[low:high])
        for one in (found, wanted):
            for hidden in range(max(low, mending.start), min(high, mending.stop)):
                one[hidden - low] = 0
        if found != wanted:
            return f"other bytes are in [{low}, {high})"
    _check_tail(store, end)
    for offset, data in version.rescued:
        if not is_rescued(fs, offset, data):
            return f"{len(data)} bytes from {offset} on are not in rescued/"
    return ""


def _check_tail(store: LogStore, end: int) -> None:
    """Nothing follows the end: it would come back as records of another epoch."""
    file = store.log.queue.find(end)
    if file is not None and file.file.pread(FILE_SIZE, end - file.start).strip(b"\0"):
        raise Violation(f"bytes are left behind the end {end}")


def is_rescued(fs: RecordingFileSystem, offset: int, data: bytes) -> bool:
    """Whether an archive has these bytes, in files of the log's names."""
    for name in fs.list_dir(f"{ROOT}/rescued"):
        for folder in (f"{ROOT}/rescued/{name}", f"{ROOT}/rescued/{name}/commitlog"):
            files = {
                int(one): fs.read_bytes(f"{folder}/{one}")
                for one in fs.list_dir(folder)
                if one.isdigit()
            }
            if log_has(files, offset, data, FILE_SIZE):
                return True
    return False


def _read_checkpoint(fs: RecordingFileSystem) -> tuple[int, ...]:
    path = f"{ROOT}/checkpoint"
    raw = fs.read_bytes(path) if fs.exists(path) else b""
    return _CHECKPOINT.unpack_from(raw) if len(raw) >= SECTOR else (0,) * 5


def check_checkpoint(found: tuple[int, ...], version: Version, begin: int, end: int) -> None:
    """RocketMQ takes records up to the log's time for synced: they must be there."""
    times = [one.record.store_timestamp_ms for one in version.book.entries]
    if times != sorted(times):  # a clock was set back: the times say nothing of the order
        return
    beyond = [
        one.record.store_timestamp_ms for one in version.book.entries if one.offset >= end > begin
    ]
    if beyond and found[0] > min(beyond):  # records of one put have one time
        raise Violation(f"the checkpoint's time {found[0]} covers records that are lost")


def check_derived(
    store: LogStore, version: Version, begin: int, end: int, chance: random.Random
) -> None:
    """Queues, index, producers, topics, transactions and deliveries are those of the log."""
    book = version.book
    for (topic, queue), units in book.units(begin, end).items():
        found = {}
        at, last = min(units), max(units)
        while read := store.queues.read(topic, queue, at, last + 1 - at) if at <= last else ():
            found.update({at + number: one.offset for number, one in enumerate(read)})
            at += len(read)
        if {place: at for place, at in found.items() if at >= begin and place in units} != units:
            raise Violation(f"queue {topic}-{queue} has {found}, the log {units}")
    for (topic, queue), after in book.next_offsets(end).items():
        known = store.queues.queue_range(topic, queue)
        kept = book.units(begin, end).get((topic, queue))
        if kept and (known is None or known[1] != after):
            raise Violation(f"queue {topic}-{queue} ends at {known}, not at {after}")
        if known is not None and known[0] < known[1] > after:  # blanks alone may stay after a cut
            raise Violation(f"queue {topic}-{queue} ends at {known}, beyond {after}")
    keyed = [one for one in book.within(begin, end) if "KEYS" in one.properties]
    for one in chance.sample(keyed, min(3, len(keyed))):
        record = one.record
        if one.offset not in store.reader.query_key(record.topic, one.properties["KEYS"]):
            raise Violation(f"the index lacks the key {one.properties['KEYS']} at {one.offset}")
    for producer, number in book.producers(begin, end).items():
        progress = store.producer_progress(producer.encode())
        if progress is None or progress.last is None or progress.last < number:
            raise Violation(f"producer {producer} came to {number}, the window has {progress}")
    for name, wanted in book.topics(end).items():
        if store.topic_table.recorded(name) != wanted and begin == 0:
            raise Violation(f"topic {name} is {store.topic_table.recorded(name)}, not {wanted}")
    open_ = sorted(one.offset for one in store.transactions.halves() if one.offset >= begin)
    if open_ != book.open_halves(begin, end):
        raise Violation(f"open halves are {open_}, not {book.open_halves(begin, end)}")
    places = dict(store.deliveries.places_below(end))
    for level, offset in book.delivered(end).items():
        if offset >= begin and places.get(level) != offset:
            raise Violation(f"level {level} was delivered up to {offset}, not {places}")


def check_positions(
    kept: KeptPositions, version: Version, begin: int, end: int
) -> None:
    """Each committed position is in the log that is left, or was kept."""
    book = version.book
    for key, wanted in book.positions(end, version.whole_from).items():
        group, topic, queue = key
        found = kept.find(group, topic).get(queue)
        in_log = book.positions(end, begin).get(key, -1)
        if max(in_log, -1 if found is None else found.queue_offset) < wanted:
            raise Violation(f"{group} has read {topic}-{queue} up to {wanted}; found {found}")


def check_state(parts: Parts, end: int) -> None:
    """The node's state fits its log."""
    data = parts.state.data
    if data.intent is not None:
        raise Violation("the intent of a cut is left")
    if any(entry.start > end for entry in data.history):
        raise Violation(f"the history {data.history} goes beyond the log's end {end}")
    if parts.store.confirmed_offset > end or parts.store.readable_offset > end:
        raise Violation("a limit lies beyond the log's end")
