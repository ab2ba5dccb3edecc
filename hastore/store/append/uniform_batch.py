"""The fast path of a put: a payload whose records are alike, as in most frames of a producer.

A batch is uniform if all its records are V1 between IPv4 hosts, have the same topic, and have
either no producer or the same one with rising sequence numbers. None of them may belong to a
transaction or be an inner batch. `read_uniform_batch` makes the checks of `PutValidator.validate`,
but gives no reasons. All other payloads go to `PutValidator.validate`, which says what is wrong.
`UniformAppend` gives the records their offsets. A test compares both paths: they must give the same
results and the same bytes in the log.

In a log of entries both paths put each record into an entry by `EntryFraming`.
"""

from collections.abc import Iterable, Iterator, Set

from zlib_ng.zlib_ng import crc32

from hastore.record.codec import Host
from hastore.record.delays import DELAY_BYTES, MARK_BYTES
from hastore.record.layout import (
    CRC_MASK,
    FLAG_IPV6,
    FLAG_ROLLBACK,
    HEADER_SIZE,
    MAX_PROPERTIES_BYTES,
    MIN_RECORD_SIZE,
    OFFSETS,
    OFFSETS_AT,
    STORE_AT,
    STORE_IPV4,
    V1_MAGIC,
    header_struct,
)
from hastore.record.log_format import (
    ENTRY_HEADER_BYTES,
    fill_in_crcs,
    pack_header,
    pack_unit,
)
from hastore.record.properties import (
    MAX_SEQ_DIGITS,
    SEQ,
    is_well_formed,
    producer_of,
    sole_producer,
    words_of_keys,
)
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.append.results import FLAGS_REFUSED, UniformBatch, UniformResults
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.entry_index import NewEntries


class EntryFraming:
    """The entries of one append as leader of `term`, at the log's end. Used under the log's lock.

    A record's physical offset is ENTRY_HEADER_BYTES greater than its entry's position.
    """

    def __init__(self, log: CommitLog, term: int) -> None:
        assert log.entries is not None
        self._pos = log.max_offset
        self._index = log.entries.end_index + 1
        self._crc = log.last_crc() or 0
        self._term = term
        self._units: list[bytes] = []

    def join(self, bodies: Iterable[bytes | memoryview]) -> bytearray:
        """Return the bytes of the entries."""
        pieces: list[bytes | memoryview] = []
        add, note = pieces.append, self._units.append
        pos, index, term = self._pos, self._index, self._term
        for body in bodies:
            size = len(body)
            add(pack_header(index, term, pos, size))
            add(body)
            size += ENTRY_HEADER_BYTES
            note(pack_unit(index, term, pos, size))
            pos += size
            index += 1
        self._pos, self._index = pos, index
        return bytearray().join(pieces)

    def seal(self, data: bytearray) -> None:
        """Fill in the CRCs of the entries that were joined, once their records are complete."""
        self._crc = fill_in_crcs(data, self._crc)

    def entries(self) -> NewEntries:
        """Return what the index takes of the entries that were joined and sealed."""
        return NewEntries(b"".join(self._units), ((self._term, len(self._units)),), self._crc)


_FRONT = header_struct(
    "unsigned_size", "magic", "body_crc", "queue_id", "sys_flag", "body_length"
)  # between IPv4 hosts
_SPECIAL = FLAG_IPV6 | FLAG_ROLLBACK | FLAGS_REFUSED  # FLAG_ROLLBACK: both transaction bits
_SEQUENCE = b"\x02" + SEQ + b"\x01"


def read_uniform_batch(
    topics: Set[bytes], max_body: int, max_record: int, payload: bytes
) -> UniformBatch | None:
    """Validate a payload; returns None if it is no uniform batch or has an invalid record.

    `topics` are the topics known to be allowed; a payload of any other topic is left to
    `PutValidator`. No body may have more than `max_body` bytes, and no record more than
    `max_record`.
    """
    end = len(payload)
    if end < MIN_RECORD_SIZE:
        return None
    unpack, view = _FRONT.unpack_from, memoryview(payload)
    name_at = HEADER_SIZE + unpack(payload)[-1]  # assumes IPv4 hosts: checked below
    if not HEADER_SIZE <= name_at < end:
        return None
    name = payload[name_at : name_at + 1 + payload[name_at]]
    topic = name[1:]
    if topic not in topics:
        return None
    starts: list[int] = []
    queue_ids: list[int] = []
    sequences: list[int] = []
    producer: bytes | None = None
    # A tail is a record's topic and properties. `like` holds the bytes of an earlier tail before
    # its sequence number, and `tail_size` is the size of that tail. A later tail that has the same
    # size and also begins with `like` differs only in the number.
    like, tail_size = b"", 0
    last = -1
    at = 0
    while at < end:
        if end - at < MIN_RECORD_SIZE:
            return None
        size, magic, crc, queue_id, flags, body_size = unpack(payload, at)
        stop = at + size
        topic_at = at + HEADER_SIZE + body_size
        if (
            magic != V1_MAGIC
            or flags & _SPECIAL
            or not 0 <= body_size <= max_body
            or size > max_record
            or stop > end
            or crc32(view[at + HEADER_SIZE : topic_at]) & CRC_MASK != crc
        ):
            return None
        if like and topic_at + tail_size == stop and payload.startswith(like, topic_at):
            digits = payload[topic_at + len(like) : stop - 1]
            if not digits.isdigit() or len(digits) > MAX_SEQ_DIGITS or payload[stop - 1] != 2:
                return None
            sequence = int(digits)
        else:
            found = _read_tail(payload[topic_at:stop], name)
            if found is None or (starts and found[0] != producer):
                return None
            producer, sequence, like = found
            tail_size = stop - topic_at
        if producer is not None:
            if sequence <= last:
                return None
            last = sequence
            sequences.append(sequence)
        starts.append(at)
        queue_ids.append(queue_id)
        at = stop
    return UniformBatch(payload, topic, starts, queue_ids, producer, sequences)


