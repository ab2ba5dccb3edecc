"""Logs in memory to damage and to repair: own log and other node, plain records or entries."""

from __future__ import annotations

import errno
import pathlib
import random
from dataclasses import dataclass, field

from hastore.record.hashes import new_digest
from hastore.record.log_format import ENTRIES, PLAIN, LogFormat
from hastore.record.log_walk import LogWalk
from hastore.repair.mending import HEAD_BYTES, Parts, Unfit
from tests.dledger.store import kit as entry_kit
from tests.store.logs import MemoryLog, fill

FILE_SIZE = 16 * 1024
EPOCH = 65537


@dataclass
class Log:
    """A log in memory; it is the own log of a repair, or another node's."""

    form: LogFormat
    data: bytearray
    items: list[tuple[int, int]]  # (start, end) of each item; blanks lie between
    epochs: list[tuple[int, int]] | None
    where: str = "tcp://other:1"
    file_size: int = FILE_SIZE
    min_offset: int = 0
    unreadable: set[int] = field(default_factory=set)  # pages
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)  # as a source
    history: list[tuple[int, int]] | None = None  # as a source; None: `epochs`
    readable: int | None = None

    @property
    def end(self) -> int:
        return self.items[-1][1]

    @property
    def readable_offset(self) -> int:
        return self.end if self.readable is None else self.readable

    def copy(self) -> Log:
        return Log(self.form, bytearray(self.data), self.items, self.epochs)

    def flip(self, offset: int, mask: int = 0xFF) -> None:
        self.data[offset] ^= mask

    def own(self) -> Own:
        return Own(self)

    def read(self, start: int, end: int) -> tuple[bytes, list[tuple[int, int]]]:
        if end > self.readable_offset:
            raise Unfit("it is not that long")
        self.reads.append((start, end))
        epochs = self.epochs if self.history is None else self.history
        return bytes(self.data[start:end]), epochs or [(1, 0)]

    def digest(self, start: int, end: int) -> bytes:
        digest = new_digest("xxh3-128")
        digest.update(memoryview(self.data)[start:end])
        return digest.digest()


class Own:
    """A log as the damaged one."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.form, self.file_size, self.epochs = log.form, log.file_size, log.epochs

    def read(self, offset: int, size: int) -> bytes:
        size = min(size, self.file_size - offset % self.file_size)
        if any(page in self.log.unreadable
               for page in range(offset // 4096, (offset + size - 1) // 4096 + 1)):  # fmt: skip
            raise OSError(errno.EIO, "bad sector")
        return bytes(self.log.data[offset : offset + size])

    def write(self, parts: Parts, *, skip_unreadable: bool = False) -> None:
        for offset, data in parts:
            pages = {offset // 4096, (offset + len(data) - 1) // 4096}
            if len(data) == HEAD_BYTES and pages & self.log.unreadable:
                assert skip_unreadable, "a part of a page that cannot be read"
                continue
            self._write(offset, data)

    def _write(self, offset: int, data: bytes) -> None:
        self.log.writes.append((offset, data))
        self.log.data[offset : offset + len(data)] = data
        self.log.unreadable = {
            page for page in self.log.unreadable
            if not offset <= page * 4096 <= page * 4096 + 4096 <= offset + len(data)
        }  # fmt: skip

    def walk(self, start: int = 0, end: int | None = None) -> LogWalk:
        end = self.log.end if end is None else end
        return LogWalk(self.form, self.read, self.file_size, start, end)


def plain(count: int = 400) -> Log:
    """A log of records."""
    log = MemoryLog(FILE_SIZE)
    records = fill(log, count)
    size = -(-log.max_offset // FILE_SIZE) * FILE_SIZE
    data = log.data.ljust(size, b"\0")
    items = [(one.physical_offset, one.physical_offset + one.size) for one in records]
    return Log(PLAIN, data, items, [(EPOCH, 0)])


def entries(folder: pathlib.Path, count: int = 150) -> Log:
    """A log of entries of two terms."""
    from tests.store.kit import message

    with entry_kit.opened(folder, commitlog_file_size=FILE_SIZE) as store:
        entry_kit.put(store, 1, *(message(number) for number in range(count // 2)))
        entry_kit.put(store, 3, *(message(number) for number in range(count // 2, count)))
        data = bytearray(entry_kit.data_of(store))
        items = [(store.position(n), store.end_position(n)) for n in range(count)]
    return Log(ENTRIES, data, items, None)


def blank_of(log: Log) -> tuple[int, int]:
    """Return the first blank."""
    pairs = zip(log.items, log.items[1:], strict=False)
    return next((end, start) for (_, end), (start, _) in pairs if start > end)


def damages(own: Own, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Return all damaged ranges."""
    walk, found = own.walk(start, end), []
    while (damage := walk.next_damage()) is not None:
        found.append((damage.start, damage.end))
        walk.skip(damage)
    assert walk.offset >= walk.end
    return found


def rot(log: Log, chance: random.Random, start: int, end: int) -> None:
    """Change bytes in [start, end), as disks do it: some bits, or zeros, or something else."""
    size = chance.choice((1, 1, 2, 16, 512, 4096))
    at = chance.randrange(start, end)
    stop = min(at + size, end)
    kind = chance.randrange(3)
    if kind == 0:
        for place in range(at, stop):
            log.data[place] ^= 1 << chance.randrange(8)
    else:
        log.data[at:stop] = bytes(stop - at) if kind == 1 else chance.randbytes(stop - at)


def with_forged(epochs: list[tuple[int, int]] | None = None) -> tuple[Log, int, int]:
    """Return three records, the second with a body that has what looks like a record at its offset.

    And the bytes of that forged record, from and to: a client can put anything.
    """
    outer = MemoryLog(FILE_SIZE)
    outer.append(body=b"first")
    base = outer.max_offset + 88 + 20
    inner = MemoryLog(FILE_SIZE, start=base)
    inner.append(body=b"forged")
    forged = bytes(inner.data[base - inner.base :])
    record = outer.append(body=bytes(20) + forged + bytes(20))
    last = outer.append(body=b"last")
    start, end = record.physical_offset, last.physical_offset
    data = outer.data.ljust(FILE_SIZE, b"\0")
    items = [(0, start), (start, end), (end, outer.max_offset)]
    return Log(plain(1).form, data, items, epochs), base, base + len(forged)
