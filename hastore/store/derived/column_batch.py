"""A batch of records as numpy columns: filled by the vector walk, read by the dispatchers.

The batch has copies of headers and tails, but not of bodies. Only replay's thread uses it.

The tail is the part after the body:  topicLength, topic, propertiesLength, name 0x01 value 0x02 ...

A Layout is derived from one record. Another record has the same layout when its tail has the same
length, its lengths, names and separators are the same bytes in the same places, and its values
contain no further separators. All records of a layout have each field in the same columns, so one
array operation reads a field of all of them. Tails are gathered in whole 8-byte words that end
with the tail, so a row may begin with up to 7 bytes from before the tail.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hastore.record.delays import MARK_BYTES, SCHEDULE_TOPIC
from hastore.record.hashes import KeyHasher
from hastore.record.layout import FLAG_INNER_BATCH, FLAG_PREPARED, FLAG_ROLLBACK
from hastore.record.properties import FEW_KEYS, MAX_PID_BYTES, PID, SEQ, keys_of, producer_of
from hastore.record.transactions import FLAG_COMMIT
from hastore.store.derived.contract import (
    TRANSACTION_TOPICS,
    UNIT_FIELDS,
    Dispatched,
    KeyedRecords,
    ProducerRun,
    QueueRun,
    RecordColumns,
    most_keys,
)
from hastore.store.derived.scalar_walk import ScalarWalker, properties_at

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Span = tuple[int, int]  # first column of a value, first column after it

_WORD = 8
_SPACE = 0x20
_ASCII_MAX = 0x7F
_WEIGHTS_MAX = 1024
_MASK = np.uint64(0xFFFFFFFF)
_WEIGHTS: dict[int, npt.NDArray[np.uint64]] = {}
_TENS = 10 ** np.arange(18, dtype=np.int64)


def padded(width: int) -> int:
    """Return how many bytes are gathered for a tail of `width` bytes: whole 8-byte words."""
    return -(-width // _WORD) * _WORD


class Layout:
    """The places of a tail's fields; column 0 is the first of the gathered bytes."""

    __slots__ = (
        "_fixed", "_low", "_mask", "is_delivery", "keys", "odd", "producer", "properties_at",
        "sequence", "spaces", "tags", "topic", "width",
    )  # fmt: skip

    def __init__(self, row: bytes, width: int, *, wide: bool) -> None:
        """Derive the layout of a tail; raises ValueError when the tail's lengths do not add up.

        `row` is the padded tail. `wide` means that topicLength has two bytes (V2).
        """
        at = len(row) - width
        lengths = 2 if wide else 1
        topic_at = at + lengths
        topic_end = topic_at + int.from_bytes(row[at:topic_at])
        properties_at = topic_end + 2
        if not wide and row[at] > _ASCII_MAX:  # V1 stores the length in a signed byte
            raise ValueError("a negative topic length")
        if properties_at > len(row) or (
            int.from_bytes(row[topic_end:properties_at]) != len(row) - properties_at
        ):
            raise ValueError("lengths do not add up")
        self.width = width
        self.topic: Span = (topic_at, topic_end)
        self.properties_at = properties_at
        self.is_delivery = False  # of a delayed message
        self.odd = False  # e.g. a missing name, two producers: such records are read one by one
        self.tags: Span | None = None
        self.producer: Span | None = None
        self.sequence: Span | None = None
        self.keys: list[Span] = []  # UNIQ_KEY, then each of KEYS
        self.spaces: Span | None = None  # the value of KEYS; spaces in it separate keys
        fixed = np.zeros(len(row), dtype=np.uint8)
        fixed[at:topic_at] = fixed[topic_end:properties_at] = 0xFF
        self._find_values(row, fixed)
        words = np.frombuffer(row, dtype=np.uint64)
        self._mask = fixed.view(np.uint64)
        self._fixed = words & self._mask
        self._low = sum(byte <= 2 for byte in row[properties_at:])  # number of separators

    def _find_values(self, row: bytes, fixed: Bytes) -> None:
        """Find the values; mark names and separators as fixed."""
        at, end = self.properties_at, len(row)
        # Of a repeated name. RocketMQ's clients send batches whose messages have WAIT and UNIQ_KEY
        # twice. Of TAGS and of keys the last value counts that is not empty, as for `stored_tags`
        # and `keys_of`.
        values: dict[bytes, Span] = {}
        latest: dict[bytes, Span] = {}
        while at < end:
            name_end = row.find(b"\x01", at)
            value_end = row.find(b"\x02", at)
            value_end = end if value_end < 0 else value_end
            if not at < name_end < value_end or 0 in row[at:value_end]:
                self.odd = True
                return
            name = row[at:name_end]
            if row.find(b"\x01", name_end + 1, value_end) >= 0 or (
                name in values and name in (PID, SEQ)
            ):
                self.odd = True
                return
            values.setdefault(name, (name_end + 1, value_end))
            if value_end > name_end + 1:
                latest[name] = name_end + 1, value_end
            fixed[at : name_end + 1] = 0xFF
            fixed[value_end : value_end + 1] = 0xFF
            at = value_end + 1
        self.tags = latest.get(b"TAGS")
        self.producer, self.sequence = values.get(PID), values.get(SEQ)
        self.is_delivery = MARK_BYTES[:-1] in values
        unique = latest.get(b"UNIQ_KEY")
        self.keys = [unique] if unique is not None else []
        self.spaces = latest.get(b"KEYS")
        if self.spaces is not None:
            start, stop = self.spaces
            if row.count(b" ", start, stop) >= FEW_KEYS:
                self.odd = True  # an array operation for each key would take longer
                return
            for key in row[start:stop].split(b" "):
                if key:
                    self.keys.append((start, start + len(key)))
                start += len(key) + 1

    def matching(self, tails: Bytes) -> npt.NDArray[np.bool_] | None:
        """Return which tails have this layout; None when all of them do."""
        words = tails.view(np.uint64)
        other = (words & self._mask) != self._fixed
        low = tails[:, self.properties_at :] <= 2
        if not other.any() and np.count_nonzero(low) == self._low * len(tails):
            return None
        fits: npt.NDArray[np.bool_] = ~other.any(axis=1)
        fits &= np.count_nonzero(low, axis=1) == self._low
        return fits

    def unlike_keys(self, tails: Bytes) -> npt.NDArray[np.bool_] | None:
        """Return which tails have non-ASCII keys or keys in other places; None if no tail has."""
        found: npt.NDArray[np.bool_] | None = None
        for start, stop in self.keys:
            columns = tails[:, start:stop]
            bad = columns > _ASCII_MAX
            if self.spaces is not None and self.spaces[0] <= start < self.spaces[1]:
                bad |= columns == _SPACE
            if bad.any():
                bad_rows: npt.NDArray[np.bool_] = np.any(bad, axis=1)
                found = bad_rows if found is None else found | bad_rows
        if self.spaces is not None:
            start, stop = self.spaces
            spaces = tails[:, start:stop] == _SPACE
            wanted = stop - start - sum(b - a for a, b in self.keys if a >= start and b <= stop)
            if np.count_nonzero(spaces) != wanted * len(tails):
                other = np.count_nonzero(spaces, axis=1) != wanted
                found = other if found is None else found | other
        return found

    def sequences(self, tails: Bytes) -> Rows | None:
        """Return HS_SEQ of all tails.

        Returns None without HS_PID or HS_SEQ, for more than 18 digits, or if a value is no number.
        """
        if self.sequence is None or self.producer is None:
            return None
        start, stop = self.sequence
        digits = tails[:, start:stop] - np.uint8(0x30)
        if not 0 < stop - start <= len(_TENS) or digits.max() > 9:
            return None
        numbers: Rows = digits.astype(np.int64) @ _TENS[: stop - start][::-1]
        return numbers


