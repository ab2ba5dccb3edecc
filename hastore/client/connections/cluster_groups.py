"""The groups of a cluster as a client knows them by ZooKeeper: where they are, which topics.

Who is master of a group, its nodes themselves say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hastore.addresses import KAZOO_MISSING, ClusterAddress
from hastore.client.security import Security
from hastore.clock import Clock
from hastore.errors import ProtocolError, UsageError
from hastore.protocol.group_note import decode_note

if TYPE_CHECKING:  # it needs kazoo
    from hastore.registry.cluster_watch import GroupSeen

log = logging.getLogger(__name__)

WRITE = 2  # a bit of a topic's permission


class GroupNodes:
    """The nodes of one group of a cluster, as the cluster's groups are known now."""

    def __init__(
        self, groups: ClusterGroups, cluster: str, group: str, addresses: tuple[str, ...]
    ) -> None:
        """`addresses` are the known ones, which stay if the group goes from ZooKeeper."""
        self.names = (cluster, group)
        self._groups = groups
        self._last = addresses

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the client API; the same object as long as nothing is new."""
        seen = self._groups.groups.get(self.names[1])
        if seen is not None:
            self._last = seen.addresses
        return self._last


class ClusterGroups:
    """Follow a cluster's groups, in a thread of its own; safe to share between threads."""

    def __init__(self, cluster: ClusterAddress, security: Security | None, clock: Clock) -> None:
        """Prepare. Raises UsageError without kazoo, ConfigError for the files of TLS."""
        try:
            from hastore.registry.cluster_watch import ClusterWatch
            from hastore.registry.session import registry_contexts
        except ImportError as missing:
            raise UsageError(KAZOO_MISSING) from missing
        tls = None
        if security is not None:
            tls = registry_contexts(
                security.registry_ca, security.registry_certificate, security.registry_key
            )
        self._watch = ClusterWatch(cluster, tls, clock)
        self._lock = threading.Lock()
        self._topics: dict[bytes, dict[str, int]] = {}  # by note: the permissions of its topics

    def start(self) -> None:
        """Begin to follow."""
        self._watch.start()

    def stop(self, timeout_s: float) -> None:
        """End."""
        self._watch.stop(timeout_s)

    def wait_heard(self, timeout_s: float) -> None:
        """Wait until ZooKeeper has answered once, or is out of reach."""
        self._watch.heard.wait(timeout_s)

    def wait_read(self, timeout_s: float) -> None:
        """Wait until ZooKeeper has answered once, also while it is out of reach."""
        self._watch.was_read.wait(timeout_s)

    @property
    def problem(self) -> str | None:
        """Why no group is known, or why those known may not be up to date."""
        return self._watch.problem

    @property
    def groups(self) -> Mapping[str, GroupSeen]:
        """The groups by name."""
        return self._watch.groups

    @property
    def unread(self) -> Mapping[str, str]:
        """Why groups that are there are not in `groups`: no node was there or readable, ever."""
        return self._watch.unread

    def with_topic(self, topic: str) -> list[str]:
        """Return the groups that have a topic for producers; all of them if none has it.

        A group that states no topics now has those that it stated last: its master changes.
        """
        groups = self.groups
        having = [
            name
            for name, seen in groups.items()
            if any(self._permissions(note).get(topic, 0) & WRITE for note in seen.stated)
        ]
        return sorted(having or groups)

    def holding(self, topic: str) -> list[str]:
        """Return the groups to read a topic from: those that have it, or may have it.

        A group whose nodes state no topics may; if none states this one, all may.
        """
        groups = self.groups
        stated: dict[str, set[str]] = {
            name: {one for note in seen.notes for one in self._permissions(note)}
            for name, seen in groups.items()
        }
        if not any(topic in topics for topics in stated.values()):
            return sorted(groups)
        return sorted(name for name, topics in stated.items() if topic in topics or not topics)

    def _permissions(self, note: bytes) -> dict[str, int]:
        found = self._topics.get(note)
        if found is None:
            try:
                found = {one.name: one.perm for one in decode_note(note).topics}
            except ProtocolError as wrong:
                log.info("client: the topics of a group: %s", wrong)
                found = {}
            with self._lock:
                used = {one for seen in self.groups.values() for one in seen.stated}
                self._topics = {one: had for one, had in self._topics.items() if one in used}
                self._topics[note] = found
        return found
