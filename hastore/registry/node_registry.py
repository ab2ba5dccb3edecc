"""NodeRegistry: a node's own object in ZooKeeper, and what the other nodes of its group state.

ZooKeeper is only where the operator writes the role: it takes the place of the line `role:` of the
file. What is safe is decided by epochs and promises, as with the file (docs/failover.md).

    the object                                  what the node does
    has another valid role                      takes it over, durably, then follows it
    is missing, or empty                        writes it anew with its present role
    is older than the last one seen (restored)  writes it anew with its present role
    is in another znode than the last one, but  writes it anew with its present role
      was completed by this node (restored)
    is invalid, or another node's               keeps its role, says why in its status
    has another ACL than that of the node's     keeps its role, says why in its status; if it asks
      credentials: others may have written it   for nothing, it is replaced
    ZooKeeper is out of reach                   keeps its role, says so, tries again

The znodes are persistent: a lost session means nothing. Each loss of the connection ends the
session; a new one reads everything again.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from hastore.addresses import SCHEME, group_path, node_path, parse_servers
from hastore.clock import Clock
from hastore.config.model import Config, NodeAddress, Role
from hastore.errors import RegistryError
from hastore.registry.entry import (
    NodeEntry,
    Once,
    foreign_problem,
    others_wrote,
    parse_entry,
    siblings_of,
)
from hastore.registry.group_watch import node_numbers, read_entries
from hastore.registry.remembered import RegistryMemory
from hastore.registry.session import Session, SessionService, Stopped, Unreachable, Znode
from hastore.security.tls_contexts import TlsContexts
from hastore.service import OnFailure

log = logging.getLogger(__name__)

TOLD_MS = 600_000.0  # for so long the status says that a command's options did not count
MAX_STRANGERS = 8  # of nodes that are in ZooKeeper but not in `nodes`, so many are named


class AssignedRole(NamedTuple):
    """The role that the operator has given this node, and the options that came with it."""

    role: Role
    once: Once | None = None


class NodeRegistry(SessionService):
    """Keep one node's object, and follow it.

    `wanted` is replaced as a whole; then this service's thread calls `on_change()`. `settled` is
    set after the first attempt to read the object.
    """

    def __init__(
        self,
        config: Config,
        credentials: str | None,
        store_id: Callable[[], str],
        memory: RegistryMemory,
        clock: Clock,
        *,
        tls: TlsContexts | None,
        refuses: Callable[[Role], str | None],
        on_addresses: Callable[[Mapping[int, NodeAddress]], None],
        on_failure: OnFailure,
    ) -> None:
        """Prepare; this service's thread calls the functions, without a lock.

        `refuses` returns why this node cannot have a role, None if it can (`load` calls it too).
        `on_addresses` gets the addresses that the other nodes of the file's `nodes` state.
        """
        assert config.registry is not None, "without a registry there is no NodeRegistry"
        super().__init__("NodeRegistry", on_failure=on_failure)
        self.settled = threading.Event()
        self.wanted = AssignedRole(config.assigned_role)
        self.on_change: Callable[[], None] = lambda: None
        self._on_addresses = on_addresses
        self._refuses = refuses
        self._config = config
        self._servers = parse_servers(config.registry)
        self._credentials = credentials
        self._tls = tls
        self._store_id = store_id
        self._memory = memory
        self._clock = clock
        self._path = node_path(config.cluster, config.group, config.node)
        self._group = group_path(config.cluster, config.group)
        self._connected = False
        self._since_ms = clock.wall_ms()
        self._link_problem: str | None = None  # why ZooKeeper is out of reach
        self._own_problem: str | None = None  # why the own object is not followed
        self._access_problem: str | None = None  # what ZooKeeper does not let this node do
        self._refused: str | None = None  # the same, of the read that is under way
        self._unused: tuple[float, str] | None = None  # why options did not count, and since when
        self._placed = False  # the object has had this node's addresses since the start
        self._strangers: list[int] = []
        self._siblings: dict[int, NodeEntry] = {}
        self._role_there: Role | None = None  # in the last object that was read and valid
        self._unsaved: Znode | None = None  # its last write, while the disk fails

    # -- called by other threads

    def load(self) -> None:
        """Read what the node remembers; called before `start`, once the store is locked."""
        self._memory.load()
        remembered = self._memory.data.role
        if remembered is None:
            return
        problem = self._refuses(remembered)
        if problem is None:
            self.wanted = AssignedRole(remembered)
        else:
            log.error("the role %s of the last run is not possible: %s", remembered.value, problem)

    def learn_config(self, config: Config) -> None:
        """Take over the `nodes` of a changed file; the own addresses stay until a restart."""
        own = self._config.node
        nodes = {**config.nodes, own: self._config.nodes[own]}
        self._config = msgspec.structs.replace(self._config, nodes=nodes)
        self.wake()

    def wake(self) -> None:
        """Read everything again now."""
        self.changed.set()

    def note_unused(self, command: str, age_ms: int | None) -> None:
        """Note that a command's options do not count, as they are so old; None: they do.

        Who gave the command sees only that it has no effect, and its machine's clock may be wrong.
        """
        if age_ms is None:
            self._unused = None
            return
        when = f"{age_ms // 1000} s ago" if age_ms >= 0 else f"{-age_ms // 1000} s in the future"
        self._unused = self._clock.monotonic_ms(), (
            f"the registry: the options of `hastore {command}` do not count, because by this "
            f"machine's clock it was given {when}: correct the clock here, or on the machine of "
            "the command (`timedatectl`), and give it again"
        )

    def _stays(self, role: str | None) -> str:
        """Say which role the node goes on in: a superseded one is no master any more."""
        wanted = self.wanted.role.value
        if role in (None, wanted):
            return f"the node keeps its role, {wanted}"
        return f"the node goes on as {role}, although its role there was {wanted}"

    def problems(self, role: str | None = None) -> list[str]:
        """Return what an operator must look at; `role` is the node's own now, if it is known."""
        found = []
        if self._link_problem is not None:
            found.append(
                f"the registry {SCHEME}{self._servers} is out of reach: {self._link_problem}; "
                f"{self._stays(role)}"
            )
        elif self._own_problem is not None:
            found.append(f"the registry is not followed: {self._own_problem}; {self._stays(role)}")
        elif self._access_problem is not None:
            found.append(f"the registry: {self._access_problem}")
        unused = self._unused
        if unused is not None and self._clock.monotonic_ms() - unused[0] < TOLD_MS:
            found.append(unused[1])
        if self._tls is not None:
            found += [f"the registry: {each}" for each in self._tls.problems()]
        if self._strangers and self._connected:
            numbers = ", ".join(map(str, self._strangers[:MAX_STRANGERS]))
            found.append(
                f"node {numbers} is in the registry under {self._group}, but not in `nodes` of "
                "this node's file, so it is no member of the group: add it to `nodes` in every "
                "file, or delete its znode; if it is of another group with the same name, which "
                "clients take for this one, that group needs another name (`group`)"
            )
        return found

    @property
    def in_touch(self) -> bool:
        """Whether `wanted` is what ZooKeeper has now: it has been read, and is watched."""
        return self._connected

    def status(self) -> dict[str, Any]:
        """Return the object `registry` of the status."""
        role = self._role_there
        return {
            "address": f"{SCHEME}{self._servers}",
            "path": self._path,
            "connected": self._connected,
            "since_ms": self._since_ms,
            "role": None if role is None else role.value,
            "nodes": {number: one.role.value for number, one in sorted(self._siblings.items())},
            "problem": self._link_problem or self._own_problem or self._access_problem,
        }

    # -- the thread

    def connect(self) -> Session:
        """Return a new session; what it does to the object is this node's."""
        return Session(
            self._servers,
            self._credentials,
            self._clock,
            tls=self._tls,
            stopping=self.stopping,
            on_event=self.changed.set,
        )

    def begin(self, session: Session) -> None:
        """Wait until this session's server knows what others were told before."""
        session.sync(self._group)

    def read(self, session: Session) -> None:
        """Follow the own object, and read those of the other nodes."""
        self._refused = None
        self._attempt(lambda: self._follow_own(session))
        self._attempt(lambda: self._read_siblings(session))
        if self._refused is not None and self._refused != self._access_problem:
            log.error("the registry: %s", self._refused)
        self._access_problem = self._refused
        if not self._connected:
            self._connected, self._since_ms, self._link_problem = True, self._clock.wall_ms(), None
            log.info("the registry %s%s is connected", SCHEME, self._servers)
        self.settled.set()

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step; note what ZooKeeper refuses. Raises Unreachable and Stopped."""
        try:
            step()
        except (Unreachable, Stopped):
            raise
        except RegistryError as refused:
            self._refused = str(refused)
        except OSError as failure:  # of the store's disk
            self._note_problem(f"what it says cannot be saved in the store: {failure}")

    def note_lost(self, problem: str) -> None:
        """Note that ZooKeeper is out of reach; the node keeps its role."""
        if self._connected or self._link_problem is None:
            self._connected, self._since_ms = False, self._clock.wall_ms()
            log.warning(
                "the registry %s%s is out of reach: %s; no role is changed, this node's was %s",
                SCHEME,
                self._servers,
                problem,
                self.wanted.role.value,
            )
        self._link_problem = problem
        self.settled.set()

    def _note_problem(self, problem: str | None) -> None:
        if problem is not None and problem != self._own_problem:
            log.error(
                "the registry is not followed: %s; no role is changed, this node's was %s",
                problem,
                self.wanted.role.value,
            )
        self._own_problem = problem

    def _note_refused(self, problem: str) -> None:
        self._refused = problem

    # -- the own object

    def _follow_own(self, session: Session) -> None:
        found = session.get(self._path)
        if found is None:
            self._write_anew(session, found, "is missing")
            return
        self._secure(session)
        if not found.ours:
            self._follow_foreign(session, found)
            return
        if not found.data:
            self._write_anew(session, found, "is empty")
            return
        try:
            entry = parse_entry(found.data, self._path)
        except RegistryError as wrong:
            self._role_there = None
            self._note_problem(str(wrong))
            return
        own = self._own_entry(entry.role)
        problem = foreign_problem(entry, self._path, own, may_move=not self._placed)
        self._role_there = None if problem else entry.role
        if problem is None and self._is_outdated(found, entry):
            self._write_anew(session, found, "is older than one that was read before (restored?)")
            return
        self._note_problem(problem or self._refuses(entry.role))
        if self._own_problem is None:
            self._accept(session, found, entry)

    def _follow_foreign(self, session: Session, found: Znode) -> None:
        """Replace an object that others may have written, or say that it is not followed.

        It is replaced if it would change nothing: a node that has had no credentials before made
        it, or somebody who made it anew by hand.
        """
        role = None
        if found.data:
            try:
                entry = parse_entry(found.data, self._path)
            except RegistryError as wrong:
                self._role_there = None
                self._note_problem(str(wrong))
                return
            role = entry.role
            own = self._own_entry(role)
            used = entry.once is None or entry.once.id == self._memory.data.once
            other = foreign_problem(entry, self._path, own)
            if not used or other is not None or role is not self.wanted.role:
                self._role_there = None
                self._note_problem(other or others_wrote(self._path, role))
                return
        self._write_anew(session, found, "had another ACL than that of registry_acl_file")

    def _is_outdated(self, found: Znode, entry: NodeEntry) -> bool:
        """Whether the object is from before the last one that was read.

        Numbers of transactions tell this only if ZooKeeper's data have one history. After it was
        emptied, they begin anew, and data from before have greater ones. They are known by their
        znode, which is another, with an object that this node once completed.
        """
        last = self._unsaved or self._memory.data
        other = last.made not in (0, found.made) and entry.store is not None
        return other or found.changed < last.changed

    def _secure(self, session: Session) -> None:
        """Correct the group's ACL, once in each session; a role is followed even if that fails.

        The own object's is not corrected: it would then count, with what others have written.
        """
        if not session.secured:
            self._attempt(lambda: self._secure_group(session))
            session.secured = self._refused is None

    def _secure_group(self, session: Session) -> None:
        changed = session.secure(self._group)
        if changed is not None:
            log.warning("%s", changed)

    def _accept(self, session: Session, found: Znode, entry: NodeEntry) -> None:
        used = entry.once is None or entry.once.id == self._memory.data.once
        once = None if used else entry.once
        self._remember(entry.role, found)
        self._placed = self._placed or entry.address == self._own_entry(entry.role).address
        if self.wanted != (entry.role, once):
            self.wanted = AssignedRole(entry.role, once)
            self.on_change()
        complete = msgspec.structs.replace(self._own_entry(entry.role), once=once)
        if entry != complete:  # set by hand, or this node has moved, or the options were used
            self._write(session, complete, found)

    def _write_anew(self, session: Session, found: Znode | None, why: str) -> None:
        role = self.wanted.role
        # Before its first role there is nothing to miss.
        level = logging.WARNING if self._memory.data.role else logging.INFO
        log.log(
            level, "%s %s: it is written with this node's role, %s", self._path, why, role.value
        )
        # What was wrong with an earlier object is over. If the write is refused, that is said.
        self._own_problem = self._role_there = None
        if self._write(session, self._own_entry(role), found):
            self._role_there = role
        self.changed.set()  # read it again: it is not watched yet, or somebody else has written it

    def _write(self, session: Session, entry: NodeEntry, found: Znode | None) -> bool:
        """Write the own object, unless it was changed since `found`."""
        written = session.write(self._path, entry.encode(), found)
        if written is None:
            return False
        # Else this node would take its own object for an old one, and write it again without end.
        self._unsaved = written
        self._remember(entry.role, written)
        return True

    def _remember(self, role: Role, znode: Znode) -> None:
        """Make durable which object was read or written last. Raises OSError."""
        self._memory.save(role=role, changed=znode.changed, made=znode.made)
        self._unsaved = None

    def _own_entry(self, role: Role) -> NodeEntry:
        config = self._config
        own = config.nodes[config.node]
        return NodeEntry(
            role=role,
            api=own.api,
            ha=own.ha,
            http=own.http,
            cluster=config.cluster,
            group=config.group,
            node=config.node,
            store=self._store_id(),
        )

    # -- the other nodes

    def _read_siblings(self, session: Session) -> None:
        config = self._config
        there = node_numbers(session, self._group)
        known = [one for one in there if one in config.nodes and one != config.node]
        entries = read_entries(session, self._group, known, self._note_refused)
        self._siblings = entries
        self._strangers = [one for one in there if one not in config.nodes]
        self._on_addresses(siblings_of(entries, config.cluster, config.group))
