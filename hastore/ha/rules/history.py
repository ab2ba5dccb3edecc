"""Compare a reader's position with a node's epoch history. Pure.

A position names the record before it as (epoch, offset). Equal (epoch, offset) means equal bytes,
so a position is valid on every node whose history assigns that offset to that epoch. If the history
assigns it to another epoch, the reader saw records that a failover cut away. The common point is
the greatest offset up to which this log and the one that the reader saw agree.

If this history lacks the position's epoch but has a later one, this node does not know where the
position's epoch began; it may even have begun below earlier epochs of this history. The common
point is then the beginning of the log, so that the reader skips no record.

A history may have forgotten its oldest entries; its first entry then has FLOOR_EPOCH. A position of
a forgotten epoch cannot be compared: it is LOST, and the common point is where the history begins.
A position that was read after its epoch was forgotten has FLOOR_EPOCH; only its offset is compared.
"""

from collections.abc import Sequence
from enum import Enum

from hastore.ha.rules.epochs import FLOOR_EPOCH

# (epoch, start offset), both rising; empty: the whole log is epoch 0
History = Sequence[tuple[int, int]]
FORGOTTEN_EPOCH = FLOOR_EPOCH  # of a position that was read after its epoch was forgotten


class Standing(Enum):
    """How a position relates to a node's log."""

    AGREED = "agreed"
    BEHIND = "behind"  # the position is beyond this log's end
    LOST = "lost"  # its record is not in this log


def check_position(
    history: History, end_offset: int, epoch: int, offset: int
) -> tuple[Standing, int]:
    """Compare (epoch, offset) with the history of a log that ends at `end_offset`.

    Returns the standing and, for LOST, the offset of the last common point or a lower offset.
    """
    if epoch == FLOOR_EPOCH:
        return _reached(end_offset, offset)
    if history and history[0][0] == FLOOR_EPOCH and epoch < _oldest_known(history):
        return Standing.LOST, history[0][1]
    start = 0 if epoch == 0 else None  # every log begins in epoch 0, which has no entry
    after = None  # where the next epoch starts
    for each, each_start in history:
        if each > epoch:
            after = each_start
            break
        if each == epoch:
            start = each_start
    if start is None:  # unknown here: a newer epoch, or a rival master's
        return (Standing.BEHIND, end_offset) if after is None else (Standing.LOST, 0)
    if after is not None and offset >= after:
        return Standing.LOST, after
    if offset < start:
        return Standing.LOST, offset
    return _reached(end_offset, offset)


def _reached(end_offset: int, offset: int) -> tuple[Standing, int]:
    return (Standing.AGREED, offset) if offset < end_offset else (Standing.BEHIND, end_offset)


def _oldest_known(history: History) -> int:
    """Return the oldest epoch that the history still knows; FLOOR_EPOCH if it knows none."""
    return history[1][0] if len(history) > 1 else FLOOR_EPOCH


def epoch_at(history: History, offset: int) -> int:
    """Return the epoch that wrote the byte at `offset`."""
    found = 0
    for epoch, start in history:
        if start > offset:
            break
        found = epoch
    return found


def epochs_of(history: History, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the (epoch, start) entries that cover the bytes [begin, end)."""
    covering: list[tuple[int, int]] = [(epoch_at(history, begin), begin)]
    covering += [(epoch, start) for epoch, start in history if begin < start < end]
    return covering
