"""A reader's position against a node's epoch history: pure.

A position names the record before it as (epoch, offset). Equal (epoch, offset) means equal bytes,
so it holds on every node whose history gives that offset to that epoch. Where the history
disagrees, the reader saw records that a failover cut away; the common point is where both
histories still agreed. Of an epoch that never joined this history nobody here knows where it began,
perhaps below the epochs before it: the common point is then the log's beginning, since what the
reader has not read must not be passed over.

Of what a history has forgotten (its first entry is of FLOOR_EPOCH) a position of an older epoch
cannot be judged any more: it is LOST, and the reader begins where the log did. A record that was
read when it was forgotten already has the epoch FLOOR_EPOCH: its offset alone is its place.
"""

from collections.abc import Sequence
from enum import Enum

from hastore.ha.rules.epochs import FLOOR_EPOCH

History = Sequence[tuple[int, int]]  # (epoch, start offset), both rising; empty: all is epoch 0


class Standing(Enum):
    """How a position relates to a node's log."""

    AGREED = "agreed"
    BEHIND = "behind"  # this node has not come that far
    LOST = "lost"


def check_position(
    history: History, end_offset: int, epoch: int, offset: int
) -> tuple[Standing, int]:
    """Compare (epoch, offset) with a history whose log ends at `end_offset`.

    Returns the standing, and for LOST the byte offset of the last common point, or a lower one.
    """
    if epoch == FLOOR_EPOCH:
        return _reached(end_offset, offset)
    if history and history[0][0] == FLOOR_EPOCH and epoch < last_forgotten(history):
        return Standing.LOST, history[0][1]
    start = 0 if epoch == 0 else None  # every history begins with epoch 0
    after = None  # where the next epoch starts
    for each, each_start in history:
        if each > epoch:
            after = each_start
            break
        if each == epoch:
            start = each_start
    if start is None:  # an epoch this node has not heard of yet, or a rival's
        return (Standing.BEHIND, end_offset) if after is None else (Standing.LOST, 0)
    if after is not None and offset >= after:
        return Standing.LOST, after
    if offset < start:
        return Standing.LOST, offset
    return _reached(end_offset, offset)


def _reached(end_offset: int, offset: int) -> tuple[Standing, int]:
    return (Standing.AGREED, offset) if offset < end_offset else (Standing.BEHIND, end_offset)


def last_forgotten(history: History) -> int:
    """Return the epoch below which a history with forgotten entries knows none."""
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
    """Return the entries that cover the bytes [begin, end)."""
    covering: list[tuple[int, int]] = [(epoch_at(history, begin), begin)]
    covering += [(epoch, start) for epoch, start in history if begin < start < end]
    return covering
