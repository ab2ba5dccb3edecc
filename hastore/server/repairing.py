"""Repair the log of a running node: damaged ranges are fetched from other nodes, in place.

The rules are those of `hastore log repair` (repair/mending.py). Here the other nodes are asked over
the HA port, which both modes have, and the open store writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hastore.errors import HastoreError, StoreError, UsageError
from hastore.ha.hello.peer import Call
from hastore.ha.hello.ranges import range_in
from hastore.ha.rules.epochs import EpochStarts
from hastore.protocol.hello import REPAIR_BYTES_MAX, RangeOf
from hastore.record.hashes import DEFAULT_ALGORITHM, new_digest
from hastore.record.log_walk import Damage, LogWalk
from hastore.repair.mending import Mended, Mender, Parts, Unfit
from hastore.store.log_store import LogStore

# Calls a node and asks it for bytes [start, end); raises HastoreError or OSError.
Dial = Callable[[int, int, int], Call]


class RunningLog:
    """The log of an open store, as the damaged one."""

    def __init__(self, store: LogStore, epochs: EpochStarts | None, times_cut: int) -> None:
        self.form = store.log.form
        self.file_size = store.file_size
        self.epochs = epochs
        self._store = store
        self._cuts = times_cut

    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes, in one file. Raises StoreError, UsageError, OSError."""
        with self._store.view(offset, size) as view:
            return bytes(view)

    def write(self, parts: Parts, *, skip_unreadable: bool = False) -> None:
        """Write bytes durably over those that are there. Raises StoreError."""
        self._store.mend(parts, self._cuts, skip_unreadable=skip_unreadable)


class PeerSource:
    """The log of another node of the group."""

    def __init__(self, node: int, dial: Dial) -> None:
        """Ask for its limits. Raises Unfit if it does not answer."""
        self.where = f"node {node}"
        self._node = node
        self._dial = dial
        found = self._ask(0, 0)
        self.min_offset, self.readable_offset = found.min_offset, found.readable_offset

    def read(self, start: int, end: int) -> tuple[bytes, EpochStarts]:
        """Return the bytes [start, end), in as many calls as it takes, and who wrote them."""
        data = bytearray()
        epochs: list[tuple[int, int]] = []
        while start + len(data) < end:
            at = start + len(data)
            found = self._ask(at, min(end, at + REPAIR_BYTES_MAX))
            if not found.data:
                raise Unfit(f"it does not have the bytes at {at} any more")
            data += found.data
            epochs += found.epochs
        return bytes(data), epochs

    def digest(self, start: int, end: int) -> bytes:
        """Return the digest of bytes, which are few."""
        digest = new_digest(DEFAULT_ALGORITHM)
        digest.update(memoryview(self.read(start, end)[0]))
        return digest.digest()

    def _ask(self, start: int, end: int) -> RangeOf:
        try:
            found = range_in(self._dial(self._node, start, end), start, end)
        except (HastoreError, OSError) as failure:
            raise Unfit(str(failure) or type(failure).__name__) from failure
        if isinstance(found, str):
            raise Unfit(found)
        return found


def mend_from(
    store: LogStore,
    epochs: EpochStarts | None,
    nodes: Iterable[int],
    dial: Dial,
    walk: LogWalk,
    damage: Damage,
    times_cut: int,
) -> Mended:
    """Repair the range that `walk` over the log has just returned, from the first node that fits.

    `epochs` is the node's history, None in mode dledger. Nothing is written if the log was cut
    since `times_cut` was read, before the walk: other records may be there now. Raises nothing for
    a failure of a node or of a write: the result says it.
    """
    sources, refusals = [], []
    for node in nodes:
        try:
            sources.append(PeerSource(node, dial))
        except Unfit as unfit:
            refusals.append(f"node {node}: {unfit}")
    try:
        mended = Mender(RunningLog(store, epochs, times_cut), sources).mend(walk, damage)
    except (StoreError, UsageError, OSError) as failure:
        return Mended(damage, None, (*refusals, str(failure)))
    return Mended(damage, mended.source, (*refusals, *mended.refusals), mended.written)
