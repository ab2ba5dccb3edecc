"""Read one field of many records at once, with numpy, from the raw bytes of the log.

Records are not aligned. A view with a stride of one byte makes every byte position a valid index,
so one numpy index gathers a field of all records, or the whole header in the same time. Only IPv6
hosts move fields within the header. In that case the moved fields are gathered one by one. Every
length is checked before it is used to compute a position.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from hastore.errors import CorruptRecordError
from hastore.record.layout import (
    CRC_MASK,
    FLAG_BORN_IPV6,
    FLAG_IPV6,
    FLAG_STORE_IPV6,
    HEADER_SIZE,
    IPV6_EXTRA,
    MIN_RECORD_SIZE,
    TAIL_MIN,
    V1_MAGIC,
    V2_MAGIC,
    header_dtype,
    numpy_format,
    offset_of,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_HEADER = np.dtype(
    header_dtype(
        *("size", "magic", "body_crc", "queue_id", "queue_offset", "physical_offset", "sys_flag"),
        *("born_timestamp_ms", "store_timestamp_ms", "reconsume_times", "body_length"),
    )
)


class RecordFields:
    """The fixed fields of the records at `positions` in `data`, and the bounds of their parts.

    `base` is the physical offset of `data[0]`, or None for bytes from the network. Raises
    CorruptRecordError if any of the positions has no whole record, or if the
    physical offset in a record's header is not `base` plus its position.
    """

    def __init__(self, data: memoryview, positions: Ints, base: int | None) -> None:
        self._data = data
        self.positions = positions
        self.base = base
        self._refuse(
            (positions < 0) | (positions > len(data) - MIN_RECORD_SIZE),
            "does not fit into the bytes that are there",
        )
        self._headers = self._take(np.dtype(f"V{HEADER_SIZE}"), positions).view(_HEADER)
        self.sizes = self._header("size")
        self._refuse(
            (self.sizes < MIN_RECORD_SIZE) | (self.sizes > len(data) - positions),
            "has an impossible size",
        )
        magic = self._header("magic")
        is_v2: Bools = magic == V2_MAGIC
        self._refuse(~(is_v2 | (magic == V1_MAGIC)), "has no record magic")
        self.physical_offsets = self._header("physical_offset")
        if base is not None:
            self._refuse(self.physical_offsets != positions + base, "has another physical offset")
        self.sys_flags = self._header("sys_flag")
        self._has_ipv6 = bool((self.sys_flags & FLAG_IPV6).any())
        self._locate_parts(is_v2)

    def _locate_parts(self, is_v2: Bools) -> None:
        ends = self.positions + self.sizes
        tails = ends - TAIL_MIN
        self.body_starts = self.positions + HEADER_SIZE + self._extra
        if self._has_ipv6:  # a header with IPv4 hosts fits into the least record
            self._refuse(self.body_starts > tails, "has an impossible size")
        self.body_ends = self.body_starts + self._moved("body_length", self._extra)
        self._refuse(
            (self.body_ends < self.body_starts) | (self.body_ends > tails),
            "has an impossible body length",
        )
        topic_sizes = self._at("u1", self.body_ends)
        self.topic_starts = self.body_ends + 1
        if is_v2.any():
            topic_sizes = np.where(is_v2, self._at(">i2", self.body_ends), topic_sizes)
            self.topic_starts += is_v2
        self.topic_ends = self.topic_starts + topic_sizes
        self._refuse(
            (topic_sizes < 0) | (self.topic_ends > ends - 2), "has an impossible topic length"
        )
        property_sizes = self._at(">i2", self.topic_ends)
        self.property_starts = self.topic_ends + 2
        self.property_ends = ends
        self._refuse(
            (property_sizes < 0) | (self.property_starts + property_sizes != ends),
            "has lengths that do not add up",
        )

    def _header(self, name: str) -> Ints:
        """Return a field of the header at the place that it has with IPv4 hosts."""
        found: Ints = self._headers[name].astype(np.int64)
        return found

    def _moved(self, name: str, extra: Ints | int) -> Ints:
        """Return a field that IPv6 hosts move by `extra` bytes in each record."""
        if not self._has_ipv6:
            return self._header(name)
        return self._at(numpy_format(name), self.positions + offset_of(name) + extra)

    @cached_property
    def born_is_ipv6(self) -> Bools:
        """Return whether bornHost is an IPv6 address."""
        return self._has_flag(FLAG_BORN_IPV6)

    @cached_property
    def store_is_ipv6(self) -> Bools:
        """Return whether storeHost is an IPv6 address."""
        return self._has_flag(FLAG_STORE_IPV6)

    def _has_flag(self, flag: int) -> Bools:
        found: Bools = (self.sys_flags & flag) != 0
        return found

    @cached_property
    def _born_extra(self) -> Ints | int:
        return self.born_is_ipv6 * np.int64(IPV6_EXTRA) if self._has_ipv6 else 0

    @cached_property
    def _extra(self) -> Ints | int:
        if not self._has_ipv6:
            return 0
        return self._born_extra + self.store_is_ipv6 * np.int64(IPV6_EXTRA)

    def _at(self, dtype: str, places: Ints) -> Ints:
        return self._take(np.dtype(dtype), places).astype(np.int64)

    def _take(self, kind: np.dtype[Any], places: Ints) -> npt.NDArray[Any]:
        shape = (len(self._data) - kind.itemsize + 1,)
        view: npt.NDArray[Any] = np.ndarray(shape, kind, buffer=self._data, strides=(1,))
        return view[places]

    def check_bodies(self, bodies: Iterable[bytes | memoryview]) -> None:
        """Check the CRC of each record's body. Raises CorruptRecordError for the first wrong one.

        With bytes objects it takes about 0.1 us for a body of 200 B, and 0.15 us for one of 1 KiB.
        """
        computed = np.fromiter(map(crc32, bodies), np.int64, len(self.positions))
        wrong = (computed & CRC_MASK) != self.body_crcs
        self._refuse(wrong, "has a body that does not match its CRC")

    @property
    def in_order(self) -> bool:
        """Whether the records are in the order of the log, and none begins inside another."""
        return bool((self.positions[1:] >= self.property_ends[:-1]).all())

    def body_views(self) -> Iterator[memoryview]:
        """Yield each body in place."""
        for start, end in zip(self.body_starts.tolist(), self.body_ends.tolist(), strict=True):
            yield self._data[start:end]

    def _refuse(self, wrong: Bools, what: str) -> None:
        if wrong.any():
            first = int(self.positions[int(np.argmax(wrong))])
            place = (
                f"byte {first} of a reply" if self.base is None else f"offset {first + self.base}"
            )
            raise CorruptRecordError(
                f"the record at {place} {what}; `hastore log verify` reports the damage"
            )

    @cached_property
    def body_crcs(self) -> Ints:
        """Return the CRCs as stored."""
        return self._header("body_crc")

    @cached_property
    def queue_ids(self) -> Ints:
        """Return the queue ids."""
        return self._header("queue_id")

    @cached_property
    def queue_offsets(self) -> Ints:
        """Return the queue offsets."""
        return self._header("queue_offset")

    @cached_property
    def born_timestamps_ms(self) -> Ints:
        """Return when the producers created the messages."""
        return self._header("born_timestamp_ms")

    @cached_property
    def store_timestamps_ms(self) -> Ints:
        """Return when the master stored the messages."""
        return self._moved("store_timestamp_ms", self._born_extra)

    @cached_property
    def reconsume_times(self) -> Ints:
        """Return how often a consumer returned each message to be delivered again."""
        return self._moved("reconsume_times", self._extra)

    def host_rows(self, rows: Ints, *, born: bool, ipv6: bool) -> npt.NDArray[np.uint8]:
        """Return the host (address and port) of each record in `rows`: 8 bytes, or 20 if `ipv6`.

        All of these hosts must be IPv6 if `ipv6`, else IPv4.
        """
        width = 20 if ipv6 else 8
        places: Ints = self.positions + (
            offset_of("born_host") if born else offset_of("store_host") + self._born_extra
        )
        shape = (len(self._data) - width + 1, width)
        view: npt.NDArray[np.uint8] = np.ndarray(shape, np.uint8, buffer=self._data, strides=(1, 1))
        return view[places[rows]]
