"""Learners: when the leader makes a learner a member, and removes the member that it replaces.

A learner gets the log like a follower. Its progress is measured in rounds: a round ends when the
learner has durably all that the leader had when the round began. A learner *keeps up* if its last
round took at most an election timeout, and the present one has not taken longer. How much it lacked
at first does not matter, nor how fast the log grows, as long as the learner is faster.

The leader makes a learner that keeps up a member, if the members that answer are a majority even of
the new list without it: then the group goes on if the new member fails at once. In a group of one
both must answer. So while a member of three is down, a learner waits; remove the member, or start
it.

A learner that replaces a member, `leaving`, takes two steps, each a list that differs by one node.
Mostly it becomes a member first, and then the other is removed. If that is refused because the one
that leaves does not answer, it is removed first: a majority of the rest works without it anyway,
and more nodes are never needed than before. The intent is in the member list, so a later leader
goes on with it, and measures the rounds anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hastore.dledger.core.dispatcher import EntryDispatcher
from hastore.dledger.core.events import Settings, listed
from hastore.dledger.core.member_state import Membership, MemberState
from hastore.protocol.dledger import MemberSet


@dataclass(slots=True)
class Round:
    """A round of a learner: `target` is the leader's end when it began."""

    target: int
    began_ms: float
    keeps_up: bool = False  # what the last round has shown


class Learners:
    """The learners of a leader."""

    def __init__(self, state: MemberState, settings: Settings, membership: Membership) -> None:
        self._state = state
        self._timeout_ms = settings.election_timeout_ms
        self._membership = membership
        self._rounds: dict[int, Round] = {}

    def stop(self) -> None:
        """Forget the rounds: another term, and a node that is added again, are measured anew."""
        self._rounds = {}

    def note(self, followers: Mapping[int, EntryDispatcher], now_ms: float) -> None:
        """End the rounds that are over, and begin the next."""
        state = self._state
        rounds = {one: self._rounds.get(one) for one in state.learners}
        self._rounds = {
            one: known or Round(state.ledger_end_index, now_ms) for one, known in rounds.items()
        }
        for one, current in self._rounds.items():
            follower = followers[one]
            quick = now_ms - current.began_ms <= self._timeout_ms
            if follower.match_index >= current.target and follower.is_sending():
                self._rounds[one] = Round(state.ledger_end_index, now_ms, quick)
            elif not quick:
                current.keeps_up = False

    def answering(self, followers: Mapping[int, EntryDispatcher], now_ms: float) -> set[int]:
        """Return the nodes that answer and take entries, with this one if its disk does not hang.

        Not those that have lost their disk. One whose disk is full or hangs commits nothing.
        """
        works = {
            one
            for one, follower in followers.items()
            if follower.answered and follower.recall_index is None and self._works(follower, now_ms)
        }
        own = set() if self._state.hangs else {self._state.node}
        return works - self._state.down | own

    def next_list(
        self, followers: Mapping[int, EntryDispatcher], now_ms: float
    ) -> MemberSet | None:
        """Return the list that the leader appends by itself now; None: there is nothing to do."""
        group = self._state.group
        if not (group.learners or group.leaving) or self._membership.busy() is not None:
            return None
        answering = self.answering(followers, now_ms)
        if not group.learners:
            return self._without(group.leaving[0], answering)
        for learner in group.learners:
            if self._lacks(learner, followers[learner], now_ms) is not None:
                continue
            if not self._missing(answering):
                others = tuple(one for one in group.learners if one != learner)
                members = tuple(sorted((*group.members, learner)))
                return group._replace(members=members, learners=others)
            for gone in group.leaving:
                if gone in followers and not self._works(followers[gone], now_ms):
                    return self._without(gone, answering)
        return None

    def _works(self, follower: EntryDispatcher, now_ms: float) -> bool:
        """Whether a node was heard within the timeout, and its disk takes entries."""
        return now_ms - follower.heard_ms < self._timeout_ms and follower.takes(now_ms)

    def _without(self, gone: int, answering: set[int]) -> MemberSet | None:
        """Return the list without the member that leaves, if a majority of it works."""
        group = self._state.group
        members = tuple(one for one in group.members if one != gone)
        if 2 * len(answering.intersection(members)) <= len(members):
            return None
        return MemberSet(members, group.learners)

    def _missing(self, answering: set[int]) -> set[int]:
        """Return the members that do not answer, if too few do for one member more."""
        members = set(self._state.members)
        needed = (len(members) + 1) // 2 + 1
        if len(members) == 1 or len(answering & members) >= needed:
            return set()
        return members - answering

    def waits(
        self, learner: int, followers: Mapping[int, EntryDispatcher], now_ms: float
    ) -> str | None:
        """Return why a learner is not made a member now; None: it is."""
        lacks = self._lacks(learner, followers[learner], now_ms)
        missing = self._missing(self.answering(followers, now_ms))
        if lacks is None and missing and missing.isdisjoint(self._state.group.leaving):
            return (
                f"it keeps up; too few members work for one more: start, mend or remove node "
                f"{listed(missing)}"
            )
        return lacks or self._membership.busy()

    def _lacks(self, learner: int, follower: EntryDispatcher, now_ms: float) -> str | None:
        """Return why a learner does not keep up; None: it does."""
        state, current = self._state, self._rounds.get(learner)
        if learner in state.down:
            return "there is no link to it: start it"
        if now_ms - follower.heard_ms >= self._timeout_ms and follower.recall_index is None:
            return "it does not answer"
        if follower.full:
            return "its disk is full"
        if follower.recall_index is not None:
            return "it has lost its disk and is still catching up"
        if not follower.is_sending():
            return "its log is compared with this one"
        if current is None or not current.keeps_up:
            return f"it lacks {state.ledger_end_index - follower.match_index} entries"
        return None
