"""Epoch histories: who wrote which range of the log (docs/failover.md). Pure.

A history is a tuple of entries with strictly rising epochs and starts that never fall. An epoch is
`counter << 16 | node_number`, so no two nodes ever share one; epoch 0 is what came from a RocketMQ
master. Each function mirrors a rule of the searched model; offsets are bytes.
"""

from hastore.protocol.hello import WireEpoch as EpochEntry

History = tuple[EpochEntry, ...]

CLASSIC_EPOCH = 0  # of what came from a RocketMQ master

__all__ = [
    "CLASSIC_EPOCH",
    "EpochEntry",
    "History",
    "classic_range",
    "common_point",
    "due_entries",
    "epoch_at",
    "epoch_node",
    "keep_until",
    "last_epoch",
    "next_epoch",
    "next_start",
    "nothing_to_compare",
    "start_of",
]


def epoch_node(epoch: int) -> int:
    """Return the number of the node that owns the epoch."""
    return epoch & 0xFFFF


def next_epoch(seen: int, node: int) -> int:
    """Return a new epoch of `node`, above `seen`: the counter always goes up, 0 is RocketMQ's."""
    return ((seen >> 16) + 1) << 16 | node


def last_epoch(history: History) -> int:
    """Return the last entry's epoch; 0 without entries."""
    return history[-1].epoch if history else 0


def start_of(history: History, epoch: int) -> int | None:
    """Return where the epoch starts, None when the history does not know it."""
    return next((entry.start for entry in history if entry.epoch == epoch), None)


def epoch_at(history: History, offset: int) -> int | None:
    """Return the epoch that wrote the byte at `offset`, None before the first entry."""
    found = None
    for entry in history:
        if entry.start > offset:
            break
        found = entry.epoch
    return found


def keep_until(history: History, end: int) -> History:
    """Return the entries that start at or below the log's end."""
    return tuple(entry for entry in history if entry.start <= end)


def common_point(mine: History, my_end: int, theirs: History, their_end: int) -> tuple[int, int]:
    """Return the last common point and how many of my entries are shared.

    Walk both from the newest epoch back to the newest one they share; its end is the smaller of
    both ends of that epoch. (0, 0) when they share none.
    """
    places = {entry.epoch: index for index, entry in enumerate(theirs)}
    for index in range(len(mine) - 1, -1, -1):
        other = places.get(mine[index].epoch)
        if other is not None:
            return min(_end_of(mine, index, my_end), _end_of(theirs, other, their_end)), index + 1
    return 0, 0


def classic_range(
    mine: History, my_min: int, my_end: int, theirs: History, their_min: int, their_end: int
) -> tuple[int, int] | None:
    """Return the bytes [start, end) that both logs claim to share for no better reason than that
    each followed some RocketMQ master; None where they share an epoch of their own, or nothing.

    Epoch 0 names no writer: two logs of it may have followed two masters. The same for both sides.
    """
    common, kept = common_point(mine, my_end, theirs, their_end)
    if not kept or mine[kept - 1].epoch != CLASSIC_EPOCH:
        return None
    starts = (start_of(mine, CLASSIC_EPOCH) or 0, start_of(theirs, CLASSIC_EPOCH) or 0)
    start = max(my_min, their_min, *starts)
    return (start, common) if start < common else None


def nothing_to_compare(
    mine: History, my_min: int, my_end: int, theirs: History, their_min: int, their_end: int
) -> bool:
    """Whether my log holds bytes of a RocketMQ master that the other log, which goes on from there,
    has none of any more: retention took them.
    """
    common, kept = common_point(mine, my_end, theirs, their_end)
    if not kept or mine[kept - 1].epoch != CLASSIC_EPOCH or common <= my_min:
        return False
    return classic_range(mine, my_min, my_end, theirs, their_min, their_end) is None


def due_entries(mine: History, my_end: int, theirs: History) -> History:
    """Return the master's entries that a slave takes over now: those that start exactly at its
    log's end.
    """
    due = []
    for entry in _following(mine, theirs):
        if entry.start != my_end:
            break
        due.append(entry)
    return tuple(due)


def next_start(mine: History, theirs: History) -> int | None:
    """Return where the next entry to take over starts: no byte goes beyond before that; None:
    no further one.
    """
    following = _following(mine, theirs)
    return following[0].start if following else None


def _following(mine: History, theirs: History) -> History:
    if not mine:
        return theirs
    for index, entry in enumerate(theirs):
        if entry.epoch == mine[-1].epoch:
            return theirs[index + 1 :]
    return ()


def _end_of(history: History, index: int, end: int) -> int:
    return min(history[index + 1].start, end) if index + 1 < len(history) else end
