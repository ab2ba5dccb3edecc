"""A log for the tests of what is derived: bytes in memory behind replay's door."""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hastore.record.codec import Host, Record, encode_record, pack_blank

GOLDEN = Path(__file__).parents[1] / "golden"
HOST = Host(bytes((127, 0, 0, 1)), 10911)
START_MS = 1_700_000_000_000


class MemoryLog:
    """Commit log files in memory; set `max_offset` to cut or to hide bytes."""

    def __init__(self, file_size: int = 65536, start: int = 0) -> None:
        self.file_size = file_size
        self.base = start - start % file_size
        self.data = bytearray(start - self.base)
        self.min_offset = start
        self.max_offset = start
        self.record_end = 0  # not known

    @classmethod
    def of(cls, store: Path, end: int) -> "MemoryLog":
        """Read a golden store's commit log."""
        files = sorted((store / "commitlog").iterdir())
        log = cls(files[0].stat().st_size)
        for file in files:
            log.data += file.read_bytes()
        log.max_offset = end
        return log

    @contextlib.contextmanager
    def view(self, offset: int, max_bytes: int) -> Iterator[memoryview]:
        assert self.min_offset <= offset <= self.max_offset
        left = self.file_size - offset % self.file_size
        size = max(0, min(max_bytes, left, self.max_offset - offset))
        with memoryview(self.data) as whole, whole[offset - self.base :][:size] as view:
            yield view

    def append(self, **fields: object) -> Record:
        """Append a record of these fields, with a blank before it where it does not fit."""
        record = Record(**{"body": b"body", "topic": "T", **fields})  # type: ignore[arg-type]
        left = self.file_size - self.max_offset % self.file_size
        if record.size + 8 > left:
            self.data += pack_blank(left) + bytes(left - 8)
            self.max_offset += left
        values = {name: getattr(record, name) for name in record.__dataclass_fields__}
        values["physical_offset"] = self.max_offset
        values["body_crc"] = zlib.crc32(record.body) & 0x7FFFFFFF
        record = Record(**values)
        raw = encode_record(record)
        self.data += raw
        self.max_offset += len(raw)
        return record

    def cut(self, offset: int) -> None:
        """Cut the log there."""
        del self.data[offset - self.base :]
        self.max_offset = offset


def fill(
    log: MemoryLog, count: int, *, keys: int = 1, queues: Sequence[int] = (0, 1)
) -> list[Record]:
    """Append records with tags and keys to the queues in turn."""
    nexts = dict.fromkeys(queues, 0)
    records = []
    for number in range(count):
        queue_id = queues[number % len(queues)]
        names = " ".join(f"k{number}-{key}" for key in range(keys))
        raw = f"KEYS\x01{names}\x02TAGS\x01t{number % 3}\x02" if keys else ""
        records.append(
            log.append(
                topic="Topic",
                queue_id=queue_id,
                queue_offset=nexts[queue_id],
                properties=raw.encode(),
                store_timestamp_ms=START_MS + number * 100,
                born_host=HOST,
                store_host=HOST,
            )
        )
        nexts[queue_id] += 1
    return records
