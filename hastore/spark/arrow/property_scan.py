"""Find properties in many records at once, by their separators.

Properties are stored as `name 0x01 value 0x02`, repeated; RocketMQ 4.9 may omit the last 0x02.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hastore.record.properties import PRODUCER_PROPERTIES, ROCKETMQ_PROPERTIES
from hastore.spark.arrow.record_fields import Bools, Ints
from hastore.spark.arrow.slices import slice_values

_NAME_END = 1
_VALUE_END = 2
_PRODUCER = pa.array(sorted(PRODUCER_PROPERTIES), pa.string())
_ROCKETMQ = pa.array(sorted(ROCKETMQ_PROPERTIES), pa.string())
_ROCKETMQ_MARK = "UNIQ_KEY"  # RocketMQ's clients set it in each message; hastore's do not


class PropertyScan:
    """The properties of a batch of records in one buffer, and the places of their separators."""

    def __init__(self, data: pa.Buffer, starts: Ints, ends: Ints) -> None:
        taken = slice_values(data, starts, ends, pa.binary())
        self._buffer: pa.Buffer = taken.buffers()[2] or pa.py_buffer(b"")
        offsets = np.frombuffer(taken.buffers()[1], np.int32, len(starts) + 1).astype(np.int64)
        self._starts = offsets[:-1]
        self._ends = offsets[1:]
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._buffer, np.uint8, int(offsets[-1]))

    @cached_property
    def _name_ends(self) -> Ints:
        return np.flatnonzero(self._bytes == _NAME_END)

    @cached_property
    def _value_ends(self) -> Ints:
        return np.flatnonzero(self._bytes == _VALUE_END)

    def values(self, name: bytes, kind: pa.DataType) -> pa.Array:
        """Return each record's value of the first property `name`; null for a record without it."""
        if self._all_begin_with(name):
            starts = self._starts + len(name) + 1
            ends = self._next(self._value_ends, starts, self._ends)
            return slice_values(self._buffer, starts, ends, kind)
        places = self._name_ends[self._name_ends >= len(name)]
        for back, wanted in enumerate(reversed(name), start=1):
            places = places[self._bytes[places - back] == wanted]
        records = np.searchsorted(self._ends, places, side="right")
        begins = places - len(name)
        first = begins == self._starts[records]
        # The byte before a record's start belongs to the previous record, so it is not looked at.
        follows = (begins > self._starts[records]) & (self._bytes[begins - 1] == _VALUE_END)
        found = first | follows
        places, records = places[found], records[found]
        kept = np.diff(records, prepend=-1) > 0  # a record's first place; places ascend
        records, value_starts = records[kept], places[kept] + 1
        value_ends = self._next(self._value_ends, value_starts, self._ends[records])
        rows = None
        if len(records) < len(self._starts):
            rows = np.full(len(self._starts), -1, np.int64)
            rows[records] = np.arange(len(records))
        return slice_values(self._buffer, value_starts, value_ends, kind, rows)

    def _all_begin_with(self, name: bytes) -> bool:
        """Return whether `name` is the first property of each record, as KEYS mostly is."""
        mark = name + bytes((_NAME_END,))
        count = len(self._starts)
        if not count or (self._ends - self._starts < len(mark)).any():
            return False
        shape = (len(self._bytes) - len(mark) + 1,)
        view: npt.NDArray[np.void] = np.ndarray(
            shape, f"V{len(mark)}", buffer=self._bytes, strides=(1,)
        )
        return view[self._starts].tobytes() == mark * count

    def _is_users(self, names: pa.Array, records: Ints) -> Bools:
        def among(values: pa.Array) -> Bools:
            found: Bools = pc.is_in(names, values).to_numpy(zero_copy_only=False)
            return found

        of_rocketmq = np.zeros(len(self._starts), np.bool_)
        of_rocketmq[records[among(pa.array([_ROCKETMQ_MARK]))]] = True
        return ~(among(_PRODUCER) | (among(_ROCKETMQ) & of_rocketmq[records]))

    def headers(self, kind: pa.ListType) -> pa.Array:
        """Return the user's properties of each record in order, as a list of (key, value).

        Left out are the names that hastore's producers set, and in messages of RocketMQ's clients
        the names that RocketMQ reserves. A record without other properties has null.
        """
        starts, records, ends = self._pieces()
        name_ends = self._next(self._name_ends, starts, np.full(len(starts), len(self._bytes)))
        whole = name_ends < ends  # a piece without 0x01 is no property
        starts, records, ends, name_ends = (
            starts[whole],
            records[whole],
            ends[whole],
            name_ends[whole],
        )
        struct = kind.value_type
        names = slice_values(self._buffer, starts, name_ends, pa.string())
        mask = self._is_users(names, records)
        names, records, ends, name_ends = (
            names.filter(pa.array(mask)),
            records[mask],
            ends[mask],
            name_ends[mask],
        )
        values = slice_values(self._buffer, name_ends + 1, ends, pa.binary())
        pairs = pa.StructArray.from_arrays([names, values], fields=list(struct))
        counts = np.bincount(records, minlength=len(self._starts))
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(offsets), pairs, type=kind, mask=pa.array(counts == 0)
        )

    def _pieces(self) -> tuple[Ints, Ints, Ints]:
        """Cut the properties at 0x02; return starts, record numbers and ends, ordered by start."""
        owners = np.searchsorted(self._ends, self._value_ends, side="right")
        inner = self._value_ends + 1 < self._ends[owners]
        filled = self._starts[self._starts < self._ends]
        starts = np.sort(np.concatenate((filled, self._value_ends[inner] + 1)))
        records = np.searchsorted(self._ends, starts, side="right")
        return starts, records, self._next(self._value_ends, starts, self._ends[records])

    @staticmethod
    def _next(places: Ints, starts: Ints, limits: Ints) -> Ints:
        """Return for each start the next of `places`, or the start's limit if that comes first."""
        padded = np.append(places, np.iinfo(np.int64).max)
        found: Ints = padded[np.searchsorted(places, starts, side="left")]
        return np.minimum(found, limits)
