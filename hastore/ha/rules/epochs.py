"""Epoch histories: which epoch wrote which range of the log, and what that says of a position.

docs/failover.md has the rules. All functions are pure.

A history is a tuple of entries whose epochs strictly rise and whose starts never fall. An epoch is
`counter << 16 | node_number`, so no two nodes share one; epoch 0 stands for bytes of a RocketMQ
master. Offsets are bytes.

A history is bounded (`prune`), so that it always fits in a HELLO. If entries whose epochs wrote
bytes must be removed for that, one entry of FLOOR_EPOCH replaces them. The history then no longer
says who wrote those bytes: FLOOR_EPOCH, like epoch 0, names no writer.

Two logs are compared by their histories up to the common point, the greatest offset up to which
they agree. The last part of the module compares a reader's position with a node's history.
"""

import itertools
from collections.abc import Collection, Sequence
from enum import Enum

import msgspec

from hastore.protocol.hello import WireEpoch, WireWrittenOver

EpochEntry = WireEpoch
WrittenOver = WireWrittenOver
History = tuple[EpochEntry, ...]

CLASSIC_EPOCH = 0  # the epoch of bytes that came from a RocketMQ master
FLOOR_EPOCH = 0xFFFF  # of bytes whose entries were removed; below every node's epochs
_NAMELESS = (CLASSIC_EPOCH, FLOOR_EPOCH)  # two logs may hold different bytes under one of these

ENTRIES_MAX = 512
RECENT_ENTRIES = 64  # so many of the newest entries stay even if their epochs wrote nothing
HISTORY_BYTES_MAX = 32 * 1024  # of a HELLO's 64 KiB
_LATER_TERMS = 1 << 16  # more promotions or elections than an old life has after what is left of it


def epoch_node(epoch: int) -> int:
    """Return the number of the node that owns the epoch, 0 when no node owns it."""
    return 0 if epoch == FLOOR_EPOCH else epoch & 0xFFFF


def next_epoch(seen: int, node: int) -> int:
    """Return a new epoch of `node`, above `seen`; its counter is at least 1."""
    return ((seen >> 16) + 1) << 16 | node


