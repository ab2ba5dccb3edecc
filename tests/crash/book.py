"""What a log of records says, read once by FORMATS: what a store must have of it after a crash."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import decode_commit
from hastore.record.codec import Record, decode_record
from hastore.record.delays import marked
from hastore.record.layout import FLAG_PREPARED
from hastore.record.queue_ends import queue_ends_in
from hastore.record.topic_records import TOPICS_TOPIC, change_in
from hastore.record.transactions import HALF_TOPIC, OP_TOPIC, ended_in

_BLANK_MAGIC = 0xCBD43194


class Entry(NamedTuple):
    """One record of the log, and where it ends."""

    offset: int
    end: int
    record: Record
    properties: dict[str, str]


@dataclass(eq=False)
class Book:
    """A log from offset 0 on; it only grows, a cut makes another book."""

    data: bytearray = field(default_factory=bytearray)
    entries: list[Entry] = field(default_factory=list)
    ends: set[int] = field(default_factory=lambda: {0})
    read: int = 0  # up to here it is split into records

    def add(self, data: bytes, file_size: int) -> None:
        """Add bytes at the end, which may end inside a record."""
        self.data += data
        while self.read + 8 <= len(self.data):
            size = int.from_bytes(self.data[self.read : self.read + 4])
            is_blank = int.from_bytes(self.data[self.read + 4 : self.read + 8]) == _BLANK_MAGIC
            if is_blank:
                size = file_size - self.read % file_size
            if self.read + size > len(self.data):
                return
            if not is_blank:
                record = decode_record(self.data, self.read)
                pairs = dict(record.property_pairs)
                self.entries.append(Entry(self.read, self.read + size, record, pairs))
            self.read += size
            self.ends.add(self.read)

    def until(self, end: int) -> "Book":
        """Return the book of this log, cut at the end of a record."""
        return Book(
            self.data[:end], [one for one in self.entries if one.end <= end],
            {one for one in self.ends if one <= end}, end,
        )  # fmt: skip

    def within(self, begin: int, end: int) -> list[Entry]:
        """Return the entries of [begin, end)."""
        return [one for one in self.entries if one.offset >= begin and one.end <= end]

    def units(self, begin: int, end: int) -> dict[tuple[str, int], dict[int, int]]:
        """Return the offset of each record that has a place in a queue, by its queue offset."""
        found: dict[tuple[str, int], dict[int, int]] = {}
        for one in self.within(begin, end):
            if not one.record.sys_flag & FLAG_PREPARED:
                queue = one.record.topic, one.record.queue_id
                found.setdefault(queue, {})[one.record.queue_offset] = one.offset
        return found

    def next_offsets(self, end: int) -> dict[tuple[str, int], int]:
        """Return the queue offset after the last one that each queue was given below `end`."""
        found: dict[tuple[str, int], int] = {}
        for one in self.within(0, end):
            record = one.record
            if not record.sys_flag & FLAG_PREPARED:
                found[record.topic, record.queue_id] = record.queue_offset + 1
            stated = queue_ends_in(record.topic, record.sys_flag, record.properties)
            for topic, queue_id, after in () if stated is None else stated.queues:
                key = topic, queue_id
                found[key] = max(found.get(key, 0), after)
        return found

    def producers(self, begin: int, end: int) -> dict[str, int]:
        """Return the last number of each producer in [begin, end)."""
        return {
            one.properties["HS_PID"]: int(one.properties["HS_SEQ"])
            for one in self.within(begin, end)
            if "HS_PID" in one.properties
        }

    def topics(self, end: int) -> dict[str, object]:
        """Return what the last record of each topic in the table says."""
        found: dict[str, object] = {}
        for one in self.within(0, end):
            if one.record.topic == TOPICS_TOPIC:
                change = change_in(one.record.properties)
                assert change is not None
                found[change.name] = change.config
        return found

    def positions(self, end: int, begin: int = 0) -> dict[tuple[str, str, int], int]:
        """Return the last position of each group, topic and queue that is committed there."""
        found: dict[tuple[str, str, int], int] = {}
        for one in self.within(begin, end):
            if one.record.topic == POSITIONS_TOPIC:
                body = decode_commit(one.record.body)
                for queue, place in body.positions.items():
                    found[body.group, body.topic, queue] = place[0]
        return found

    def open_halves(self, begin: int, end: int) -> list[int]:
        """Return the offsets of the half messages that nothing has ended."""
        places: dict[int, int] = {}
        for one in self.within(0, end):
            if one.record.topic == HALF_TOPIC:
                places[one.record.queue_offset] = one.offset
            elif one.record.topic == OP_TOPIC:
                for place in ended_in(one.record.body):
                    places.pop(place, None)
        return sorted(offset for offset in places.values() if offset >= begin)

    def delivered(self, end: int) -> dict[int, int]:
        """Return the last waiting record of each level that was delivered."""
        found: dict[int, int] = {}
        for one in self.within(0, end):
            mark = marked(one.record.properties)
            if mark is not None:
                found[mark.level] = max(found.get(mark.level, -1), mark.offset)
        return found
