"""Whom a node takes for a member of its group: by the store that belongs to each number. Pure.

A vote or an acknowledgement that a node has forgotten may cost acknowledged entries. So a number
has one store at a time, and a store that was replaced never comes back:

- `known` is the store of each number, `replaced` are the stores that it had before. Both are in
  node.json, and in each HELLO: what one member knows, all learn that it is linked with.
- A node with another store than the known one is taken only if it says that its disk was lost, or
  names the known store as one that it has replaced.
- A replaced store is refused for ever, whatever it says. Of each number the last REPLACED_MAX are
  kept: an older one would have to come from before as many lost disks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

REPLACED_MAX = 8
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