def later_life(seen: int, now_ms: int) -> int:
    """Return a counter of epochs, or a term, above all that a life of a group can have had.

    `seen` is the greatest one in what is left of it: a backup, or one store. Clients remember the
    last epoch that they saw, and take no master of an earlier one; and a reader's position in an
    epoch must not be taken for one of another life's. Seconds since 1970 count too, so that a
    second life from the same backup begins above the first one.
    """
    return max(seen + _LATER_TERMS, now_ms // 1000)


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


def prune(history: History) -> History:
    """Return the history within its bounds: ENTRIES_MAX entries, HISTORY_BYTES_MAX encoded.

    First, if it has too many bytes, the older entries no longer say where their epochs were
    resumed. Then the older entries of epochs that wrote nothing are removed. This is safe: if
    another log still has such an entry, the entry before it gives the same common point. If the
    history is then still too long, at most the newest ENTRIES_MAX / 2 entries stay, and one entry
    of FLOOR_EPOCH replaces all older ones (none does if these wrote nothing). The last entry always
    stays.
    """
    if not _fits(history, len(history), HISTORY_BYTES_MAX):
        old = max(0, len(history) - RECENT_ENTRIES)
        history = (*without_resumptions(history[:old]), *history[old:])
    if _fits(history, ENTRIES_MAX, HISTORY_BYTES_MAX):
        return history
    recent = max(1, len(history) - RECENT_ENTRIES)  # entry 0 stays: it says where the log began
    older = (
        entry
        for entry, after in itertools.pairwise(history[1 : recent + 1])
        if after.start > entry.start
    )
    shorter = (history[0], *older, *history[recent:])
    if len(shorter) == 1 or _fits(shorter, ENTRIES_MAX, HISTORY_BYTES_MAX):
        return shorter
    cut = max(1, len(shorter) - max(1, ENTRIES_MAX // 2))
    while cut < len(shorter) - 1 and not _fits(shorter[cut:], ENTRIES_MAX, HISTORY_BYTES_MAX // 2):
        cut += 1
    if shorter[cut].start == shorter[0].start:
        return shorter[cut:]  # the removed entries wrote nothing
    newest = shorter[cut - 1]
    floor = EpochEntry(FLOOR_EPOCH, shorter[0].start, newest.acks, newest.nodes)
    return (floor, *shorter[cut:])


def _fits(history: History, entries: int, size_bytes: int) -> bool:
    """Whether a history is within both bounds.

    An entry takes at most 28 bytes, 3 per node and 19 per resumption.
    """
    if len(history) > entries:
        return False
    sizes = (28 + 3 * len(one.nodes) + 19 * len(one.resumed or ()) for one in history)
    return sum(sizes) <= size_bytes


def forgotten_end(mine: History, my_end: int, theirs: History, their_end: int) -> int:
    """Return the offset up to which two logs that share no epoch may still hold equal bytes.

    It is the greater end of their FLOOR_EPOCH ranges, but at most the shorter log's end. It is 0
    when neither log has such a range.
    """
    ends = [
        _end_of(history, 0, end)
        for history, end in ((mine, my_end), (theirs, their_end))
        if history and history[0].epoch == FLOOR_EPOCH
    ]
    return min(max(ends, default=0), my_end, their_end)


def common_point(mine: History, my_end: int, theirs: History, their_end: int) -> tuple[int, int]:
    """Return the last common point and how many of my entries are shared.

    Both histories are walked back to the newest epoch that they share. Its bytes end at some offset
    in each log; the common point is the smaller of the two offsets. The result is (0, 0) when the
    histories share no epoch. It is not beyond the place where the two logs diverge as the epoch's
    master has resumed it without the end of its log (`parted`).

    FLOOR_EPOCH counts as shared only when my log has nothing else and lies wholly inside the other
    log's range of it, as an interrupted copy does. In all other cases the logs may have diverged
    anywhere in that range.
    """
    index, other = _newest_shared(mine, theirs)
    if index is None:
        return 0, 0
    my_range, their_range = _end_of(mine, index, my_end), _end_of(theirs, other, their_end)
    if mine[index].epoch == FLOOR_EPOCH and (len(mine) > 1 or my_end > their_range):
        return 0, 0
    apart = parted(mine[index], theirs[other])
    ends = (my_range, their_range) if apart is None else (my_range, their_range, apart)
    return min(ends), index + 1


def resumed_entry(entry: EpochEntry, ends: Collection[int], end: int, now_s: int) -> EpochEntry:
    """Return the entry of an epoch that its master resumes with a log that ends at `end`.

    A log that was without this master since an earlier resumption diverges from it at the lowest
    end of those that it missed. Only such ends are kept: `ends`, one for each node that has not
    followed since, so there are never more than nodes. The new resumption's number is greater than
    all before it, also if the clock (`now_s`) goes back; if the state of a node is restored from
    an older copy, the clock makes it another number.
    """
    if entry.resumed is None:
        return entry  # a slave may have bytes of any time, and not know it
    kept = tuple((number, at) for number, at in entry.resumed if at in ends and at < end)
    number = max(now_s, last_resumption(entry) + 1)
    return msgspec.structs.replace(entry, resumed=(*kept, (number, end)))


def last_resumption(entry: EpochEntry) -> int:
    """Return the number of the last resumption that a log knows of an epoch, 0 without any."""
    return entry.resumed[-1][0] if entry.resumed else 0


def parted(mine: EpochEntry, theirs: EpochEntry) -> int | None:
    """Return where two logs of one epoch may diverge, because its master resumed it and one of them
    was not there; None if they do not by what is known.

    A master has all of its epoch before any slave. So a slave that has not followed since, and has
    more than the master had when it resumed, has what the master's disk has lost. The master has
    written other bytes there since.
    """
    if mine.resumed is None or theirs.resumed is None:
        return None
    older, newer = sorted((mine, theirs), key=last_resumption)
    missed = [at for number, at in newer.resumed or () if number > last_resumption(older)]
    return min(missed, default=None)


def without_resumptions(history: History) -> History:
    """Return the entries as of a log that does not know which resumptions its bytes are of."""
    return tuple(msgspec.structs.replace(entry, resumed=None) for entry in history)


def same_resumptions(mine: History, theirs: History) -> History:
    """Return my entries with the resumptions that the other log knows of the epochs of both.

    My log is a part of the other one: its bytes are of the same time.
    """
    known = {entry.epoch: entry.resumed for entry in theirs}
    return tuple(
        msgspec.structs.replace(entry, resumed=known[entry.epoch])
        if known.get(entry.epoch, entry.resumed) != entry.resumed
        else entry
        for entry in mine
    )


def named_common(mine: History, my_end: int, theirs: History, their_end: int) -> int:
    """Return the last common point if a node wrote the bytes before it; 0 if that is not known."""
    common, kept = common_point(mine, my_end, theirs, their_end)
    return common if kept and mine[kept - 1].epoch not in _NAMELESS else 0


def classic_range(
    mine: History, my_min: int, my_end: int, theirs: History, their_min: int, their_end: int
) -> tuple[int, int] | None:
    """Return the bytes [start, end) that must be compared, because no epoch names their writer.

    By their histories both logs have these bytes, under epoch 0 or FLOOR_EPOCH. But the two nodes
    may have followed two RocketMQ masters. Returns None when the newest shared epoch is a node's,
    when no epoch is shared, or when the range is empty. Both sides compute the same range.
    """
    common, kept = common_point(mine, my_end, theirs, their_end)
    if not kept or mine[kept - 1].epoch not in _NAMELESS:
        return None
    epoch = mine[kept - 1].epoch
    starts = (start_of(mine, epoch) or 0, start_of(theirs, epoch) or 0)
    start = max(my_min, their_min, *starts)
    return (start, common) if start < common else None


def nothing_to_compare(
    mine: History, my_min: int, my_end: int, theirs: History, their_min: int, their_end: int
) -> bool:
    """Whether bytes without a named writer should be compared, but cannot be.

    My log has such bytes below the common point, but retention has removed them from the other log.
    """
    common, kept = common_point(mine, my_end, theirs, their_end)
    if not kept or mine[kept - 1].epoch not in _NAMELESS or common <= my_min:
        return False
    return classic_range(mine, my_min, my_end, theirs, their_min, their_end) is None


def agreed(mine: History, my_end: int, theirs: History) -> History:
    """Return the entries that my log keeps when it takes over the master's entries or bytes.

    If all entries after the newest shared one start at my log's end, only the entries up to the
    shared one are kept; otherwise all are. The dropped entries wrote nothing, so the master's
    entries, or bytes of the epoch before them, may replace them in one durable write. If they were
    dropped earlier, a crash could leave my log with a lower last epoch than it had when its records
    were confirmed. A promotion would then prefer a log with the tail of an older epoch.
    """
    if not theirs:
        return mine  # a RocketMQ master has no history
    index, _ = _newest_shared(mine, theirs)
    kept = 0 if index is None else index + 1
    return mine[:kept] if all(entry.start >= my_end for entry in mine[kept:]) else mine


def due_entries(mine: History, my_end: int, theirs: History) -> History:
    """Return the master's entries that a slave takes over now.

    They start exactly at the end of the slave's log.
    """
    due = []
    for entry in _following(mine, theirs):
        if entry.start != my_end:
            break
        due.append(entry)
    return tuple(due)


def next_start(mine: History, theirs: History) -> int | None:
    """Return where the next entry to take over starts; None if there is none.

    No byte is written beyond that offset before the entry is taken over.
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


def _newest_shared(mine: History, theirs: History) -> tuple[int | None, int]:
    """Return the newest shared epoch's index in mine (None: no such epoch) and in theirs."""
    places = {entry.epoch: index for index, entry in enumerate(theirs)}
    for index in range(len(mine) - 1, -1, -1):
        other = places.get(mine[index].epoch)
        if other is not None:
            return index, other
    return None, 0


def _end_of(history: History, index: int, end: int) -> int:
    return min(history[index + 1].start, end) if index + 1 < len(history) else end


# -- a reader's position -----------------------------------------------------------------------
#
# A position names the record before it as (epoch, offset). Equal (epoch, offset) means equal bytes,
# so a position is valid on every node whose history assigns that offset to that epoch. If the
# history assigns it to another epoch, the reader saw records that a failover cut away.
#
# If this history lacks the position's epoch but has a later one, this node does not know where the
# position's epoch began; it may even have begun below earlier epochs of this history. The common
# point is then the beginning of the log, so that the reader skips no record.
#
# A position of a forgotten epoch, below FLOOR_EPOCH's end, cannot be compared: it is LOST, and the
# common point is where the history begins. A position that was read after its epoch was forgotten
# has FLOOR_EPOCH; only its offset is compared.

# A history that is not whole begins where the log does: retention has shortened both. It cannot say
# who wrote what was before. Retention removes only what was committed, and no failover cuts that.

# (epoch, start offset), both rising; empty: the whole log is epoch 0
EpochStarts = Sequence[tuple[int, int]]
FORGOTTEN_EPOCH = FLOOR_EPOCH  # of a position that was read after its epoch was forgotten


class Standing(Enum):
    """How a position relates to a node's log."""

    AGREED = "agreed"
    BEHIND = "behind"  # the position is beyond this log's end
    LOST = "lost"  # its record is not in this log


def check_position(
    history: EpochStarts, end_offset: int, epoch: int, offset: int, *, is_whole: bool = True
) -> tuple[Standing, int]:
    """Compare (epoch, offset) with the history of a log that ends at `end_offset`.

    Unless the history `is_whole`, what the log had before it is AGREED: nothing is known against
    it. Returns the standing and, for LOST, the offset of the last common point or a lower offset.
    """
    if epoch == FLOOR_EPOCH:
        return _reached(end_offset, offset)
    if not is_whole and history and epoch <= history[0][0] and offset < history[0][1]:
        return Standing.AGREED, offset
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


def _oldest_known(history: EpochStarts) -> int:
    """Return the oldest epoch that the history still knows; FLOOR_EPOCH if it knows none."""
    return history[1][0] if len(history) > 1 else FLOOR_EPOCH


def classic_end(history: EpochStarts) -> int | None:
    """Return where a RocketMQ master's bytes end in a log with this history.

    None if the log has none, or if the history was shortened, so that it does not say.
    """
    own = next((entry for entry in history if entry[0] != CLASSIC_EPOCH), None)
    if own is None or own[0] == FLOOR_EPOCH or not own[1]:
        return None
    return own[1]


def epoch_of(history: EpochStarts, offset: int) -> int:
    """Return the epoch that wrote the byte at `offset`."""
    found = 0
    for epoch, start in history:
        if start > offset:
            break
        found = epoch
    return found


def epochs_of(history: EpochStarts, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the (epoch, start) entries that cover the bytes [begin, end)."""
    covering: list[tuple[int, int]] = [(epoch_of(history, begin), begin)]
    covering += [(epoch, start) for epoch, start in history if begin < start < end]
    return covering