def is_ascii(columns: Bytes) -> bool:
    """Whether no byte is above 0x7F."""
    return not columns.size or bool(columns.max() <= _ASCII_MAX)


def constant(columns: Bytes) -> bool:
    """Whether all rows are equal."""
    return bool((columns == columns[0]).all())


def changes(values: Rows) -> list[int]:
    """Return the indexes at which a value differs from the previous one."""
    found: list[int] = ((values[1:] != values[:-1]).nonzero()[0] + 1).tolist()
    return found


def values_of(columns: Bytes) -> list[bytes]:
    """Return each row as bytes."""
    width = columns.shape[1]
    raw = columns.tobytes()
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def java_hashes(columns: Bytes) -> npt.NDArray[np.uint64]:
    """Return Java's String.hashCode of each row of ASCII bytes, modulo 2**32."""
    width = columns.shape[1]
    weights = _WEIGHTS.get(width)
    if weights is None:
        weights = np.array([power_of_31(width - 1 - at) for at in range(width)], dtype=np.uint64)
        if len(_WEIGHTS) < _WEIGHTS_MAX:
            _WEIGHTS[width] = weights
    hashes: npt.NDArray[np.uint64] = columns.astype(np.uint64) @ weights
    return hashes & _MASK


def power_of_31(exponent: int) -> int:
    """Return 31**exponent modulo 2**32: a Java hash's factor for `exponent` more characters."""
    return pow(31, exponent, 1 << 32)


