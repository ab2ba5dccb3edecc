"""What must hold in a group of mode dledger in every state: the part that no single node can show.

The observer's knowledge is a value, a part of the explored state: what was ever committed and in
which term, who led each term, and what clients were told.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hastore.protocol.dledger import MemberSet
from tests.dledger.oracle import Violation
from tests.dledger.sim_disk import Entry
from tests.explore.dledger_steps import View
from tests.explore.local_states import Node, Renaming, renamed


class Known(NamedTuple):
    """What the observer has seen."""

    committed: tuple[tuple[Entry, int], ...] = ()  # and the term of the leader that committed it
    leaders: tuple[tuple[int, Node], ...] = ()  # (term, who led it)
    told: int = -1  # the greatest index that a client was told: acknowledged, or read

    @property
    def end(self) -> int:
        """The greatest index that was ever committed."""
        return len(self.committed) - 1

    def renamed(self, renaming: Renaming) -> Known:
        """Return the same with other numbers for the nodes."""
        return Known(*renamed(tuple(self), renaming))


def judge(known: Known, notes: tuple[Any, ...], own: View, views: dict[int, View],
          first_members: tuple[Node, ...]) -> Known:  # fmt: skip
    """Judge what a node's step has done; return what the observer knows then.

    `own` is the node after its step, `views` all nodes. Raises Violation.
    """
    for kind, *what in notes:
        if kind == "leads":
            known = _leads(known, own, *what)
        elif kind == "commit":
            known = _commits(known, own, views, *what)
        elif kind == "settled":
            known = _settled(known, own, *what)
        elif kind == "cut":
            index, entries = what
            if index <= known.end and entries[0] == known.committed[index][0]:
                raise Violation(f"node {own.node} cuts the committed entry {index}")
        elif kind == "install":
            _installs(known, own, first_members, *what)
        elif kind == "recall":
            _recalls(known, own, *what)
        elif kind == "change":
            _changes(known, own, *what)
    return known


def _leads(known: Known, own: View, term: int, node: Node) -> Known:
    """One leader a term, and it has every entry that was committed in an earlier one."""
    for other_term, leader in known.leaders:
        if other_term == term and leader != node:
            raise Violation(f"nodes {leader} and {node} lead term {term}")
    for index in range(own.begin, len(known.committed)):
        entry, committed_in = known.committed[index]
        if committed_in < term and own.entry(index) != entry:
            raise Violation(f"node {node} leads {term} without the committed entry {index}")
    if (term, node) in known.leaders:
        return known
    return known._replace(leaders=tuple(sorted((*known.leaders, (term, node)))))


def _commits(
    known: Known, own: View, views: dict[int, View],
    first: int, entries: tuple[Entry, ...], term: int, leader: Node | None,
    members: tuple[Node, ...],
) -> Known:  # fmt: skip
    node = own.node
    for index, entry in enumerate(entries, first):
        if index <= known.end and entry != known.committed[index][0]:
            other, committed_in = known.committed[index]
            raise Violation(
                f"node {node} commits {entry} at {index}; {other} was committed there in term "
                f"{committed_in}"
            )
    last = first + len(entries) - 1
    if last <= known.end:
        return known
    if leader is None or dict(known.leaders).get(term) != leader:
        raise Violation(f"node {node} commits {last} first and does not lead {term}")
    if entries[-1][0] != term:
        raise Violation(
            f"node {node}, leader of {term}, commits entry {last} of term {entries[-1][0]} by "
            "counting"
        )
    have = [n for n in members if views[n].has_or_had(last, entries[-1])]
    if 2 * len(have) <= len(members):
        raise Violation(f"node {node} commits {last}: it is durable on {have} of {members}")
    if first > known.end + 1:
        raise Violation(f"node {node} commits {first}, and nobody {known.end + 1}")
    new = tuple((entry, term) for entry in entries[known.end + 1 - first :])
    return known._replace(committed=known.committed + new)


def _settled(
    known: Known, own: View, token: str, outcome: str, index: int, place: int, term: int
) -> Known:
    what = token.partition(" ")[0]
    if what == "put":
        if outcome == "REFUSED":
            raise Violation(f"node {own.node} refuses {token}, which is in its log")
        if outcome != "COMMITTED":
            return known
        value = int(token.partition(" ")[2])
        if index != place or index > known.end or known.committed[index][0] != (term, value):
            raise Violation(f"{token} at {place} is acknowledged and was never committed")
        return known._replace(told=max(known.told, index))
    if what == "read" and outcome == "COMMITTED":
        if not place <= index <= known.end:
            raise Violation(
                f"a read on node {own.node} returns {index}; before it began {place} was "
                f"acknowledged, and {known.end} is committed"
            )
        return known._replace(told=max(known.told, index))
    return known


def _installs(known: Known, own: View, first_members: tuple[Node, ...], index: int,
              group: MemberSet, held: Entry | None) -> None:  # fmt: skip
    if index - 1 > known.end:
        raise Violation(f"node {own.node} begins at {index}, above what is committed")
    lists = [v for (_, v), _ in known.committed[:index] if isinstance(v, MemberSet)]
    if group != (lists[-1] if lists else MemberSet(first_members)):
        raise Violation(f"node {own.node} installs {group} at {index}")
    if held is not None and index <= known.end and held == known.committed[index][0]:
        raise Violation(f"node {own.node} sets the committed entry {index} aside")


def _recalls(
    known: Known, own: View, begin: int, entries: tuple[Entry, ...], durable: int,
    lost_begin: int, lost_entries: tuple[Entry, ...], lost_durable: int,
) -> None:  # fmt: skip
    """What the node may have acknowledged is here again when its quarantine ends."""
    for index in range(begin, min(lost_durable, known.end) + 1):
        entry = known.committed[index][0]
        had = index < lost_begin or lost_entries[index - lost_begin] == entry
        if had and (index > durable or entries[index - begin] != entry):
            raise Violation(f"node {own.node} ends its quarantine without entry {index}")


def _changes(known: Known, own: View, lists: tuple[int, ...], term: int) -> None:
    for index in lists:
        if index > known.end:
            raise Violation(f"node {own.node} changes members, the change at {index} is not over")
    if not any(committed_in == term for _, committed_in in known.committed):
        raise Violation(f"node {own.node} changes members before it has committed in {term}")


def logs_agree(one: View, other: View) -> bool:
    """Entries of one index and term are equal, and so is all before them."""
    equal = True
    low = max(one.begin, other.begin)
    for index in range(low, min(one.end, other.end) + 1):
        mine, its = one.entry(index), other.entry(index)
        assert mine is not None and its is not None
        if mine[0] == its[0] and (mine != its or not equal):
            return False
        equal = equal and mine == its
    return True
