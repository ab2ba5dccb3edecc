"""What the nodes of a group state in ZooKeeper: read once by a node, or watched for clients.

All clients of a process that name one group share one thread and one session, because a ZooKeeper
server admits few connections from one machine (60 by default). The thread ends some seconds after
the last client. It forgets nothing: without ZooKeeper, or with an empty one, the known addresses
stay.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

from hastore.addresses import SCHEME, GroupAddress, node_number
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Role
from hastore.errors import RegistryError
from hastore.registry.entry import NodeEntry, parse_entry, siblings_of
from hastore.registry.session import POLL_S, Session, SessionService, Stopped, Unreachable
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.service import raise_failure

log = logging.getLogger(__name__)


def node_numbers(session: Session, group: str) -> list[int]:
    """Return the numbers of the nodes that have a znode under the path `group`, sorted."""
    return numbers_in(session.children(group))


def numbers_in(children: Iterable[str]) -> list[int]:
    """Return the numbers of the nodes, of the names under a group's znode, sorted."""
    numbers = map(node_number, children)
    return sorted(number for number in numbers if number is not None)


def read_entries(
    session: Session, group: str, numbers: Iterable[int], refused: Callable[[str], None]
) -> dict[int, NodeEntry]:
    """Return the objects of these nodes; left out are those that are missing or not valid, those
    that others may have written although the session has credentials, and those that ZooKeeper does
    not let this session read: `refused` is told why.
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
        if found is None or not found.ours:  # that node itself reports it
            continue
        try:
            entries[number] = parse_entry(found.data, path)
        except RegistryError as wrong:  # that node itself reports it
            log.debug("%s", wrong)
    return entries


def addresses_of(entries: Mapping[int, NodeEntry], cluster: str, group: str) -> tuple[str, ...]:
    """Return the addresses of the client API that the nodes of a group state, masters first."""
    own = siblings_of(entries, cluster, group)
    order = sorted(own, key=lambda number: (entries[number].role is Role.SLAVE, number))
    return tuple(dict.fromkeys(own[number].api for number in order))


MAX_NODES = 64
LINGER_S = 2.0  # without a client the thread stays for so long: the next client may come soon
_TICK_S = 0.25


class Subscription:
    """What one client sees; `close` takes no lock, because a finalizer may call it."""

    def __init__(self, watch: "GroupWatch", on_change: Callable[[], None]) -> None:
        """`on_change` is a bound method, and is not kept alive."""
        self._watch = watch
        self._on_change = weakref.WeakMethod(on_change)
        self.closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The api addresses of the group's nodes, masters first; empty until some are known."""
        return self._watch.addresses

    @property
    def problem(self) -> str | None:
        """Why no address is known, or why those known are not up to date; None if they are."""
        return self._watch.problem

    def notify(self) -> None:
        """Tell the client that the addresses have changed."""
        on_change = self._on_change()
        if on_change is not None and not self.closed:
            on_change()

    def close(self) -> None:
        """End the subscription."""
        self.closed = True


class GroupWatch(SessionService):
    """The thread that follows one group; made by `watch_group`."""

    def __init__(self, group: GroupAddress, tls: TlsContexts | None) -> None:
        super().__init__("RegistryWatch", on_failure=raise_failure)
        self.addresses: tuple[str, ...] = ()
        self.problem: str | None = f"{SCHEME}{group.servers} has not answered yet"
        self.subscriptions: list[Subscription] = []  # changed under the module's lock
        self._group = group
        self._tls = tls
        self._idle_ms: float | None = None  # since when there is no client

    def connect(self) -> Session:
        """Return a new session, which only reads."""
        return Session(
            self._group.servers,
            None,
            SYSTEM_CLOCK,
            tls=self._tls,
            stopping=self.stopping,
            on_event=self.changed.set,
        )

    def wait_for_change(self) -> None:
        """Wait for a change, at most POLL_S; end early when the last client has gone."""
        until = SYSTEM_CLOCK.monotonic_ms() + POLL_S * 1000.0
        while SYSTEM_CLOCK.monotonic_ms() < until and not self.is_over():
            if self.changed.wait(_TICK_S):
                return

    def note_lost(self, problem: str) -> None:
        """Note why the addresses are not up to date; a client may show it."""
        if self.problem != problem:
            log.info("client: %s: %s", self._group, problem)
        self.problem = problem

    def is_over(self) -> bool:
        """Whether no client is left; then the watch is forgotten, and its thread ends."""
        now = SYSTEM_CLOCK.monotonic_ms()
        with _state.lock:
            if self.stopping.is_set():
                return True
            self.subscriptions = [one for one in self.subscriptions if not one.closed]
            if self.subscriptions:
                self._idle_ms = None
            elif self._idle_ms is None:
                self._idle_ms = now
            elif now - self._idle_ms > LINGER_S * 1000.0:
                _state.watches.pop(_key(self._group, self._tls), None)
                self.stopping.set()
                return True
        return False

    def read(self, session: Session) -> None:
        """Read the addresses, and tell the clients if they have changed."""
        group = self._group
        numbers = node_numbers(session, group.path)[:MAX_NODES]
        refused: list[str] = []
        entries = read_entries(session, group.path, numbers, refused.append)
        addresses = addresses_of(entries, group.cluster, group.group)
        if addresses:
            changed = addresses != self.addresses
            self.addresses, self.problem = addresses, None
            if changed:
                with _state.lock:
                    present = list(self.subscriptions)
                for one in present:
                    one.notify()
        elif refused:
            self.problem = refused[0]
        else:
            self.problem = (
                f"{group.path} has no nodes in ZooKeeper {group.servers}; check the names of "
                "cluster and group, and that the nodes have the key `registry`"
            )


_Key = tuple[GroupAddress, TlsFiles | None]


def _key(group: GroupAddress, tls: TlsContexts | None) -> _Key:
    return group, None if tls is None else tls.files


class _State:
    """The watches of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watches: dict[_Key, GroupWatch] = {}


_state = _State()


def watch_group(
    group: GroupAddress, tls: TlsContexts | None, on_change: Callable[[], None]
) -> Subscription:
    """Follow a group's addresses until the subscription is closed; does not wait.

    `tls` is for the connection to ZooKeeper. `on_change()`, a bound method of the client, is called
    by another thread after each change.
    """
    with _state.lock:
        key = _key(group, tls)
        watch = _state.watches.get(key)
        if watch is None or not watch.alive:  # its thread could not be started, or has failed
            watch = _state.watches[key] = GroupWatch(group, tls)
            watch.start()
        subscription = Subscription(watch, on_change)
        watch.subscriptions.append(subscription)
        return subscription


def _after_fork() -> None:
    global _state
    _state = _State()  # the threads and sessions are the parent's


os.register_at_fork(after_in_child=_after_fork)