def _read_tail(tail: bytes, name: bytes) -> tuple[bytes | None, int, bytes] | None:
    """Read the tail of a record: topic and properties. `name` is the topic with its length byte.

    Returns the producer, the sequence number, and the bytes before that number (b"" unless the
    number is the last property). Returns None if the tail has another topic or is not well formed.
    """
    at = len(name) + 2
    properties = tail[at:]
    length = len(properties)
    if (
        length > MAX_PROPERTIES_BYTES
        or not tail.startswith(name)
        or tail[at - 2 : at] != length.to_bytes(2)
    ):
        return None
    if not properties:
        return None, 0, b""
    sole = sole_producer(properties)
    if sole is not None:
        return sole[0], int(sole[1]), tail[: -1 - len(sole[1])]
    if not is_well_formed(properties):
        return None
    if words_of_keys(properties) or MARK_BYTES in properties or DELAY_BYTES in properties:
        return None
    try:
        found = producer_of(properties)
    except ValueError:
        return None
    if found is None:
        return None, 0, b""
    number_at = properties.find(_SEQUENCE) + len(_SEQUENCE)
    is_last = properties.find(b"\x02", number_at) == length - 1
    like = tail[: at + number_at] if number_at >= len(_SEQUENCE) and is_last else b""
    return *found, like


class UniformAppend:
    """Uniform batches that one write appends at `start`, the log's end. Used under the log's lock.

    The caller calls `add_batch` for each batch, writes `patched()` to the log, then calls `settle`.
    """

    def __init__(
        self,
        start: int,
        window: DedupWindow,
        table: QueueOffsetTable,
        now_ms: int,
        framing: EntryFraming | None,
    ) -> None:
        """Begin; in a log of entries `framing` puts a header before each record."""
        self.end = start
        self.results: list[UniformResults] = []
        self._start = start
        self._now_ms = now_ms
        self._window = window
        self._table = table
        self._framing = framing
        self._payloads: list[bytes] = []
        self._starts: list[list[int]] = []  # of the records of each payload, in a log of entries
        self._numbered: list[tuple[bytes, list[int], list[int]]] = []  # by producer
        self._following: dict[bytes, dict[int, int]] = {}  # topic -> queue -> next offset
        self._tops: dict[bytes, int] = {}  # the last sequence number of each producer

    def add_batch(self, batch: UniformBatch) -> bool:
        """Add a batch, and give out its offsets.

        Returns False if a record may have been put before, or names a queue that it may not use.
        The caller then drops the whole append.
        """
        producer, topic, queue_ids = batch.producer, batch.topic, batch.queue_ids
        if producer is not None:
            top = self._tops.get(producer)
            if batch.sequences[0] <= (self._window.top(producer) if top is None else top):
                return False
            self._tops[producer] = batch.sequences[-1]
        following = self._following.get(topic)
        if following is None:
            following = self._following[topic] = {}
        queue_offsets: list[int] = []
        for queue_id in queue_ids:
            queue_offset = following.get(queue_id)
            if queue_offset is None:
                queue_offset = self._table.next(topic, queue_id)
                if queue_offset is None:
                    return False
            following[queue_id] = queue_offset + 1
            queue_offsets.append(queue_offset)
        first, lead = self.end, 0
        self.end = first + len(batch.payload)
        if self._framing is not None:
            lead = ENTRY_HEADER_BYTES
            self.end += lead * len(batch.starts)
            offsets = [
                first + start + lead * number for number, start in enumerate(batch.starts, 1)
            ]
            self._starts.append(batch.starts)
        else:
            offsets = [first + start for start in batch.starts]
        self._payloads.append(batch.payload)
        if producer is not None:
            self._numbered.append((producer, batch.sequences, offsets))
        self.results.append(
            UniformResults(offsets, self.end, queue_ids, queue_offsets, self._now_ms, lead)
        )
        return True

    def patched(self, host: Host) -> bytearray:
        """Return the joined records, with the fields filled in that only the master knows."""
        if self._framing is None:
            buffer = bytearray().join(self._payloads)
        else:
            buffer = self._framing.join(self._records())
        stamp = STORE_IPV4.pack(self._now_ms, host.address, host.port)
        width = len(stamp)
        pack_offsets = OFFSETS.pack_into
        start = self._start
        for stored in self.results:
            for offset, queue_offset in zip(stored.offsets, stored.queue_offsets, strict=True):
                at = offset - start
                pack_offsets(buffer, at + OFFSETS_AT, queue_offset, offset)
                at += STORE_AT
                buffer[at : at + width] = stamp
        if self._framing is not None:
            self._framing.seal(buffer)
        return buffer

    def _records(self) -> Iterator[memoryview]:
        for payload, starts in zip(self._payloads, self._starts, strict=True):
            view = memoryview(payload)
            for start, stop in zip(starts, [*starts[1:], len(payload)], strict=True):
                yield view[start:stop]

    def settle(self) -> None:
        """Count queue offsets and sequence numbers as given out; the log now ends at `end`."""
        advanced: dict[tuple[bytes, int], int] = {}
        for topic, following in self._following.items():
            for queue_id, queue_offset in following.items():
                advanced[topic, queue_id] = queue_offset
        self._table.give_out(advanced, self.end)
        self._window.add_runs(self._numbered, self.end)
