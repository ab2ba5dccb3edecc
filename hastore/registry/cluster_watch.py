"""The groups of a cluster in ZooKeeper, as a client follows them: addresses, and which topics.

One thread with one session for each watch. Without ZooKeeper all that is known stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import NamedTuple

from hastore.addresses import ROOT, SCHEME, ClusterAddress
from hastore.clock import Clock
from hastore.errors import RegistryError
from hastore.registry.cluster_notes import (
    ALL_MS,
    MAX_GROUPS,
    MAX_NOTE_BYTES,
    PREFIX,
    noted_nodes,
)
from hastore.registry.group_watch import MAX_NODES, addresses_of, numbers_in, read_entries
from hastore.registry.session import Session, SessionService, Stopped, Unreachable
from hastore.security.tls_contexts import TlsContexts
from hastore.service import raise_failure

log = logging.getLogger(__name__)


class GroupSeen(NamedTuple):
    """A group: the api addresses of its nodes, masters first, and the notes of its masters.

    A note goes with its master, and the next master's comes later: `stated` keeps the last ones.
    """

    addresses: tuple[str, ...]
    notes: tuple[bytes, ...]
    stated: tuple[bytes, ...] = ()


class ClusterWatch(SessionService):
    """Follow the groups of a cluster; `groups` is replaced as a whole."""

    def __init__(self, cluster: ClusterAddress, tls: TlsContexts | None, clock: Clock) -> None:
        super().__init__("ClusterWatch", on_failure=raise_failure)
        self.groups: Mapping[str, GroupSeen] = {}
        # Why groups that are there are not in `groups`: no node was there or readable, ever.
        self.unread: Mapping[str, str] = {}
        self.problem: str | None = f"{SCHEME}{cluster.servers} has not answered yet"
        self.heard = threading.Event()  # ZooKeeper has been read, or is out of reach
        self.was_read = threading.Event()
        # Also those without addresses: a new group is there before its first node is.
        self._found: dict[str, GroupSeen] = {}
        self._cluster = cluster
        self._path = f"{ROOT}/{cluster.cluster}"
        self._tls = tls
        self._clock = clock
        self._next_all_ms = float("-inf")

    def wake(self) -> None:
        """End the thread's wait."""
        self.changed.set()

    def connect(self) -> Session:
        """Return a new session, which only reads."""
        return Session(
            self._cluster.servers, None, self._clock,
            tls=self._tls, stopping=self.stopping, on_event=self.changed.set,
        )  # fmt: skip

    def begin(self, session: Session) -> None:
        """Nothing is watched in a new session."""
        self._next_all_ms = float("-inf")

    def note_lost(self, problem: str) -> None:
        """Note why nothing new is known."""
        if problem != self.problem:
            log.info("client: %s: %s", self._cluster, problem)
        self.problem = problem
        self.heard.set()

    def read(self, session: Session) -> None:
        """Read the groups that have changed."""
        now = self._clock.monotonic_ms()
        fired, everything = session.take_fired(), now >= self._next_all_ms
        if everything:
            self._next_all_ms = now + ALL_MS
        refused, unread, groups = None, {}, dict(self._found)
        if everything or self._path in fired:
            names = sorted(session.children(self._path))[:MAX_GROUPS]
            groups = {name: groups.get(name, GroupSeen((), ())) for name in names}
        for name, known in groups.items():
            path = f"{self._path}/{name}"
            within = any(one == path or one.startswith(f"{path}/") for one in fired)
            if everything or within or not known.addresses:
                try:
                    found = self._read_group(session, name, path) or known
                    groups[name] = found._replace(stated=found.notes or known.stated)
                    if not found.addresses:
                        unread[name] = (
                            f"{path} has no objects of nodes: start a node of the group, or delete "
                            "that znode if the group is gone"
                        )
                except (Unreachable, Stopped):
                    raise
                except RegistryError as failure:  # the others are followed all the same
                    refused = str(failure)
                    if not known.addresses:
                        unread[name] = refused
        self._found = groups
        self.groups = {name: one for name, one in groups.items() if one.addresses}
        self.unread = unread  # after the groups: one that can be read now is in one of both
        self.problem = refused
        if not self.groups and refused is None:
            self.problem = (
                f"{self._path} has no groups in ZooKeeper {self._cluster.servers}; check the name "
                "of the cluster, and that the nodes have the key `registry`"
            )
        self.heard.set()
        self.was_read.set()

    def _read_group(self, session: Session, name: str, path: str) -> GroupSeen | None:
        """Return a group; None without nodes. Raises RegistryError if none of them can be read."""
        children, whys = session.children(path), list[str]()
        numbers = numbers_in(children)[:MAX_NODES]
        entries = read_entries(session, path, numbers, whys.append)
        addresses = addresses_of(entries, self._cluster.cluster, name)
        if numbers and not addresses:
            why = whys[0] if whys else "correct the objects of its nodes, or delete them"
            raise RegistryError(f"no object of a node in {path} can be read: {why}")
        notes = []
        for node in sorted(noted_nodes(children)):
            found = session.get(f"{path}/{PREFIX}{node}")
            if found is not None and len(found.data) <= MAX_NOTE_BYTES:
                notes.append(found.data)
        return GroupSeen(addresses, tuple(notes)) if addresses else None
