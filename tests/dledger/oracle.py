"""What must hold in a DLedger group, checked by an observer who sees every node's disk.

The observer keeps what no node knows: which entries were ever committed and by whom, all votes that
were ever sent, who led each term, and what clients were told. It judges each effect of a node at
the moment of the effect; it never changes anything.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hastore.dledger.core.events import HardState, Role
from hastore.history.rules import events as e
from hastore.protocol.dledger import (
    Code,
    MemberSet,
    Message,
    PushResponse,
    PushType,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
    VoteResult,
)
from tests.dledger.sim_disk import Entry, Members, size_of
from tests.process import history
from tests.process.stores import Found

if TYPE_CHECKING:
    from tests.dledger.simulation import SimNode


class Violation(AssertionError):
    """A state that must never be reached."""


@dataclass(slots=True)
class Put:
    """One put of a client; times are those of the world."""

    token: int
    node: int
    term: int
    first: int
    last: int
    began_ms: float
    acked_before: int  # the greatest index acknowledged before it began
    outcome: str = ""
    ended_ms: float = 0.0


@dataclass(slots=True)
class Read:
    """One linearizable read."""

    token: int
    node: int
    began_ms: float
    floor: int  # what it must return at least
    outcome: str = ""
    index: int = -1


class Oracle:
    """All that was observed in one walk."""

    def __init__(self, members: Members) -> None:
        self.first_members = members
        self.committed: list[Entry] = []
        self.committed_in: list[int] = []  # the term of the leader that committed it first
        self.committed_ms: list[float] = []
        self.content: dict[tuple[int, int], tuple[Entry, int]] = {}
        self.leaders: dict[int, int] = {}
        self.votes: dict[tuple[int, int], int] = {}
        self.terms: dict[int, int] = {}  # the greatest term of each node that remembers
        self.puts: dict[int, Put] = {}
        self.reads: dict[int, Read] = {}
        self.acked = -1  # the greatest index that a client was told
        self.read_up_to = -1
        self.refused: set[int] = set()  # values
        self.nodes: dict[int, SimNode] = {}

    @property
    def end(self) -> int:
        """The greatest index that was ever committed."""
        return len(self.committed) - 1

    def group_at(self, index: int) -> MemberSet:
        """Return the member list that counts at a committed entry."""
        for _, value in reversed(self.committed[: index + 1]):
            if isinstance(value, MemberSet):
                return value
        return MemberSet(self.first_members)

    # ---- effects on a disk

    def hard_state(self, node: SimNode, new: HardState) -> None:
        """Judge a hard state that is about to be saved."""
        old = node.disk.hard
        if new.term < old.term:
            raise Violation(f"node {node.number}: the term falls from {old.term} to {new.term}")
        if new.term == old.term and old.voted_for not in (None, new.voted_for):
            raise Violation(
                f"node {node.number} changes its vote in term {new.term} from {old.voted_for} "
                f"to {new.voted_for}"
            )

    def appended(self, node: SimNode, index: int) -> None:
        """Judge an entry that was written to a log: (index, term) says all below it."""
        disk = node.disk
        entry = disk.entry(index)
        before = disk.term_at(index - 1) if index else -1
        if entry[0] < before:
            raise Violation(f"node {node.number}: entry {index} of {entry[0]} after {before}")
        known = self.content.setdefault((index, entry[0]), (entry, before))
        if known != (entry, before):
            raise Violation(
                f"node {node.number}: entry {index} of term {entry[0]} is {entry[1]} after term "
                f"{before}; elsewhere {known[0][1]} after {known[1]}"
            )

    def truncates(self, node: SimNode, index: int) -> None:
        """Judge a cut that is about to be made."""
        disk = node.disk
        if not disk.begin <= index <= disk.end:
            raise Violation(
                f"node {node.number} cuts at {index}, outside {disk.begin} to {disk.end}"
            )
        if index <= self.end and disk.entry(index) == self.committed[index]:
            raise Violation(f"node {node.number} cuts the committed entry {index}")
        if index <= node.committed:
            raise Violation(f"node {node.number} cuts {index}, it had committed {node.committed}")

    def installs(self, node: SimNode, index: int, group: MemberSet) -> None:
        """Judge an INSTALL that is about to be done."""
        disk = node.disk
        if group != self.group_at(index - 1):
            raise Violation(f"node {node.number} installs {group} at {index}")
        if index - 1 > self.end:
            raise Violation(f"node {node.number} begins at {index}, above what is committed")
        held = disk.begin <= index <= disk.end and index <= self.end
        if held and disk.entry(index) == self.committed[index]:
            raise Violation(f"node {node.number} sets the committed entry {index} aside")

    def starts(self, node: SimNode) -> None:
        """Judge what a node finds on its disk at its start: nothing durable is lost."""
        disk = node.disk
        for index in range(disk.begin, disk.durable + 1):
            self.appended(node, index)

    def recalls(self, node: SimNode) -> None:
        """Judge the end of a quarantine: what the node may have acknowledged is here again."""
        disk, lost = node.disk, node.lost_disk
        assert lost is not None
        for index in range(disk.begin, min(lost.durable, self.end) + 1):
            had = lost.holds(index, self.committed[index])
            if had and not disk.holds(index, self.committed[index]):
                raise Violation(f"node {node.number} ends its quarantine without entry {index}")
        # Its old disk may have voted in later terms. Who got such a vote lacks the entry that ended
        # the quarantine, and cannot win: if it leads all the same, that vote is missed then.
        later = [key for key in self.votes if key[0] == node.number and key[1] > node.core_term]
        for key in later:
            del self.votes[key]

    # ---- messages

    def sends(self, node: SimNode, peer: int, message: Message) -> None:
        """Judge a message at the moment that it is sent: what it says is durable."""
        disk = node.disk
        me = node.number
        if peer == me:
            raise Violation(f"node {me} sends {message} to itself")
        asks_before = isinstance(message, VoteRequest) and message.pre
        if message.term > disk.hard.term and not asks_before:
            raise Violation(f"node {me} sends term {message.term}, durable is {disk.hard.term}")
        if isinstance(message, VoteRequest):
            # A restart may know less than what retention has removed since.
            committed = disk.group_before(max(node.committed + 1, disk.begin))
            known = {*disk.members, *committed.members}
            if me not in known:
                raise Violation(f"node {me} asks for votes and is no member: {disk.group}")
        if isinstance(message, VoteRequest) and not message.pre:
            if not disk.remembers:
                raise Violation(f"node {me} asks for votes, it was wiped")
            self._vote(node, message.term, me)
            if (message.ledger_end_index, message.ledger_end_term) != self._log_end(node):
                raise Violation(f"node {me} asks for votes with a log that it has not: {message}")
        elif isinstance(message, VoteResponse) and message.result is VoteResult.ACCEPT:
            if not disk.remembers:
                raise Violation(f"node {me} gives node {peer} its vote, it was wiped")
            if not message.pre:
                self._vote(node, message.request_term, peer)
        elif isinstance(message, PushResponse) and message.code is Code.SUCCESS:
            if message.push is PushType.APPEND:
                self._acknowledges(node, message)
        elif isinstance(message, TakeLeadership) and self.leaders.get(message.term) != me:
            raise Violation(f"node {me} hands over term {message.term}, which it does not lead")

    def _log_end(self, node: SimNode) -> tuple[int, int]:
        return node.disk.end, node.disk.term_at(node.disk.end)

    def _vote(self, node: SimNode, term: int, candidate: int) -> None:
        me = node.number
        saved = node.disk.hard
        if (saved.term, saved.voted_for) != (term, candidate):
            raise Violation(f"node {me} votes for {candidate} in {term}; durable is {saved}")
        before = self.votes.setdefault((me, term), candidate)
        if before != candidate:
            raise Violation(f"node {me} votes in {term} for {candidate}, it had for {before}")

    def _acknowledges(self, node: SimNode, message: PushResponse) -> None:
        disk, index = node.disk, message.index
        if index > disk.durable:
            raise Violation(f"node {node.number} acknowledges {index}; durable is {disk.durable}")
        leader = self.nodes[self.leaders[message.term]]
        if not leader.leads(message.term) or index < max(disk.begin, leader.disk.begin):
            return
        if index > leader.disk.end or leader.disk.entry(index) != disk.entry(index):
            raise Violation(
                f"node {node.number} acknowledges {index} to node {leader.number}, "
                "which has another entry there"
            )

    # ---- what a core says

    def role(self, node: SimNode) -> None:
        """Judge a node's role and term after a step."""
        state = node.core_term
        me = node.number
        if state < self.terms.get(me, 0):
            raise Violation(f"node {me}: the term falls from {self.terms[me]} to {state}")
        if state > node.disk.hard.term:
            raise Violation(f"node {me} is in {state}, durable is {node.disk.hard.term}")
        self.terms[me] = state
        if node.role is not Role.LEADER:
            return
        leader = self.leaders.get(state)
        if leader is None:
            self.leaders[state] = me
            self._leader_begins(node, state)
        elif leader != me:
            raise Violation(f"nodes {leader} and {me} lead term {state}")

    def members(self, node: SimNode) -> None:
        """Judge the member list that counts for a node: always the last one in its log."""
        if node.core.group != node.disk.group:
            raise Violation(
                f"node {node.number} counts {node.core.group}, its log {node.disk.group}"
            )

    def _leader_begins(self, node: SimNode, term: int) -> None:
        """A new leader has every entry that was committed in an earlier term.

        A majority of its members voted for it; what learners say does not count.
        """
        disk = node.disk
        if not disk.remembers:
            raise Violation(f"node {node.number} leads {term}, it was wiped")
        gave = [one for one in disk.members if self.votes.get((one, term)) == node.number]
        own = node.number in disk.members and node.number not in gave  # a group of one asks nobody
        if 2 * (len(gave) + own) <= len(disk.members):
            raise Violation(
                f"node {node.number} leads {term} by the votes of {gave} of {disk.members}"
            )
        for index in range(disk.begin, self.end + 1):
            earlier = self.committed_in[index] < term
            if earlier and (index > disk.end or disk.entry(index) != self.committed[index]):
                raise Violation(
                    f"node {node.number} leads {term} without the committed entry {index}"
                )

    def commits(self, node: SimNode, before: int, index: int) -> None:
        """Judge a node's new committed index."""
        disk, me = node.disk, node.number
        if index < before:
            raise Violation(f"node {me}: the committed index falls from {before} to {index}")
        if index > disk.end:
            raise Violation(f"node {me} commits {index} beyond its end {disk.end}")
        for at in range(max(before + 1, disk.begin), min(index, self.end) + 1):
            if disk.entry(at) != self.committed[at]:
                raise Violation(
                    f"node {me} commits {disk.entry(at)} at {at}; {self.committed[at]} was "
                    f"committed there in term {self.committed_in[at]}"
                )
        if index > self.end:
            self._first_commit(node, index)

    def _first_commit(self, node: SimNode, index: int) -> None:
        disk, me, term = node.disk, node.number, node.core_term
        if self.leaders.get(term) != me:
            raise Violation(f"node {me} commits {index} first and does not lead {term}")
        entry = disk.entry(index)
        if entry[0] != term:
            raise Violation(
                f"node {me}, leader of {term}, commits entry {index} of term {entry[0]} by counting"
            )
        members = disk.members
        have = [n for n in members if self.nodes[n].has_or_had(index, entry)]
        if 2 * len(have) <= len(members):
            raise Violation(f"node {me} commits {index}: it is durable on {have} of {members}")
        for at in range(self.end + 1, index + 1):
            self.committed.append(disk.entry(at))
            self.committed_in.append(term)
            self.committed_ms.append(node.world.now)

    # ---- member lists

    def own_entry(self, node: SimNode, group: MemberSet | None) -> None:
        """Judge an entry that a leader itself is about to append."""
        disk, me = node.disk, node.number
        if self.leaders.get(node.core_term) not in (None, me):
            raise Violation(f"node {me} appends as leader of {node.core_term}")
        if group is None:
            return
        now = disk.group
        if len(set(now.members) ^ set(group.members)) > 1:
            raise Violation(f"node {me} changes {now} to {group} at once")
        for new in set(group.members) - set(now.members):
            if new not in now.learners:
                raise Violation(f"node {me} makes node {new} a member, it was no learner")
            self._promotes(node, self.nodes[new])
        for index in range(max(self.end + 1, disk.begin), disk.end + 1):
            if isinstance(disk.entry(index)[1], MemberSet):
                raise Violation(f"node {me} changes members, the change at {index} is not over")
        if not any(term == node.core_term for term in self.committed_in):
            raise Violation(
                f"node {me} changes members before it has committed in {node.core_term}"
            )

    def _promotes(self, leader: SimNode, learner: SimNode) -> None:
        """A learner that becomes a member has all that was committed three timeouts ago.

        The leader's last two rounds with it, by the leader's clock, took a timeout at most.
        """
        since_ms = leader.world.now - 3.0 * leader.world.plan.settings.election_timeout_ms
        index = bisect.bisect_right(self.committed_ms, since_ms) - 1
        if index >= 0 and not learner.has_or_had(index, self.committed[index]):
            raise Violation(
                f"node {leader.number} makes node {learner.number} a member, which lacks {index}"
            )

    # ---- what clients are told

    def put_ended(self, put: Put, outcome: str, index: int, now_ms: float) -> None:
        """Judge the end of a put."""
        if put.outcome:
            raise Violation(f"put {put.token} ends twice: {put.outcome}, {outcome}")
        put.outcome, put.ended_ms = outcome, now_ms
        if outcome == "REFUSED":
            self.refused.add(put.token)
        if outcome != "COMMITTED":
            return
        if index != put.last:
            raise Violation(f"put {put.token} at {put.last} is acknowledged at {index}")
        if index > self.end or any(
            self.committed[at] != (put.term, put.token) for at in range(put.first, put.last + 1)
        ):
            raise Violation(f"put {put.token} is acknowledged and was never committed at {index}")
        if put.first <= put.acked_before:
            raise Violation(
                f"put {put.token} at {put.first} began when {put.acked_before} was acknowledged"
            )
        self.acked = max(self.acked, index)

    def read_ended(self, read: Read, outcome: str, index: int) -> None:
        """Judge the end of a linearizable read."""
        if read.outcome:
            raise Violation(f"read {read.token} ends twice")
        read.outcome, read.index = outcome, index
        if outcome != "COMMITTED":
            return
        if not read.floor <= index <= self.end:
            raise Violation(
                f"a read on node {read.node} returns {index}; before it began {read.floor} was "
                f"acknowledged, and {self.end} is committed"
            )
        self.read_up_to = max(self.read_up_to, index)

    def check_end(self) -> None:
        """Judge the whole history with the check that judges those of real processes."""
        records: list[Found] = []
        epochs: list[tuple[int, int, int]] = []
        offsets: list[int] = []
        bodies: list[bytes] = []
        offset = 0
        for index, entry in enumerate(self.committed):
            term, value = entry
            if not epochs or epochs[-1][0] != term:
                epochs.append((term, offset, self.leaders[term]))
            body = b""
            if isinstance(value, int) and value:
                body = b"%d.%d" % (value, index - self.puts[value].first)
                size, queue_offset = size_of(entry), len(records)
                port = self.leaders[term]
                records.append(Found(offset, size, "T", 0, queue_offset, port, 0, body, {}))
            offsets.append(offset)
            bodies.append(body)
            offset += size_of(entry)
        ranks = list(itertools.accumulate(map(bool, bodies), initial=0))
        events = [one for put in self.puts.values() for one in _history(put, offsets, ranks)]
        for number, read in enumerate(self.reads.values()):
            if read.index >= 0 and bodies[read.index]:
                at = read.index
                seen = e.Seen(ranks[at], offsets[at], _digest(bodies[at]))
                # It began after what it returns, and the world knows no end of it.
                late = int(max(put.ended_ms for put in self.puts.values()) * 1e6)
                events.append(e.Read(f"read {number}", late, late, "T", 0, [seen]))
        wrong = history.check(events, records, epochs=epochs)
        if wrong:
            raise Violation("; ".join(wrong[:5]))


def _digest(body: bytes) -> str:
    return e.digest_of("T", None, body)


def _history(put: Put, offsets: list[int], ranks: list[int]) -> Iterator[e.Event]:
    """Yield a put's entries as sends of the history check; `ranks`: their queue offsets."""
    began = int(put.began_ms * 1e6)
    ended = max(began, int(put.ended_ms * 1e6))  # it may have no end
    for place in range(put.last - put.first + 1):
        index, client = put.first + place, f"put {put.token}"
        yield e.Send(client, place, began, "T", _digest(b"%d.%d" % (put.token, place)))
        if put.outcome == "COMMITTED":
            level, offset = "QUORUM_DISK", offsets[index]
            yield e.Ok(client, place, ended, level, offset, 0, ranks[index], put.term)
        elif put.outcome == "REFUSED":
            yield e.Fail(client, place, ended)
        else:
            yield e.Info(client, place, ended, "OutcomeUnknown")
