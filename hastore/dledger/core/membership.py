"""Changes of the member list, one node at a time.

A list counts from its append on, on every node, committed or not. Two majorities of lists that
differ by one node share a node, so two leaders cannot be elected by them. Therefore the next change
waits until the last one is committed, and the first waits until an entry of the leader's own term
is committed. A leader that the new list leaves out goes on until the list is committed.
"""

from dataclasses import dataclass

from hastore.dledger.core.events import Settled, Update
from hastore.dledger.core.member_state import MemberState


@dataclass(slots=True)
class PendingChange:
    """A member list that is appended and not yet committed, and who waits for it."""

    index: int
    token: object | None


class Membership:
    """The change of members that is under way on a leader."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self.pending: PendingChange | None = None

    def refusal(self, members: tuple[int, ...]) -> str | None:
        """Return why the leader cannot change the members to this list now; None: it can."""
        state = self._state
        lists = state.member_lists
        if state.log.term_at(state.committed_index) != state.term:
            return "the leader has committed nothing in its term yet; try again"
        if lists and lists[-1].index > state.committed_index:
            return "the last change of the members is not committed yet; try again"
        changed = set(members) ^ set(state.members)
        if len(changed) != 1 or len(set(members)) != len(members):
            names = ", ".join(str(one) for one in state.members)
            return f"members change one node at a time; now they are {names}"
        if not members or min(members) < 0:
            return "a group needs at least one node, and node numbers are not negative"
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
