"""Read what the nodes of a group state in ZooKeeper."""

import logging
from collections.abc import Callable, Iterable

from hastore.addresses import node_number
from hastore.errors import RegistryError
from hastore.registry.entry import NodeEntry, parse_entry
from hastore.registry.session import Session, Stopped, Unreachable

log = logging.getLogger(__name__)


def node_numbers(session: Session, group: str) -> list[int]:
    """Return the numbers of the nodes that have a znode under the path `group`, sorted."""
    names = map(node_number, session.children(group))
    return sorted(number for number in names if number is not None)


def read_entries(
    session: Session, group: str, numbers: Iterable[int], refused: Callable[[str], None]
) -> dict[int, NodeEntry]:
    """Return the objects of these nodes; left out are those that are missing or not valid, and
    those that ZooKeeper does not let this session read: `refused` is told why.
    """
    entries = {}
    for number in numbers:
        path = f"{group}/{number}"
        try:
            found = session.get(path)
        except (Unreachable, Stopped):
            raise
        except RegistryError as not_ours:
            refused(str(not_ours))
            continue
        if found is None:
            continue
        try:
            entries[number] = parse_entry(found.data, path)
        except RegistryError as wrong:  # that node itself reports it
            log.debug("%s", wrong)
    return entries
