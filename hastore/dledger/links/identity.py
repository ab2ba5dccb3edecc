"""Whom a node takes for a member of its group: by stores, first members and the group's id. Pure.

A vote or an acknowledgement that a node has forgotten may cost acknowledged entries. So a number
has one store at a time, and a store that was replaced never comes back:

- `known` is the store of each number, `replaced` are the stores that it had before. Both are in
  node.json, and in each HELLO: what one member knows, all learn that it is linked with.
- A node with another store than the known one is taken only if it says that its disk was lost, or
  names the known store as one that it has replaced.
- A replaced store is refused for ever, whatever it says. Of each number the last REPLACED_MAX are
  kept: an older one would have to come from before as many lost disks.

Two nodes that count majorities of other first members may elect two leaders. So nodes with empty
logs compare their lists, and do not begin unless all nodes of the list agree: one that is silent
may be the only member of a group that has begun, and no majority of the list need know of that.
Once a group has begun it has an id: a random one, which its leader puts into the first entry of
each term. A node keeps the id that it knows to be committed, or that it was told while its log was
empty, and a node of another group is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

REPLACED_MAX = 8
OTHER_GROUP = "belongs to another group"  # part of an answer
OTHER_FIRST_MEMBERS = "the group would have two majorities"  # part of an answer
Replaced = Mapping[int, tuple[str, ...]]


def replaced_problem(node: int) -> str:
    """Return the text about a store that must not come back."""
    return (
        f"this store of node {node} was replaced by another one, and has forgotten votes and"
        " acknowledgements since: stop the node, move the store away, and start it with the present"
        " store, or with an empty one"
    )


@dataclass(frozen=True, slots=True)
class Stores:
    """What a node knows of the stores of a group."""

    known: Mapping[int, str] = field(default_factory=dict)
    replaced: Replaced = field(default_factory=dict)

    def problem(
        self, node: int, store_id: str, *, lost: bool, replaces: tuple[str, ...] = ()
    ) -> str | None:
        """Return why a node with this store is not taken; None: it is.

        `lost`: it says that its disk was lost; `replaces` are the stores that it names as its own
        former ones.
        """
        if store_id in self.replaced.get(node, ()):
            return replaced_problem(node)
        known = self.known.get(node)
        if known in (None, store_id) or lost or known in replaces:
            return None
        return (
            f"node number {node} is known with another store; a node whose disk was lost comes"
            " back with an empty store, and one that was copied or moved with its own"
        )

    def with_store(self, node: int, store_id: str, replaces: tuple[str, ...] = ()) -> "Stores":
        """Return what is known once a node with this store was taken."""
        known = self.known.get(node)
        gone = replaces if known in (None, store_id) else (*replaces, str(known))
        return Stores({**self.known, node: store_id}, self._with_replaced(node, gone, store_id))

    def told(self, other: "Stores", own: int) -> "Stores":
        """Return what is known once another member has said what it knows; `own` is this node."""
        now = self
        for node, gone in other.replaced.items():
            if node == own:
                continue
            known = now.known.get(node)
            stores = dict(now.known)
            if known in gone:  # the other member knows a later one, perhaps
                stores.pop(node)
                later = other.known.get(node)
                if later is not None and later not in (*gone, *now.replaced.get(node, ())):
                    stores[node] = later
            now = Stores(stores, now._with_replaced(node, gone, stores.get(node)))
        return now

    def _with_replaced(self, node: int, gone: tuple[str, ...], present: str | None) -> Replaced:
        before = self.replaced.get(node, ())
        after = (*before, *(one for one in dict.fromkeys(gone) if one not in before))
        after = tuple(one for one in after if one != present)[-REPLACED_MAX:]
        return {**self.replaced, node: after} if after != before else self.replaced


def answers_needed(nodes: int) -> int:
    """Return how many other nodes must answer a new one in a group of so many that has begun.

    Every majority with the new node then has one of them.
    """
    quorum = nodes // 2 + 1
    return min(nodes - 1, nodes - quorum + 1)


@dataclass(frozen=True, slots=True)
class Group:
    """What a node knows of its group: its id, and the first members while its log is empty."""

    id: str = ""
    first_members: tuple[int, ...] = ()

    def problem(self, node: int, other: "Group", own: int) -> str | None:
        """Return why a node of `other` is not of the group of node `own`; None: it may be."""
        if self.id and other.id:
            if self.id == other.id:
                return None
            return (
                f"node {node} belongs to another group: the id of its group is {other.id}, that of"
                f" node {own} is {self.id}; if it shall join the other's group, move its store away"
                " and start it with an empty one; else correct `nodes`, or give each group its own"
                " `group`"
            )
        mine, theirs = self.first_members, other.first_members
        if self.id or other.id or not mine or not theirs or mine == theirs:
            return None
        return (
            f"the first members of node {node} are {_listed(theirs)}, those of node {own} are"
            f" {_listed(mine)}: {OTHER_FIRST_MEMBERS}; unless this ends by itself, list the same"
            " `nodes` in the file of every node, move the stores of those with a wrong list away,"
            " and start them again"
        )


def _listed(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes))
