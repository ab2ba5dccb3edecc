"""MemberState: a node's part in its group, and its log; Membership: changes of the members.

The core's parts share the MemberState. Durable are `term`, `voted_for`, `remembers` (HardState),
the log, and the member lists; the rest begins anew with each start. Invariants: `term` never falls.
In one term `voted_for` changes at most once, from None. `committed_index` never falls and is at
most the log's end. `persisted_index` falls only with the log's end.

Members change one node at a time. A list counts from its append on, on every node, committed or
not. Two majorities of lists that differ by one node share a node, so two leaders cannot be elected
by them. Therefore the next change waits until the last one is committed, and the first waits until
an entry of the leader's own term is committed. A leader that the new list leaves out goes on until
the list is committed.

A new node is first a learner: it gets the log, and all that counts or votes reads `members` only,
without it. The leader makes it a member when it keeps up (learners.py). So a node that never comes
costs no majority, and the list without it needs no word of it.
"""

from dataclasses import dataclass

from hastore.dledger.core.events import (
    HardState,
    MemberList,
    Role,
    Settled,
    Start,
    Update,
    listed,
)
from hastore.dledger.core.term_map import TermMap
from hastore.protocol.dledger import MemberSet


class MemberState:
    """A node's role, term, vote, leader, log and members."""

    def __init__(self, node: int, start: Start) -> None:
        log = start.log
        self.node = node
        self.role = Role.FOLLOWER
        self.term = max(start.hard_state.term, 0)
        self.voted_for = start.hard_state.voted_for
        self.leader: int | None = None
        self.log = TermMap(log.begin_index, log.end_index, log.terms, log.prev_term)
        self.persisted_index = log.end_index
        self.committed_index = max(min(start.committed_index, log.end_index), log.begin_index - 1)
        self.disk_full = start.disk_full
        # (member, whom it prefers as leader) if they contradict each other, as the leader knows.
        self.preferences: tuple[tuple[int, int], ...] = ()
        # The committed list that has left out this node, until a leader is heard again.
        self.removed = start.removed
        self.blocked = False  # replay has stopped: as leader this node could not take puts
        self.hangs = False  # a sync of the log does not return
        self.cuts = 0  # how often the log was cut since the start
        self.down: set[int] = set()  # peers whose link is closed
        self.first_members = tuple(sorted(set(start.members)))
        # Each once: a version before saved them again with each INSTALL that found no room.
        in_log = (one for one in start.member_lists if self._is_in_log(one))
        self.member_lists = tuple(dict.fromkeys(in_log))
        # A log never has entries of a later term than its node: it takes them from a leader.
        self.term = max(self.term, self.log.end_term)
        if self.term > start.hard_state.term:
            self.voted_for = None
        # A log that is not whole may end where the group had this member alone, and has more now.
        alone = start.alone and self.members == (node,)
        self.remembers = alone or (start.remembers and start.hard_state.remembers)

    def _is_in_log(self, one: MemberList) -> bool:
        return one.index < self.log.begin_index or self.log.term_at(one.index) == one.term

    @property
    def ledger_end_index(self) -> int:
        """The last entry of this node's log; -1: none."""
        return self.log.end_index

    @property
    def ledger_end_term(self) -> int:
        """The term of the last entry; -1: none."""
        return self.log.end_term

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes that elect and count: the last member list, committed or not."""
        return self.member_lists[-1].members if self.member_lists else self.first_members

    @property
    def group(self) -> MemberSet:
        """The last member list, committed or not, with its learners."""
        lists = self.member_lists
        return lists[-1].group if lists else MemberSet(self.first_members)

    @property
    def learners(self) -> tuple[int, ...]:
        """The nodes that get the log, and neither elect nor count."""
        return self.member_lists[-1].learners if self.member_lists else ()

    @property
    def committed_members(self) -> tuple[int, ...]:
        """The members of the last list that this node knows to be committed."""
        return self.group_at(self.committed_index).members

    @property
    def peers(self) -> tuple[int, ...]:
        """The members but this node."""
        return tuple(one for one in self.members if one != self.node)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who gets the log from this node as leader: its peers and the learners.

        The leader itself may be a learner for a moment: the list that removed it, and the one that
        added it again, are perhaps not committed, so it was elected as a member.
        """
        return (*self.peers, *(one for one in self.learners if one != self.node))

    @property
    def quorum(self) -> int:
        """How many members are a majority."""
        return len(self.members) // 2 + 1

    @property
    def changing(self) -> bool:
        """Whether the last member list is not known to be committed."""
        return bool(self.member_lists) and self.member_lists[-1].index > self.committed_index

    @property
    def able(self) -> bool:
        """Whether this node could serve as leader, if its disk has room."""
        return not (self.blocked or self.hangs)

    @property
    def is_leader(self) -> bool:
        """Whether this node leads its term."""
        return self.role is Role.LEADER

    def save(self, update: Update) -> None:
        """Let the driver save term and vote before it sends this update's messages."""
        update.hard_state = HardState(self.term, self.voted_for, self.remembers)

    def adopt_term(self, term: int, update: Update) -> None:
        """Move to a later term, without a vote and without a leader."""
        self.term, self.voted_for, self.leader = term, None, None
        update.role_changed = True
        self.save(update)

    def vote(self, candidate: int, update: Update) -> None:
        """Give this term's vote."""
        if self.voted_for != candidate:
            self.voted_for = candidate
            self.save(update)

    def become(self, role: Role, leader: int | None, update: Update) -> None:
        """Change the role and the leader."""
        if (role, leader) != (self.role, self.leader):
            self.role, self.leader = role, leader
            update.role_changed = True

    # -- the log -----------------------------------------------------------------------------------

    def group_at(self, index: int) -> MemberSet:
        """Return the member list that counts at an entry."""
        found = [one.group for one in self.member_lists if one.index <= index]
        return found[-1] if found else MemberSet(self.first_members)

    def add_member_list(self, one: MemberList, update: Update) -> None:
        """Take a member list that has been appended; it counts at once."""
        self.member_lists = (*self.member_lists, one)
        update.member_lists = self.member_lists

    def truncate(self, index: int, update: Update) -> None:
        """Cut the log; the entries from `index` on are gone, and their member lists."""
        self.log.truncate(index)
        self.persisted_index = min(self.persisted_index, index - 1)
        self.cuts += 1
        kept = tuple(one for one in self.member_lists if one.index < index)
        if kept != self.member_lists:
            self.member_lists = kept
            update.member_lists = kept
        update.truncate_from = index

    def install(
        self, index: int, pos: int, prev_term: int, group: MemberSet, update: Update
    ) -> None:
        """Set the log aside and begin an empty one at `index`."""
        self.log.install(index, prev_term)
        self.persisted_index = self.committed_index = index - 1
        self.cuts += 1
        # If the node dies before the log is given up, the lists that are in it count again.
        kept = tuple(one for one in self.member_lists if one.index < index)
        self.member_lists = (*kept, MemberList(index - 1, prev_term, *group))
        update.member_lists = self.member_lists
        update.install = (index, pos, prev_term)
        update.committed_index = self.committed_index

    def retain(self, begin_index: int) -> None:
        """Take note of what retention has removed; only committed entries can go."""
        self.log.retain(min(begin_index, self.committed_index + 1))
        below = [one for one in self.member_lists if one.index < self.log.begin_index]
        if len(below) > 1:
            self.member_lists = self.member_lists[len(below) - 1 :]

    def commit(self, index: int, update: Update) -> bool:
        """Raise the committed index. Returns whether it rose."""
        if index <= self.committed_index:
            return False
        self.committed_index = index
        update.committed_index = index
        if self.is_leader:  # else a leader that knows of all this serves the node, perhaps again
            self._note_own_removal(update)
        return True

    # -- removed nodes -----------------------------------------------------------------------------

    @property
    def committed_list(self) -> MemberList | None:
        """The last member list that this node knows to be committed; None: the first members."""
        found = [one for one in self.member_lists if one.index <= self.committed_index]
        return found[-1] if found else None

    def removal_of(self, node: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the committed list that leaves out a node, as a VoteResponse has it."""
        last = self.committed_list
        if last is None or node in (*last.members, *last.learners):
            return None
        return last.index, last.term, last.members

    def note_removal(self, told: tuple[int, int, tuple[int, ...]], update: Update) -> bool:
        """Believe a peer that a committed list has left out this node. Returns whether it has.

        If the entry is in this log, the log knows better: perhaps a later list has the node again.
        If it is not, this node lacks a committed entry and could not be elected anyway. A node that
        is new, and was in no list yet, was not removed.
        """
        index, term, members = told
        known = index < self.log.begin_index or self.log.term_at(index) == term
        group, before = self.group, self.group_at(self.committed_index)
        belonged = self.node in (*group.members, *group.learners, *before.members)
        if known or self.node in members or not belonged:
            return False
        if self.removed is None or self.removed.index < index:
            self.removed = MemberList(index, term, members)
            update.removed = True
        return True

    def _note_own_removal(self, update: Update) -> None:
        lists = self.member_lists
        last = self.committed_list
        if last is None or last is not lists[-1] or last == self.removed:
            return
        before = lists[-2].group if len(lists) > 1 else MemberSet(self.first_members)
        belonged = self.node in (*before.members, *before.learners)
        if belonged and self.removal_of(self.node) is not None:
            self.removed = last
            update.removed = True

    def note_return(self, term: int, committed_index: int, update: Update) -> None:
        """Take note that a leader of `term` serves this node: it is in the group, perhaps again.

        A leader that has the node again knows that its removal is committed. A message that does
        not was sent before that, and is late.
        """
        gone = self.removed
        if gone is not None and (term > gone.term or committed_index >= gone.index):
            self.removed = None
            update.removed = True


@dataclass(slots=True)
class PendingChange:
    """A member list that is appended and not yet committed, and who waits for it."""

    index: int
    token: object | None


def _places(group: MemberSet) -> dict[int, bool]:
    """Return each node of a list, and whether it is a member."""
    return dict.fromkeys(group.learners, False) | dict.fromkeys(group.members, True)


class Membership:
    """The change of members that is under way on a leader."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self.pending: PendingChange | None = None

    def busy(self) -> str | None:
        """Return why no change can begin now, whatever it is; None: one can."""
        state = self._state
        if state.log.term_at(state.committed_index) != state.term:
            return "the leader has committed nothing in its term yet; try again"
        if state.changing:
            return "the last change of the members is not committed yet; try again"
        return None

    def refusal(self, wanted: MemberSet) -> str | None:
        """Return why the operator cannot change the members to this list now; None: it is done."""
        busy = self.busy()
        if busy is not None:
            return busy
        now = self._state.group
        before, after = _places(now), _places(wanted)
        moved = {one for one in before.keys() | after if before.get(one) != after.get(one)}
        if len(moved) != 1 or len(after) != len(wanted.members) + len(wanted.learners):
            learners = f", and learners {listed(now.learners)}" if now.learners else ""
            members = listed(now.members)
            return f"members change one node at a time; now they are {members}{learners}"
        if not wanted.members or min(after) < 0:
            return "a group needs at least one node, and node numbers are not negative"
        if not set(now.members).issuperset(wanted.members):
            return f"node {min(moved)} becomes a member when it keeps up; add it as a learner"
        if not set(wanted.learners).isdisjoint(now.members) or len(wanted.leaving) > 1:
            return "a member does not become a learner, and one node is replaced at a time"
        if not set(wanted.members).issuperset(wanted.leaving):
            return f"node {listed(wanted.leaving)} is no member, so it cannot be replaced"
        return None

    def settle(self, update: Update) -> bool:
        """Settle the change if it is committed. Returns whether a change was."""
        pending = self.pending
        if pending is None or pending.index > self._state.committed_index:
            return False
        self.pending = None
        if pending.token is not None:
            update.settled.append(Settled(pending.token, "COMMITTED", pending.index))
        return True

    def stop(self, update: Update) -> None:
        """This node does not lead any more: the change may still be committed."""
        if self.pending is not None and self.pending.token is not None:
            update.settled.append(Settled(self.pending.token, "TERM_CHANGED", self.pending.index))
        self.pending = None
