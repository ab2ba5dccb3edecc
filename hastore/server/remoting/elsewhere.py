"""The other groups of the cluster: their brokers and topics, as their masters state them.

With `registry` each master writes a note into ZooKeeper, and each node reads those of all other
groups. So every node answers for the routes of its whole cluster, as a name server does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hastore.errors import ProtocolError
from hastore.protocol.group_note import GroupRoutes, decode_note

log = logging.getLogger(__name__)


class OtherGroup:
    """A group of the cluster, with its topics by name."""

    __slots__ = ("brokers", "group", "topics")

    def __init__(self, routes: GroupRoutes) -> None:
        self.group = routes.group
        self.brokers = routes.brokers
        self.topics = {one.name: one for one in routes.topics}


class Elsewhere:
    """The other groups, as they were read last; `take` replaces them as a whole."""

    def __init__(self) -> None:
        self.groups: tuple[OtherGroup, ...] = ()
        # By the group and the note, since a note may have been copied: those that stay are reused.
        self._known: dict[tuple[str, bytes], tuple[int, OtherGroup] | None] = {}

    def take(self, notes: Mapping[tuple[str, int], bytes]) -> None:
        """Take over the notes, by group and node; one that cannot be read is left out."""
        known: dict[tuple[str, bytes], tuple[int, OtherGroup] | None] = {}
        best: dict[str, tuple[int, OtherGroup]] = {}
        for (group, node), note in sorted(notes.items()):
            key = group, note
            if key not in known:
                known[key] = self._known[key] if key in self._known else _read(group, node, note)
            found = known[key]
            if found is not None and (group not in best or found[0] > best[group][0]):
                best[group] = found
        self._known = known
        self.groups = tuple(found for _, found in best.values())


def _read(group: str, node: int, note: bytes) -> tuple[int, OtherGroup] | None:
    """Return a note's epoch and what it says; None if that is not used."""
    try:
        routes = decode_note(note)
    except ProtocolError as wrong:
        log.warning("the routes of group %s, by its node %d, are not used: %s", group, node, wrong)
        return None
    if routes.group != group:
        text = "the routes of group %s, by its node %d, are not used: they are those of %r"
        log.warning(text, group, node, routes.group)
        return None
    return routes.epoch, OtherGroup(routes)
