"""What the groups of a cluster tell each other by ZooKeeper: a note of each group's master.

    /hastore/CLUSTER/GROUP/routes-NODE    ephemeral: it goes with the session of the master NODE

The notes are bytes to this module (protocol/group_note.py has what is in them). A node reads those
of all other groups, and then only what ZooKeeper says has changed. A note that has gone counts for
KEEP_MS more, so a flip is no gap; without ZooKeeper all notes stay as they are.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hastore.addresses import ROOT, group_path, node_number, parse_servers
from hastore.clock import Clock
from hastore.config.model import Config
from hastore.errors import RegistryError
from hastore.registry.session import Session, SessionService, Unreachable
from hastore.security.tls_contexts import TlsContexts
from hastore.service import OnFailure

log = logging.getLogger(__name__)

MAX_NOTE_BYTES = 1_000_000  # a znode has 1 MiB at most
MAX_GROUPS = 2_000  # of a cluster
KEEP_MS = 30_000.0
TICK_S = 1.0  # so often it is looked for whether the own note has changed
ALL_MS = 60_000.0  # so often everything is read again, should a watch have been lost
PREFIX = "routes-"


class Place(NamedTuple):
    """Whose note it is."""

    group: str
    node: int


class ClusterNotes(SessionService):
    """Write the note of this node while it is a master, and read those of other groups."""

    def __init__(
        self,
        config: Config,
        credentials: str | None,
        clock: Clock,
        *,
        tls: TlsContexts | None,
        own: Callable[[], bytes | None],
        on_notes: Callable[[Mapping[tuple[str, int], bytes]], None],
        on_failure: OnFailure,
    ) -> None:
        """Prepare. This service's thread calls `own`, which returns the note of this node, the same
        object as long as it is the same, or None while the node is no master; and `on_notes`.
        """
        assert config.registry is not None, "without a registry there are no notes"
        super().__init__("ClusterNotes", on_failure=on_failure)
        self.problem: str | None = None
        self._servers = parse_servers(config.registry)
        self._credentials = credentials
        self._clock = clock
        self._tls = tls
        self._own = own
        self._on_notes = on_notes
        self._cluster = f"{ROOT}/{config.cluster}"
        self._group = config.group
        self._own_path = f"{group_path(config.cluster, config.group)}/{PREFIX}{config.node}"
        self._written: bytes | None = None  # in this session
        self._groups: dict[str, set[int]] = {}  # the nodes with a note, by group
        self._notes: dict[Place, bytes] = {}
        self._gone: dict[Place, float] = {}  # since when a note is missing
        self._next_all_ms = float("-inf")

    def connect(self) -> Session:
        """Return a new session."""
        return Session(
            self._servers, self._credentials, self._clock,
            tls=self._tls, stopping=self.stopping, on_event=self.changed.set,
        )  # fmt: skip

    def begin(self, session: Session) -> None:
        """Nothing is written or watched in a new session."""
        self._written = None
        self._next_all_ms = float("-inf")

    def wait_for_change(self) -> None:
        """Wait until ZooKeeper has something new, or it is time to look at the own note."""
        self.changed.wait(TICK_S)

    def note_lost(self, problem: str) -> None:
        """Note that ZooKeeper is out of reach: what is known stays. NodeRegistry says it."""
        log.debug("the notes of other groups are not read: %s", problem)

    def read(self, session: Session) -> None:
        """Write the own note if it has changed, and read what has changed of others."""
        try:
            self._write(session)
            changed = self._read_changed(session)
        except Unreachable:
            raise
        except RegistryError as refused:
            self._say(str(refused))
            return
        if self._drop_gone() or changed:
            self._on_notes({(place.group, place.node): note for place, note in self._notes.items()})

    def _write(self, session: Session) -> None:
        note = self._own()
        if note is self._written:
            return
        if note is not None and len(note) > MAX_NOTE_BYTES:
            self._say(
                f"the topics of this group take {len(note):,} bytes, more than "
                f"{MAX_NOTE_BYTES:,}: other groups do not learn of them; delete topics, or spread "
                "them over more groups"
            )
            note = None
        else:
            self._say(None)
        if note is None:
            session.delete(self._own_path)
        elif self._written is None:
            session.delete(self._own_path)  # of an earlier session, with which it would go
            session.create_ephemeral(self._own_path, note)
        else:
            session.replace(self._own_path, note)
        self._written = note

    def _say(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.error("the routes of this cluster's groups: %s", problem)
        self.problem = problem

    def _read_changed(self, session: Session) -> bool:
        """Return whether a note has changed."""
        now = self._clock.monotonic_ms()
        fired, everything = session.take_fired(), now >= self._next_all_ms
        if everything:
            self._next_all_ms = now + ALL_MS
        if everything or self._cluster in fired:
            names = [name for name in session.children(self._cluster) if name != self._group]
            known = self._groups
            self._groups = {name: known.get(name, set()) for name in sorted(names)[:MAX_GROUPS]}
            fired |= {self._path(name) for name in self._groups if name not in known}
        changed = False
        for name in self._groups:
            path = self._path(name)
            if everything or path in fired:
                found = {
                    int(one.removeprefix(PREFIX))
                    for one in session.children(path)
                    if one.startswith(PREFIX) and node_number(one.removeprefix(PREFIX))
                }
                fired |= {f"{path}/{PREFIX}{one}" for one in found - self._groups[name]}
                self._groups[name] = found
            for node in self._groups[name]:
                if everything or f"{path}/{PREFIX}{node}" in fired:
                    changed |= self._read_note(session, Place(name, node))
        return changed

    def _read_note(self, session: Session, place: Place) -> bool:
        found = session.get(f"{self._path(place.group)}/{PREFIX}{place.node}")
        if found is None or not found.ours or len(found.data) > MAX_NOTE_BYTES:
            return False
        is_new = self._notes.get(place) != found.data
        self._notes[place] = found.data
        return is_new

    def _drop_gone(self) -> bool:
        """Forget notes that are missing for long; whether there was one."""
        now = self._clock.monotonic_ms()
        gone = False
        for place in list(self._notes):
            if place.node in self._groups.get(place.group, ()):
                self._gone.pop(place, None)
            elif now - self._gone.setdefault(place, now) > KEEP_MS:
                del self._notes[place], self._gone[place]
                gone = True
        return gone

    def _path(self, group: str) -> str:
        return f"{self._cluster}/{group}"
