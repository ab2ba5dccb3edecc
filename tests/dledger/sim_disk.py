"""The disk of a simulated node: what survives its process, and what also survives a power cut.

An entry is (term, value). A value is a positive number for a put, NO_OP for the first entry of a
term, or the member list itself, a MemberSet. Positions are those of a real data log without blanks.
"""

from __future__ import annotations

import bisect
import random

from hastore.dledger.core.events import HardState, LogState, MemberList, OwnEntry
from hastore.protocol.dledger import MemberSet

NO_OP = 0
ENTRY_HEADER = 48

Members = tuple[int, ...]
Value = int | MemberSet
Entry = tuple[int, Value]


def size_of(entry: Entry) -> int:
    """Return the size of an entry in the log; sizes differ, so that a wrong position shows."""
    value = entry[1]
    if isinstance(value, MemberSet):
        return ENTRY_HEADER + 8 * sum(map(len, value))
    return ENTRY_HEADER + (100 + value % 7 if value else 0)


class SimDisk:
    """The log, the hard state and the checkpoint of one node."""

    def __init__(self, members: Members) -> None:
        self.hard = HardState(0, None)
        self.member_lists: tuple[MemberList, ...] = ()  # as the core has given them
        self.removed: MemberList | None = None  # as the core has given it
        self.checkpoint = -1  # the committed index as it was last written
        self.begin = 0
        self.begin_pos = 0
        self.prev_term = -1
        self.base_group = MemberSet(members)  # the last list below `begin`
        self.entries: list[Entry] = []
        self.list_indexes: list[int] = []  # of the entries that are member lists
        self.ends: list[int] = []  # the position behind each entry
        self.durable = -1

    @property
    def end(self) -> int:
        return self.begin + len(self.entries) - 1

    @property
    def end_pos(self) -> int:
        return self.ends[-1] if self.ends else self.begin_pos

    def entry(self, index: int) -> Entry:
        assert self.begin <= index <= self.end, (self.begin, index, self.end)
        return self.entries[index - self.begin]

    def holds(self, index: int, entry: Entry) -> bool:
        """Return whether the entry is durable here; what retention has removed was."""
        if index < self.begin:
            return True
        return index <= self.durable and self.entries[index - self.begin] == entry

    def term_at(self, index: int) -> int:
        """Return the term of an entry, or of the one before the first."""
        return self.prev_term if index == self.begin - 1 else self.entry(index)[0]

    def pos_at(self, index: int) -> int:
        """Return where an entry begins, or where the next will."""
        place = index - self.begin
        return self.ends[place - 1] if place else self.begin_pos

    @property
    def remembers(self) -> bool:
        """False between a wipe and the end of the quarantine."""
        return self.hard.remembers

    @property
    def members(self) -> Members:
        """The nodes that vote and count here: by the last list in the log, committed or not."""
        return self.group.members

    @property
    def group(self) -> MemberSet:
        """The last member list in the log, committed or not."""
        if not self.list_indexes:
            return self.base_group
        value = self.entry(self.list_indexes[-1])[1]
        assert isinstance(value, MemberSet)
        return value

    def group_before(self, index: int) -> MemberSet:
        """Return the member list that counted just before entry `index`."""
        assert index >= self.begin, (index, self.begin)
        for _, value in reversed(self.entries[: index - self.begin]):
            if isinstance(value, MemberSet):
                return value
        return self.base_group

    def log_state(self) -> LogState:
        terms: list[tuple[int, int]] = []
        for place, (term, _) in enumerate(self.entries):
            if not terms or terms[-1][0] != term:
                terms.append((term, self.begin + place))
        return LogState(self.begin, self.end, tuple(terms), self.prev_term)

    def append(self, entry: Entry) -> int:
        """Write an entry, not yet durably; return its index."""
        self.ends.append(self.end_pos + size_of(entry))
        self.entries.append(entry)
        if isinstance(entry[1], MemberSet):
            self.list_indexes.append(self.end)
        return self.end

    def append_own(self, own: OwnEntry) -> None:
        assert own.index == self.end + 1, (own, self.end)
        self.append((own.term, NO_OP if own.group is None else own.group))

    def truncate(self, index: int) -> None:
        """Remove the entries from `index` on, durably."""
        assert self.begin <= index <= self.end, (self.begin, index, self.end)
        self.drop_from(index)
        self.durable = min(self.durable, index - 1)

    def drop_from(self, index: int) -> None:
        """Remove the entries from `index` on."""
        del self.entries[index - self.begin :]
        del self.ends[index - self.begin :]
        self.list_indexes = [one for one in self.list_indexes if one < index]

    def install(self, index: int, pos: int, prev_term: int, group: MemberSet) -> None:
        """Set the log aside and begin an empty one at `index`, durably."""
        self.begin, self.begin_pos, self.prev_term = index, pos, prev_term
        self.base_group = group
        self.entries, self.ends, self.list_indexes = [], [], []
        self.durable = index - 1

    def retain(self, index: int) -> None:
        """Remove the entries below `index`."""
        place = index - self.begin
        assert 0 < place <= len(self.entries)
        self.base_group = self.group_before(index)
        self.prev_term = self.entries[place - 1][0]
        self.begin, self.begin_pos = index, self.ends[place - 1]
        del self.entries[:place]
        del self.ends[:place]
        self.list_indexes = [one for one in self.list_indexes if one >= index]

    def lose_power(self, rng: random.Random) -> int:
        """Lose any part of the unsynced end; return the number of entries lost."""
        kept = rng.randint(max(self.durable, self.begin - 1), self.end)
        lost = self.end - kept
        if lost:
            self.drop_from(kept + 1)
        return lost

    def runs(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return (term, number of entries) of a range."""
        runs: list[tuple[int, int]] = []
        for index in range(first, last + 1):
            term = self.entry(index)[0]
            if runs and runs[-1][0] == term:
                runs[-1] = (term, runs[-1][1] + 1)
            else:
                runs.append((term, 1))
        return tuple(runs)

    def last_within(self, first: int, max_bytes: int) -> int:
        """Return the last entry of a batch from `first` on: at least one entry, else max_bytes."""
        limit = self.pos_at(first) + max_bytes
        place = bisect.bisect_right(self.ends, limit) - 1
        return max(first, min(self.begin + place, self.end))
