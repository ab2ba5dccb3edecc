"""Where the records of one pull lie: units of a consume queue, few of them or a thousand."""

from collections.abc import Iterable

from hastore.store.consume_queue import UNIT, UNIT_BYTES
from hastore.store.unit_files import BLANK_UNIT_SIZE

_MANY = 64  # units from which on numpy is quicker
_UNIT = [("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]
Place = tuple[int, tuple[int, int, int]]  # position in the queue; offset, size, tags code


class PullPlaces:
    """The places taken so far: whole below `limit`, as many as there is room for, at least one."""

    __slots__ = ("first", "limit", "max_bytes", "max_messages", "offsets", "positions", "sizes")

    def __init__(self, max_messages: int, max_bytes: int, limit: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes  # what is left of them
        self.limit = limit
        self.first = -1  # the position of the first unit, taken or not
        self.positions: list[int] = []  # in the queue
        self.offsets: list[int] = []  # in the log
        self.sizes: list[int] = []

    def take(self, raw: bytes, at: int) -> bool:
        """Take from whole units, the first one of position `at`; False: the rest has no room."""
        if len(raw) < _MANY * UNIT_BYTES:
            return self.take_each(enumerate(UNIT.iter_unpack(raw), at))
        import numpy as np  # only now: it would be a quarter of a node's start

        units = np.frombuffer(raw, np.dtype(_UNIT))
        offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
        positions = np.arange(at, at + len(units))
        real = (sizes > 0) & (sizes != BLANK_UNIT_SIZE)
        if not real.all():
            offsets, sizes, positions = offsets[real], sizes[real], positions[real]
        if not len(sizes):
            return True
        if self.first < 0:
            self.first = int(positions[0])
        beyond = offsets + sizes > self.limit
        readable = int(beyond.argmax()) if beyond.any() else len(sizes)
        totals = np.cumsum(sizes)
        fitting = int(np.searchsorted(totals, self.max_bytes, side="right"))
        if not self.offsets:
            fitting = max(fitting, 1)
        count = min(readable, fitting, self.max_messages - len(self.offsets))
        if count:
            self.positions += positions[:count].tolist()
            self.offsets += offsets[:count].tolist()
            self.sizes += sizes[:count].tolist()
            self.max_bytes -= int(totals[count - 1])
        return count == len(sizes) and len(self.offsets) < self.max_messages

    def take_each(self, units: Iterable[Place]) -> bool:
        """Take from units in their order; False: the rest has no room."""
        left, limit = self.max_bytes, self.limit
        room = self.max_messages - len(self.offsets)
        for position, (offset, size, _) in units:
            if size <= 0 or size == BLANK_UNIT_SIZE:
                continue
            if self.first < 0:
                self.first = position
            if not room or offset + size > limit or (size > left and self.offsets):
                return False
            room -= 1
            left -= size
            self.positions.append(position)
            self.offsets.append(offset)
            self.sizes.append(size)
        self.max_bytes = left
        return room > 0
