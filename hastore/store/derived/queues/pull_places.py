"""Where the records of one pull lie: units of a consume queue, few of them or a thousand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hastore.store.derived.queues.consume_queue import UNIT, UNIT_BYTES
from hastore.store.derived.queues.unit_files import BLANK_UNIT_SIZE

if TYPE_CHECKING:
    import numpy.typing as npt

MANY = 64  # units from which on numpy is quicker
_UNIT = [("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]
Place = tuple[int, tuple[int, int, int]]  # position in the queue; offset, size, tags code


class PullPlaces:
    """The places taken so far: whole below `limit`, as many as there is room for, at least one.

    `positions` are those in the queue, `offsets` those in the log; all three columns are lists
    while they are short, arrays once many units came at a time.
    """

    __slots__ = (
        *("count", "first", "limit", "max_bytes", "max_messages"),
        *("offsets", "positions", "sizes"),
    )

    def __init__(self, max_messages: int, max_bytes: int, limit: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes  # what is left of them
        self.limit = limit
        self.first = -1  # the position of the first unit, taken or not
        self.count = 0
        self.positions: Any = []
        self.offsets: Any = []
        self.sizes: Any = []

    def take(self, raw: bytes, at: int) -> bool:
        """Take from whole units, the first one of position `at`; False: the rest has no room."""
        if len(raw) < MANY * UNIT_BYTES:
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
        if not self.count:
            fitting = max(fitting, 1)
        count = min(readable, fitting, self.max_messages - self.count)
        if count:
            self.max_bytes -= int(totals[count - 1])
            self._add(positions[:count], offsets[:count], sizes[:count])
        return count == len(sizes) and self.count < self.max_messages

    def take_each(self, units: Iterable[Place]) -> bool:
        """Take from units in their order; False: the rest has no room."""
        left, limit = self.max_bytes, self.limit
        room = self.max_messages - self.count
        positions: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for position, (offset, size, _) in units:
            if size <= 0 or size == BLANK_UNIT_SIZE:
                continue
            if self.first < 0:
                self.first = position
            if not room or offset + size > limit or (size > left and (offsets or self.count)):
                room = 0
                break
            room -= 1
            left -= size
            positions.append(position)
            offsets.append(offset)
            sizes.append(size)
        self.max_bytes = left
        self._add(positions, offsets, sizes)
        return room > 0

    def runs(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return where the runs of neighbours in the log begin, and where they end."""
        offsets, sizes = self.offsets, self.sizes
        if isinstance(offsets, list):
            return offsets, [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        import numpy as np

        ends = offsets + sizes
        breaks = np.flatnonzero(offsets[1:] != ends[:-1])
        begins = offsets[np.concatenate(([0], breaks + 1))]
        return begins.tolist(), ends[np.concatenate((breaks, [-1]))].tolist()

    def _add(self, *columns: list[int] | npt.NDArray[Any]) -> None:
        if not len(columns[0]):
            return
        kept = (self.positions, self.offsets, self.sizes)
        if not self.count:
            joined = columns
        elif isinstance(kept[0], list) and isinstance(columns[0], list):
            joined = tuple(a + b for a, b in zip(kept, columns, strict=True))
        else:
            import numpy as np

            joined = tuple(np.concatenate(pair) for pair in zip(kept, columns, strict=True))
        self.positions, self.offsets, self.sizes = joined
        self.count += len(columns[0])
