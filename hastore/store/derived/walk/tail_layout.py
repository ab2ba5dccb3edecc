"""Layouts of record tails: the places of topic, keys, tags and producer, shared by many records.

The tail is the part after the body:  topicLength, topic, propertiesLength, name 0x01 value 0x02 ...

A layout is derived from one record. Another record has the same layout when its tail has the same
length, its lengths, names and separators are the same bytes in the same places, and its values
contain no further separators. All records of a layout have each field in the same columns, so one
array operation reads a field of all of them. Tails are gathered in whole 8-byte words that end
with the tail, so a row may begin with up to 7 bytes from before the tail.
"""

import numpy as np
import numpy.typing as npt

from hastore.record.producer import PID, SEQ

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
        "_fixed", "_low", "_mask", "keys", "odd", "producer", "properties_at", "sequence",
        "spaces", "tags", "topic", "width",
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
        self.odd = False  # e.g. a repeated or missing name: such records are read one by one
        self.tags: Span | None = None
        self.producer: Span | None = None
        self.sequence: Span | None = None
        self.keys: list[Span] = []  # UNIQ_KEY, then each of KEYS
        self.spaces: Span | None = None  # the value of KEYS; spaces in it separate keys
        fixed = np.zeros(len(row), dtype=np.uint8)
        fixed[at:topic_at] = fixed[topic_end:properties_at] = 0xFF
        self._take_values(row, fixed)
        words = np.frombuffer(row, dtype=np.uint64)
        self._mask = fixed.view(np.uint64)
        self._fixed = words & self._mask
        self._low = sum(byte <= 2 for byte in row[properties_at:])  # number of separators

    def _take_values(self, row: bytes, fixed: Bytes) -> None:
        """Find the values; mark names and separators as fixed."""
        at, end = self.properties_at, len(row)
        values: dict[bytes, Span] = {}
        while at < end:
            name_end = row.find(b"\x01", at)
            value_end = row.find(b"\x02", at)
            value_end = end if value_end < 0 else value_end
            if not at < name_end < value_end or 0 in row[at:value_end]:
                self.odd = True
                return
            name = row[at:name_end]
            if name in values or row.find(b"\x01", name_end + 1, value_end) >= 0:
                self.odd = True
                return
            values[name] = name_end + 1, value_end
            fixed[at : name_end + 1] = 0xFF
            fixed[value_end : value_end + 1] = 0xFF
            at = value_end + 1
        self.tags = _filled(values.get(b"TAGS"))
        self.producer, self.sequence = values.get(PID), values.get(SEQ)
        unique = _filled(values.get(b"UNIQ_KEY"))
        self.keys = [unique] if unique is not None else []
        self.spaces = _filled(values.get(b"KEYS"))
        if self.spaces is not None:
            start, stop = self.spaces
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


def _filled(span: Span | None) -> Span | None:
    return None if span is None or span[0] == span[1] else span