_UNIT = np.dtype(UNIT_FIELDS)
_SIGN = 1 << 31
_HASHER = KeyHasher()  # shared by all batches; only replay's thread uses it


class _Numbers(dict[bytes, int]):
    """Names and their numbers; a lookup assigns the next number to an unknown name."""

    def __missing__(self, name: bytes) -> int:
        self[name] = number = len(self)
        return number


class _Alike(NamedTuple):
    """Records that share a layout."""

    rows: Rows  # their numbers in the batch
    tails: Bytes  # a padded row for each record
    layout: Layout

    def properties(self, place: int) -> bytes:
        return self.tails[place, self.layout.properties_at :].tobytes()


class ColumnBatch(RecordColumns):
    """Columns of int64 with a row for each record; tails are kept by layout or one by one."""

    def __init__(
        self,
        scalar: ScalarWalker,
        offsets: Rows,
        sizes: Rows,
        queue_ids: Rows,
        queue_offsets: Rows,
        flags: Rows,
        stored_ms: Rows,
    ) -> None:
        self._scalar = scalar
        self._offsets = offsets
        self._sizes = sizes
        self._queue_ids = queue_ids
        self._queue_offsets = queue_offsets
        self._flags = flags
        self._stored_ms = stored_ms
        self._tags = np.zeros(len(offsets), dtype=np.int64)
        self._topic_ids = np.zeros(len(offsets), dtype=np.int64)
        self._known_topics: list[str] = []
        self._ids = _Numbers()
        self._alike: list[_Alike] = []
        self._single: dict[int, bytes] = {}  # properties of records that were read one by one
        self.start_offset = int(offsets[0])
        self.last_offset = int(offsets[-1])
        self.end_offset = int(offsets[-1] + sizes[-1])
        self.last_store_timestamp_ms = int(stored_ms[-1])
        self.has_inner_batches = bool((flags & FLAG_INNER_BATCH).any())

    # -- filled by the walk ------------------------------------------------------------------------

    def add_alike(self, rows: Rows, tails: Bytes, layout: Layout) -> None:
        """Add records that have the layout."""
        alike = _Alike(rows, tails, layout)
        self._alike.append(alike)
        names = tails[:, slice(*layout.topic)]
        if constant(names):
            topic_id = self._ids[names[0].tobytes()]
            self._topic_ids[rows] = topic_id
            scheduled = self._topics[topic_id] == SCHEDULE_TOPIC
        else:
            self._topic_ids[rows] = [self._ids[name] for name in values_of(names)]
            scheduled = SCHEDULE_TOPIC in self._topics
        if scheduled:
            self._tags[rows] = [
                self._tags_one(row, alike.properties(place))
                for place, row in enumerate(rows.tolist())
            ]
        elif layout.tags is not None:
            self._tags[rows] = self._hashed_tags(tails[:, slice(*layout.tags)])

    def add_one(self, row: int, tail: bytes, *, wide: bool) -> bool:
        """Add a single record by its tail; False when the tail's lengths do not add up."""
        at = properties_at(tail, wide=wide)
        if at is None:
            return False
        self._topic_ids[row] = self._ids[tail[2 if wide else 1 : at - 2]]
        self._single[row] = properties = tail[at:]
        self._tags[row] = self._tags_one(row, properties)
        return True

    @property
    def _topics(self) -> list[str]:
        """Topics by their number."""
        topics = self._known_topics
        if len(topics) < len(self._ids):
            topics += [self._scalar.topic(raw) for raw in list(self._ids)[len(topics) :]]
        return topics

    def _tags_one(self, row: int, properties: bytes) -> int:
        topic = self._topics[self._topic_ids[row]]
        return self._scalar.tags_code(topic, properties, int(self._stored_ms[row]))

    def _hashed_tags(self, columns: Bytes) -> Any:
        if constant(columns):
            return self._scalar.tags_hash(columns[0].tobytes())
        if not is_ascii(columns):
            return [self._scalar.tags_hash(value) for value in values_of(columns)]
        hashes = java_hashes(columns).astype(np.int64)
        return hashes - ((hashes & _SIGN) << 1)

    # -- the records one by one --------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._offsets)

    def record(self, row: int) -> Dispatched:
        """Return one record."""
        properties = self._single.get(row)
        if properties is None:
            numbers, places = self._places
            properties = self._alike[numbers[row]].properties(int(places[row]))
        return Dispatched(
            int(self._offsets[row]),
            int(self._sizes[row]),
            self._topics[self._topic_ids[row]],
            int(self._queue_ids[row]),
            int(self._queue_offsets[row]),
            int(self._flags[row]),
            int(self._stored_ms[row]),
            int(self._tags[row]),
            properties,
        )

    @cached_property
    def _places(self) -> tuple[Rows, Rows]:
        """Return two columns: the number of each record's layout group, and its row there."""
        numbers, places = np.zeros_like(self._offsets), np.zeros_like(self._offsets)
        for number, alike in enumerate(self._alike):
            numbers[alike.rows] = number
            places[alike.rows] = np.arange(len(alike.rows))
        return numbers, places

    # -- by queue ----------------------------------------------------------------------------------

    def queue_runs(self) -> Sequence[QueueRun]:
        """Return the records by topic and queue, without prepared and rollback records."""
        return self._queue_runs

    @cached_property
    def _queue_runs(self) -> list[QueueRun]:
        queues = (self._topic_ids << 32) + (self._queue_ids & 0xFFFFFFFF)
        order = np.argsort(queues, kind="stable")
        no_unit = self._flags & FLAG_PREPARED
        if no_unit.any():
            order = order[no_unit[order] == 0]
            if not len(order):
                return []
        queues = queues[order]
        places = self._queue_offsets[order]
        units = np.empty(len(order), dtype=_UNIT)
        units["offset"], units["size"] = self._offsets[order], self._sizes[order]
        units["tags_code"] = self._tags[order]
        data = units.view(np.uint8).data
        breaks = np.zeros(len(order), dtype=np.int64)
        np.cumsum(places[1:] != places[:-1] + 1, out=breaks[1:])
        first_of = [0, *changes(queues), len(order)]
        firsts = np.array(first_of[:-1])
        lasts = np.array(first_of[1:]) - 1
        columns = zip(
            first_of,
            first_of[1:],
            places[firsts].tolist(),
            np.maximum.reduceat(places, firsts).tolist(),
            (breaks[firsts] == breaks[lasts]).tolist(),
            self._topic_ids[order[firsts]].tolist(),
            self._queue_ids[order[firsts]].tolist(),
            strict=False,
        )
        size = _UNIT.itemsize
        return [
            QueueRun(
                self._topics[topic_id], queue_id, place, greatest + 1,
                data[size * first : size * end], gapless, order[first:end],
            )
            for first, end, place, greatest, gapless, topic_id, queue_id in columns
        ]  # fmt: skip

    def rolled_back(self) -> Sequence[Dispatched]:
        """Return the rollback records one by one."""
        rows = np.flatnonzero(self._flags & FLAG_ROLLBACK == FLAG_ROLLBACK)
        return [self.record(row) for row in rows.tolist()]

    def has_topic(self, topic: str) -> bool:
        """Whether a record has this topic."""
        return topic in self._topics

    def deliveries(self) -> Sequence[Dispatched]:
        """Return the records that deliver a delayed message, one by one."""
        rows = [row for row, raw in self._single.items() if MARK_BYTES in raw]
        for alike in self._alike:
            if alike.layout.is_delivery:
                rows += alike.rows.tolist()
        return [self.record(row) for row in sorted(rows)]

    def of_transactions(self) -> Sequence[Dispatched]:
        """Return the half messages and what has become of some, one by one."""
        wanted = self._flags & FLAG_COMMIT != 0
        topics = [number for number, name in enumerate(self._topics) if name in TRANSACTION_TOPICS]
        if topics:
            wanted |= np.isin(self._topic_ids, topics)
        return [self.record(row) for row in np.flatnonzero(wanted).tolist()]

    # -- by producer -------------------------------------------------------------------------------

    def producer_runs(self) -> Sequence[ProducerRun]:
        """Return the records with producer and sequence number, by producer."""
        ids = _Numbers()
        parts: list[tuple[Any, Any, Any]] = []  # rows, producer numbers, sequence numbers
        single = list(self._single.items())
        for alike in self._alike:
            rows, tails, layout = alike
            if layout.producer is None:
                continue
            sequences = layout.sequences(tails)
            start, stop = layout.producer
            if sequences is None or not 0 < stop - start <= MAX_PID_BYTES:
                pairs = zip(rows.tolist(), range(len(rows)), strict=True)
                single += [(row, alike.properties(place)) for row, place in pairs]
                continue
            names = tails[:, start:stop]
            if constant(names):
                numbers: Any = np.full(len(rows), ids[names[0].tobytes()])
            else:
                numbers = [ids[name] for name in values_of(names)]
            parts.append((rows, numbers, sequences))
        found = [(row, *known) for row, raw in single if (known := _producer_of(raw)) is not None]
        if found:
            singles, producers, counts = zip(*found, strict=True)
            parts.append((singles, [ids[producer] for producer in producers], counts))
        if not parts:
            return []
        return self._by_producer(list(ids), *map(_joined, zip(*parts, strict=True)))

    def _by_producer(
        self, producers: list[bytes], rows: Rows, numbers: Rows, sequences: Rows
    ) -> list[ProducerRun]:
        if len(producers) > 1 or len(rows) > 1 and (rows[1:] < rows[:-1]).any():
            order = np.lexsort((rows, numbers))
            rows, numbers, sequences = rows[order], numbers[order], sequences[order]
        offsets = self._offsets[rows]
        cuts = [0, *changes(numbers), len(rows)]
        runs = sorted(zip(cuts, cuts[1:], strict=False), key=lambda run: int(rows[run[1] - 1]))
        return [
            ProducerRun(
                producers[numbers[first]],
                array("q", sequences[first:end].tobytes()),
                array("q", offsets[first:end].tobytes()),
            )
            for first, end in runs
        ]

    # -- by key ------------------------------------------------------------------------------------

    def rises_from(self, top_ms: int, slack_ms: int) -> int | None:
        """Return the greatest store time; None if one falls by more than `slack_ms`."""
        reached = np.maximum(np.maximum.accumulate(self._stored_ms), top_ms)
        if bool((self._stored_ms < reached - slack_ms).any()):
            return None
        return int(reached[-1])

    def number_of_keys(self) -> int:
        """Return how many keys the records have, or a little more."""
        alike = sum([len(rows) * len(layout.keys) for rows, _, layout in self._alike])
        return alike + sum([most_keys(properties) for properties in self._single.values()])

    def keyed(self) -> KeyedRecords | None:
        """Return the keys of all records except rollback records; None if there are none."""
        parts: list[tuple[Any, Any]] = []  # rows, hashes
        single = [pair for pair in self._single.items() if b"KEY" in pair[1]]
        for alike in self._alike:
            if not alike.layout.keys:
                continue
            rows, tails, layout = alike
            unlike = layout.unlike_keys(tails)
            if unlike is not None:
                for place in np.flatnonzero(unlike).tolist():
                    single.append((int(rows[place]), alike.properties(place)))
                rows, tails = rows[~unlike], tails[~unlike]
            hashes = self._hashes(rows, tails, layout)
            parts.append(
                (np.repeat(rows, len(layout.keys)) if len(layout.keys) > 1 else rows, hashes)
            )
        pairs = [
            (row, _HASHER.key_hash(self._topics[self._topic_ids[row]], key))
            for row, properties in single
            for key in keys_of(properties)
        ]
        if pairs:
            parts.append(tuple(zip(*pairs, strict=True)))  # type: ignore[arg-type]
        if not parts:
            return None
        rows, hashes = map(_joined, zip(*parts, strict=True))
        if pairs or len(parts) > 1:  # if there is only one part, it is in the log's order already
            order = np.argsort(rows, kind="stable")
            rows, hashes = rows[order], hashes[order]
        rollback = self._flags[rows] & FLAG_ROLLBACK == FLAG_ROLLBACK
        if rollback.any():
            rows, hashes = rows[~rollback], hashes[~rollback]
        return KeyedRecords(hashes, self._offsets[rows], self._stored_ms[rows])

    def _hashes(self, rows: Rows, tails: Bytes, layout: Layout) -> Rows:
        """Return keyHash of each key of each record: |hashCode("topic#key")|."""
        prefixes = np.array([_HASHER.prefix(topic) for topic in self._topics], dtype=np.uint64)
        before = prefixes[self._topic_ids[rows]]
        hashes = np.empty((len(rows), len(layout.keys)), dtype=np.int64)
        for number, (start, stop) in enumerate(layout.keys):
            grown = before * np.uint64(power_of_31(stop - start))
            grown += java_hashes(tails[:, start:stop])
            hashes[:, number] = (grown & np.uint64(0xFFFFFFFF)).astype(np.int64)
        hashes = np.where(hashes & _SIGN, (1 << 32) - hashes, hashes)
        hashes[hashes == _SIGN] = 0  # Java's least int has no positive counterpart
        return hashes.ravel()


def _joined(parts: Iterable[Any]) -> Rows:
    first, *others = parts
    if not others:
        return np.asarray(first, dtype=np.int64)
    parts = first, *others
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _producer_of(properties: bytes) -> tuple[bytes, int] | None:
    try:
        return producer_of(properties)
    except ValueError:
        # Only a RocketMQ master stores such properties. Treat the record as without a producer.
        return None
