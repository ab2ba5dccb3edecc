"""Read stores from disk without hastore's own code, to check the stores independently."""

from __future__ import annotations

import json
import pathlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

V1, V2, BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194
QUEUES_TOPIC = "HASTORE_QUEUES"  # the next offsets of quiet queues, in no queue
_HEAD = struct.Struct(">iIIiiqqiq")  # up to bornTimestamp


@dataclass(frozen=True, slots=True)
class Found:
    """A record of a log."""

    offset: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    store_port: int
    store_ms: int
    body: bytes
    properties: dict[str, str]
    sys_flag: int = 0


class Log:
    """A whole commit log: its bytes, its records and its end. Fails on a gap or a bad record."""

    def __init__(self, folder: pathlib.Path) -> None:
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        self.start = int(files[0].name) if files else 0
        self.records: list[Found] = []
        parts = []
        for file in files:
            assert int(file.name) == self.start + sum(map(len, parts)), f"a gap before {file}"
            parts.append(file.read_bytes())
        self.end = self.start
        for part in parts:
            whole = self._scan(part)
            if not whole:
                break
        data = b"".join(parts)
        self.bytes = data[: self.end - self.start]
        beyond = data[self.end - self.start :]
        self.beyond_is_zero = not beyond.strip(b"\0")

    def _scan(self, part: bytes) -> bool:
        """Add the records of one file; return whether the file is full."""
        base, at = self.end, 0
        while at + 8 <= len(part):
            size, magic = struct.unpack_from(">iI", part, at)
            if magic == BLANK and size == len(part) - at:
                self.end = base + len(part)
                return True
            if magic not in (V1, V2) or size < 91 or size > len(part) - at:
                break
            found = parse_record(part[at : at + size], base + at)
            self.records.append(found)
            at += size
        self.end = base + at
        return False


def parse_record(raw: bytes, offset: int) -> Found:
    """Decode one record; raise AssertionError if it is invalid."""
    size, magic, crc, queue_id, _flag, queue_offset, place, sys_flag, _born = _HEAD.unpack_from(raw)
    assert size == len(raw)
    assert place == offset, f"a record at {offset} says that it is at {place}"
    at = 48 + (20 if sys_flag & 0x10 else 8)
    (store_ms,) = struct.unpack_from(">q", raw, at)
    at += 8 + (20 if sys_flag & 0x20 else 8)
    (store_port,) = struct.unpack_from(">i", raw, at - 4)
    at += 12
    (length,) = struct.unpack_from(">i", raw, at)
    assert length >= 0
    body = raw[at + 4 : at + 4 + length]
    assert zlib.crc32(body) & 0x7FFFFFFF == crc, f"a wrong CRC at {offset}"
    at += 4 + length
    length, at = (raw[at], at + 1) if magic == V1 else (raw[at] << 8 | raw[at + 1], at + 2)
    topic = raw[at : at + length].decode()
    at += length
    (length,) = struct.unpack_from(">h", raw, at)
    assert at + 2 + length == len(raw), f"lengths do not add up at {offset}"
    pairs = [pair.split("\1", 1) for pair in raw[at + 2 :].decode().split("\2") if pair]
    properties: dict[str, str] = dict(pairs)
    return Found(
        offset,
        size,
        topic,
        queue_id,
        queue_offset,
        store_port,
        store_ms,
        body,
        properties,
        sys_flag,
    )


def read_log(store: pathlib.Path) -> Log:
    """Read the log of a store."""
    return Log(store / "commitlog")


def ends_are_stated(store: pathlib.Path) -> bool:
    """Whether the log states the ends of quiet queues for its last file: nothing more comes."""
    log = read_log(store)
    last = max(int(file.name) for file in (store / "commitlog").iterdir())
    stated = [
        json.loads(found.properties["HS_QUEUES"][8:])["since"]
        for found in log.records
        if found.topic == QUEUES_TOPIC
    ]
    return max(stated, default=0) >= min(last, log.end)


def rescued_records(store: pathlib.Path) -> list[Found]:
    """Return the complete records of all archives and set-aside stores under rescued/."""
    found: list[Found] = []
    for file in sorted((store / "rescued").rglob("*")):
        if not file.is_file() or not file.name.isdigit() or len(file.name) != 20:
            continue
        if "consumequeue" in file.parts:
            continue
        part, base = file.read_bytes(), int(file.name)
        at = 0
        while at + 8 <= len(part):
            size, magic = struct.unpack_from(">iI", part, at)
            if magic in (V1, V2) and 91 <= size <= len(part) - at:
                found.append(parse_record(part[at : at + size], base + at))
                at += size
            elif size == 0 and magic == 0:
                # An archive has the name and size of its log file: zeros come before its bytes.
                step = next((i for i in range(at, len(part)) if part[i]), None)
                if step is None:
                    break
                at = max(at + 1, step - 3)
                while at < len(part) and struct.unpack_from(">I", part, at + 4)[0] not in (V1, V2):
                    at += 1
                    if at + 8 > len(part):
                        break
            else:
                break
    return found


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    """Return the files below a folder by their relative names."""
    if not folder.is_dir():
        return {}
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def assert_equal_stores(left: pathlib.Path, right: pathlib.Path) -> Log:
    """Compare logs, consume queues and key index byte by byte; return the log."""
    one, other = read_log(left), read_log(right)
    assert (one.start, one.end) == (other.start, other.end)
    assert one.bytes == other.bytes, f"{left} and {right}: the logs differ"
    for store, log in ((left, one), (right, other)):
        assert log.beyond_is_zero, f"{store}: bytes beyond the log's end {log.end}"
    queues, others = (_joined(tree(store / "consumequeue")) for store in (left, right))
    assert queues.keys() == others.keys()
    for name, data in queues.items():
        assert data == others[name], f"consume queue {name} differs"
    index, index_other = ([*tree(store / "index").values()] for store in (left, right))
    assert len(index) == len(index_other), "key index: another number of files"
    for number, (mine, theirs) in enumerate(zip(index, index_other, strict=True)):
        assert mine == theirs, f"key index file {number} differs"
    return one


def _joined(files: dict[str, bytes]) -> dict[str, bytes]:
    """Join the files of each queue, without the zeros after its last unit."""
    queues: dict[str, bytes] = {}
    for name, data in files.items():
        queue = name.rpartition("/")[0]
        queues[queue] = queues.get(queue, b"") + data
    return {queue: data.rstrip(b"\0") for queue, data in queues.items()}


def assert_queues_fit(store: pathlib.Path, records: Sequence[Found]) -> None:
    """Check that the consume queues hold exactly these records."""
    queues: dict[str, list[tuple[int, int]]] = {}
    for found in records:
        units = queues.setdefault(f"{found.topic}/{found.queue_id}", [])
        assert found.queue_offset == len(units), f"queue offset of the record at {found.offset}"
        units.append((found.offset, found.size))
    files = _joined(tree(store / "consumequeue"))
    assert queues.keys() == {name for name, data in files.items() if data}
    for name, units in queues.items():
        data = files[name]
        data += b"\0" * (-len(data) % 20)
        have = [(o, s) for o, s, _ in struct.iter_unpack(">qiq", data)]
        assert have == units, f"queue {name}"
