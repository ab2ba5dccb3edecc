"""The groups of a cluster in ZooKeeper, as a client follows them: addresses, and which topics.

One thread with one session for each watch. Without ZooKeeper all that is known stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import NamedTuple

from hastore.addresses import ROOT, SCHEME, ClusterAddress, node_number
from hastore.clock import Clock
from hastore.config.model import Role
from hastore.registry.cluster_notes import MAX_GROUPS, MAX_NOTE_BYTES, PREFIX
from hastore.registry.entry import siblings_of
from hastore.registry.group_watch import MAX_NODES, node_numbers, read_entries
from hastore.registry.session import Session, SessionService
from hastore.security.tls_contexts import TlsContexts
from hastore.service import raise_failure

log = logging.getLogger(__name__)

ALL_MS = 60_000.0  # so often everything is read again, should a watch have been lost


class GroupSeen(NamedTuple):
    """A group: the api addresses of its nodes, masters first, and the notes of its masters."""

    addresses: tuple[str, ...]
    notes: tuple[bytes, ...]


class ClusterWatch(SessionService):
    """Follow the groups of a cluster; `groups` is replaced as a whole."""

    def __init__(self, cluster: ClusterAddress, tls: TlsContexts | None, clock: Clock) -> None:
        super().__init__("ClusterWatch", on_failure=raise_failure)
        self.groups: Mapping[str, GroupSeen] = {}
        self.problem: str | None = f"{SCHEME}{cluster.servers} has not answered yet"
        self.heard = threading.Event()  # ZooKeeper has been read, or is out of reach
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
        groups = dict(self._found)
        if everything or self._path in fired:
            names = sorted(session.children(self._path))[:MAX_GROUPS]
            groups = {name: groups.get(name, GroupSeen((), ())) for name in names}
        for name, known in groups.items():
            path = f"{self._path}/{name}"
            within = any(one == path or one.startswith(f"{path}/") for one in fired)
            if everything or within or not known.addresses:
                groups[name] = self._read_group(session, name, path) or known
        self._found = groups
        self.groups = {name: one for name, one in groups.items() if one.addresses}
        self.problem = None
        if not self.groups:
            self.problem = (
                f"{self._path} has no groups in ZooKeeper {self._cluster.servers}; check the name "
                "of the cluster, and that the nodes have the key `registry`"
            )
        self.heard.set()

    def _read_group(self, session: Session, name: str, path: str) -> GroupSeen | None:
        numbers = node_numbers(session, path)[:MAX_NODES]
        entries = read_entries(session, path, numbers, lambda _why: None)
        own = siblings_of(entries, self._cluster.cluster, name)
        order = sorted(own, key=lambda number: (entries[number].role is Role.SLAVE, number))
        addresses = tuple(dict.fromkeys(own[number].api for number in order))
        notes = []
        for child in sorted(session.children(path)):
            if child.startswith(PREFIX) and node_number(child.removeprefix(PREFIX)):
                found = session.get(f"{path}/{child}")
                if found is not None and len(found.data) <= MAX_NOTE_BYTES:
                    notes.append(found.data)
        return GroupSeen(addresses, tuple(notes)) if addresses else None
