"""What the groups of a cluster tell each other by ZooKeeper: a note of each group's master.

    /hastore/CLUSTER/GROUP/routes-NODE    ephemeral: it goes with the session of the master NODE

The notes are bytes to this module (protocol/group_note.py has what is in them). A node reads those
of all other groups, and then only what ZooKeeper says has changed. A note that has gone counts for
KEEP_MS more, so a flip is no gap; without ZooKeeper all notes stay as they are. The own note is
watched, too: if somebody deletes it, as with all of a group's znodes, it is written again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from hastore.addresses import ROOT, group_path, node_number, parse_servers
from hastore.clock import Clock
from hastore.config.model import Config
from hastore.errors import RegistryError
from hastore.registry.session import Session, SessionService, Stopped, Unreachable
from hastore.security.tls_contexts import TlsContexts
from hastore.service import OnFailure

log = logging.getLogger(__name__)

MAX_NOTE_BYTES = 1_000_000  # a znode has 1 MiB at most
MAX_GROUPS = 2_000  # of a cluster
KEEP_MS = 30_000.0
TICK_S = 1.0  # so often it is looked for whether the own note has changed
ALL_MS = 60_000.0  # so often everything is read again, should a watch have been lost
PREFIX = "routes-"


def noted_nodes(children: Iterable[str]) -> set[int]:
    """Return the numbers of the nodes that have a note, of the names under a group's znode."""
    numbers = [node_number(one.removeprefix(PREFIX)) for one in children if one.startswith(PREFIX)]
    return {number for number in numbers if number is not None}


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
        self._seen: bytes | None = None  # what `_own` has returned, in this session
        self._written: bytes | None = None  # of that, in this session
        self._too_large: str | None = None
        self._groups: dict[str, set[int]] = {}  # the nodes with a note, by group
        self._unread: set[str] = set()  # the groups that must be read as a whole
        self._notes: dict[Place, bytes] = {}
        self._changed = False  # the notes, since `_on_notes` was told
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
        self._seen = self._written = None
        self._next_all_ms = float("-inf")

    def wait_for_change(self) -> None:
        """Wait until ZooKeeper has something new, or it is time to look at the own note."""
        self.changed.wait(TICK_S)

    def note_lost(self, problem: str) -> None:
        """Note that ZooKeeper is out of reach: what is known stays. NodeRegistry says it."""
        log.debug("the notes of other groups are not read: %s", problem)

    def read(self, session: Session) -> None:
        """Write the own note if it has changed, and read what has changed of others.

        What ZooKeeper refuses is tried again in the next turn, and holds up no other group.
        """
        fired, refused = session.take_fired(), list[str]()
        self._try(partial(self._write, session, fired), refused)
        self._try(partial(self._read_groups, session, fired), refused)
        for name in self._groups:
            self._try(partial(self._read_group, session, name, fired), refused)
        self._say(refused[0] if refused else self._too_large)
        if self._drop_gone() or self._changed:
            self._changed = False
            self._on_notes({(place.group, place.node): note for place, note in self._notes.items()})

    def _try(self, step: Callable[[], None], refused: list[str]) -> None:
        try:
            step()
        except (Unreachable, Stopped):
            raise
        except RegistryError as failure:
            refused.append(str(failure))

    def _write(self, session: Session, fired: set[str]) -> None:
        own = note = self._own()
        if self._written is not None and self._may_be_gone(fired):
            self._look(session)
        if own is self._seen:
            return
        self._too_large = None
        if note is not None and len(note) > MAX_NOTE_BYTES:
            self._too_large = (
                f"the topics of this group take {len(note):,} bytes, more than "
                f"{MAX_NOTE_BYTES:,}: other groups do not learn of them; delete topics, or spread "
                "them over more groups"
            )
            note = None
        if note is None:
            session.delete(self._own_path)
        elif self._written is None:
            session.delete(self._own_path)  # of an earlier session, with which it would go
            session.create(self._own_path, note, ephemeral=True)
        else:
            session.replace(self._own_path, note)
        self._seen, self._written = own, note
        if note is not None:
            self._look(session)

    def _may_be_gone(self, fired: set[str]) -> bool:
        return self._own_path in fired or self._clock.monotonic_ms() >= self._next_all_ms

    def _look(self, session: Session) -> None:
        """Watch the own note; if it is missing, it is to be written again."""
        if session.get(self._own_path) is None:
            self._seen = self._written = None
            self.changed.set()

    def _say(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.error("the routes of this cluster's groups: %s", problem)
        self.problem = problem

    def _read_groups(self, session: Session, fired: set[str]) -> None:
        """Read which groups there are, if that may have changed."""
        now, due_ms = self._clock.monotonic_ms(), self._next_all_ms
        everything = now >= due_ms
        if not everything and self._cluster not in fired:
            return
        self._next_all_ms = float("-inf")  # if it is refused, everything is read again
        names = [name for name in session.children(self._cluster) if name != self._group]
        self._next_all_ms = now + ALL_MS if everything else due_ms
        known = self._groups
        self._groups = {name: known.get(name, set()) for name in sorted(names)[:MAX_GROUPS]}
        self._unread &= self._groups.keys()
        self._unread |= {name for name in self._groups if everything or name not in known}

    def _read_group(self, session: Session, name: str, fired: set[str]) -> None:
        """Read what has changed of a group."""
        path, whole = self._path(name), name in self._unread
        self._unread.add(name)  # in case that it is refused
        if whole or path in fired:
            found = noted_nodes(session.children(path))
            known = set() if whole else self._groups[name]
            fired |= {f"{path}/{PREFIX}{one}" for one in found - known}
            self._groups[name] = found
        for node in sorted(self._groups[name]):
            read = f"{path}/{PREFIX}{node}" in fired
            if read and not self._read_note(session, Place(name, node)):
                # Nothing watches a note that is missing. The list of them does: if this one is in
                # the next list, it is new.
                self._groups[name].discard(node)
        self._unread.discard(name)

    def _read_note(self, session: Session, place: Place) -> bool:
        """Read a note, and watch it; False if it is missing, and so is not watched."""
        found = session.get(f"{self._path(place.group)}/{PREFIX}{place.node}")
        if found is None:
            return False
        if found.ours and len(found.data) <= MAX_NOTE_BYTES:
            self._changed |= self._notes.get(place) != found.data
            self._notes[place] = found.data
        return True

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
