"""BaseNode: what nodes of every mode have: identity on the network, API, HTTP, failures, stop.

`Node` (server/node.py) is a node of mode classic, `DLedgerNode` (server/dledger_node.py) one of
mode dledger. `run_node` (server/run.py) runs either as a process.

A constructor makes the parts in the order in which they need each other. Each part gets what it
calls; what cannot be had yet is connected in server/callbacks.py.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hastore.addresses import address_text, parse_address
from hastore.clock import Clock
from hastore.config.checks import config_notes, remoting_refusal
from hastore.config.file import parse_config
from hastore.config.model import Config, NodeAddress, StoreKind, Wire
from hastore.counters import ReplicationCounts
from hastore.errors import (
    ConfigError,
    NodeFailedError,
    ReplicationError,
    StoreError,
    StoreMovedError,
    unopened_store,
)
from hastore.fs.filesystem import FileSystem
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.epochs import EpochStarts
from hastore.record.codec import Host
from hastore.record.delays import parse_levels
from hastore.record.log_walk import Damage, LogWalk
from hastore.repair.mending import Mended
from hastore.security.audit_log import AuditLog
from hastore.security.identities import Changes, Identities
from hastore.security.slots import KnownHosts
from hastore.security.tls_contexts import NodeTls
from hastore.server.administration import Administration, Leading
from hastore.server.api.access import Access
from hastore.server.api.backend import ApiBackend
from hastore.server.api.quotas import Quotas
from hastore.server.api.server import ApiServer
from hastore.server.backend import DLedgerBackend, NodeBackend
from hastore.server.callbacks import connect_audit, connect_delays, connect_scrub
from hastore.server.http_server import HttpAccess, HttpServer
from hastore.server.metrics.node_metrics import NodeMetrics
from hastore.server.name_servers import NameServers
from hastore.server.overview import overview
from hastore.server.position_file import PositionFile
from hastore.server.remoting.acl import AclCounts
from hastore.server.remoting.elsewhere import Elsewhere
from hastore.server.remoting.forwarding import ForwardCounts, Network
from hastore.server.remoting.rooms import make_door
from hastore.server.repairing import mend_from
from hastore.server.retention_service import RetentionService, TransactionHold
from hastore.server.schedule_service import ScheduleMessageService
from hastore.server.scrub_service import ScrubService
from hastore.server.status_history import StatusHistory, measured
from hastore.server.status_page import StatusPage
from hastore.server.take_over import TakeOver, read_offsets
from hastore.service import Service
from hastore.store.append.results import PutResults, own_records
from hastore.store.log_store import LogStore
from hastore.store.state.marker_files import other_log_problem, restore_problem

if TYPE_CHECKING:
    from hastore.dledger.links.peer_links import PeerLinks
    from hastore.ha.hello.peer import Call
    from hastore.ha.master.ha_service import HAService

log = logging.getLogger(__name__)


class RoleThread(Protocol):
    """The thread that follows the configuration file and the role: RoleService or GroupService."""

    settled: threading.Event  # set once the node serves, or has logged what it waits for

    @property
    def reason(self) -> str | None:
        """Why the node does not serve yet."""
        ...

    def wake(self) -> None:
        """Let the thread read the configuration again now."""
        ...


class BaseNode:
    """One node of any mode. `start` and `stop` are called once each, from the same thread.

    `failed` is set when the node must end; `failure` says which thread failed, and why.
    `identities` is None on a node that does not ask its clients who they are. `config_path` is the
    absolute path of the file that the node follows; `config_problem` returns why a changed file is
    not followed, None if it is. `parse(text, path)` reads the content of that file as the node
    does.
    """

    # A subclass sets these in its constructor.
    backend: NodeBackend | DLedgerBackend
    api: ApiServer
    roles: RoleThread
    retention: RetentionService
    scrub: ScrubService
    delays: ScheduleMessageService
    _history: StatusHistory  # made when the ports are bound

    def __init__(
        self,
        config: Config,
        fs: FileSystem,
        clock: Clock,
        config_path: str | None,
        config_problem: Callable[[], str | None],
        parse: Callable[[str, str], Config] | None = None,
    ) -> None:
        self.config = config
        self.config_path = config_path
        self.failure: str | None = None
        self.failed = threading.Event()
        self.forward_counts = ForwardCounts()
        self.acl_counts = AclCounts()
        self.name_servers = NameServers(config, clock, on_failure=self._on_failure)
        self.elsewhere = Elsewhere()
        self._quotas: Quotas | None = None
        self.audit = AuditLog(
            fs,
            config.security.audit_log or f"{config.store.root}/hastore/audit.log",
            config.node,
            clock=clock,
            on_failure=self._on_failure,
        )
        self.identities: Identities | None = None
        self._identity_reader: Service | None = None
        if config.security.identities is not None:
            self.identities = Identities(
                config.security.identities, clock=clock, on_change=self._identities_changed
            )
            self._identity_reader = self.identities.reader(on_failure=self._on_failure)
        self.tls = NodeTls(config, clock=clock)
        self.ha_address = config.bound("ha")
        self.state = NodeState(fs, config.store.root)
        self._config_problem = config_problem
        self._parse = parse or parse_config
        self._fs = fs
        self._clock = clock
        self._failing = threading.Lock()
        self._http: HttpServer | None = None
        self._open = TransactionHold(
            lambda: self.backend.store.transactions.halves(), clock, lambda: self.config.remoting
        )

    def _noted(self, read_config: Callable[[], Config | None]) -> Callable[[], Config | None]:
        """Return `read_config`, which then also lets retention follow a changed file."""

        def read() -> Config | None:
            changed = read_config()
            if changed is not None:
                self.retention.configure(changed.store.retention)
            return changed

        return read

    def _make_delays(
        self, backend: NodeBackend | DLedgerBackend, tables: TakeOver | None = None
    ) -> ScheduleMessageService:
        delays = ScheduleMessageService(
            backend.store, backend, backend.transfer, self._clock,
            on_failure=self._on_failure,
            delays_ms=parse_levels(self.config.store.message_delay_level),
            taken=lambda: read_offsets(self._fs, self.config.store.root),
            tables=tables,
        )  # fmt: skip
        connect_delays(backend.store, delays)
        return delays

    def _make_api(
        self,
        backend: ApiBackend,
        *,
        always_all: bool = False,
        leading: Callable[[], Leading] | None = None,
    ) -> ApiServer:
        access = None
        if self.identities is not None:
            access = Access(self.identities, self.audit.note, clock=self._clock)
            self._quotas = access.quotas
        orders = Administration(
            self.config, self.config_path, fs=self._fs, clock=self._clock, parse=self._parse,
            leading=leading, on_change=self.wake,
        )  # fmt: skip
        in_memory = self.config.store.kind is StoreKind.MEMORY
        return ApiServer(
            self.config.bound("api"),
            backend,
            self.config.api,
            clock=self._clock,
            on_failure=self._on_failure,
            always_all=always_all,
            tls=self.tls.api,
            on_tls_failure=partial(self._tls_refused, "api"),
            access=access,
            carry_out=orders.carry_out,
            make_door=partial(
                make_door, self.config, self._network(), acl_counts=self.acl_counts,
                delay_offsets=self.delays.next_offsets, announce=self.name_servers.attach,
                elsewhere=self.elsewhere,
            ),
            slow_ms=self.config.log.slow_threshold_ms,
            position_file=None if in_memory else PositionFile(self._fs, self.config.store.root),
            fast_port=self.config.ha.allow_classic_peers and remoting_refusal(self.config) is None,
        )  # fmt: skip

    # -- start -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Recover the store, bind the ports, start the threads. If this fails, no thread runs.

        Raises StoreInUseError, StoreBrokenError or StoreError if the store cannot be opened,
        ConfigError if a port cannot be bound.
        """
        for note in config_notes(self.config, starts=True):
            log.warning("%s", note)
        connect_audit(self.backend.store, self.audit)
        connect_scrub(self.backend.store, self.scrub)
        self.backend.store.flush_service.tell_slow(self.config.log.slow_threshold_ms)
        self._lock_and_open()
        prepared = False
        try:
            self.retention.kept.load()
            self._prepare()
            prepared = True
            http = self._bind()
        except BaseException:
            self._links.stop()
            self._stop_http()
            # Else the next boot would take this start's end for a power loss. But a start that has
            # not noted the power loss before it must leave that to the next one.
            self._close_store(clean=prepared)
            raise
        self._start_threads(http)
        self.name_servers.start()
        self._history.start()

    def _lock_and_open(self) -> None:
        config, store = self.config, self.backend.store
        try:
            store.lock()  # before node.json is read: another process may write it
            try:
                problem = restore_problem(self._fs, config.store.root)
                if problem is None:
                    root, mode = config.store.root, config.mode
                    problem = other_log_problem(self._fs, root, mode, config.node)
                if problem is not None:  # this node would ignore that log in silence
                    raise StoreError(problem)
                self.state.load(config.node, config.cluster, config.group)
                self._open_store()
            except BaseException:
                store.unlock()
                raise
        except OSError as error:
            raise unopened_store(config.store.root, error) from error

    def _bind(self) -> HttpServer:
        """Bind the three ports, and return the HTTP server, which does not answer yet.

        The API and the audit log start too, once all ports are bound.
        """
        try:
            self.ha_address = self._links.bind(self.ha_address)
        except OSError as error:
            raise ConfigError(
                f"cannot bind the HA port {self.ha_address}: {error.strerror or error}; free the "
                "address or change the node's `ha`"
            ) from error
        self.metrics = NodeMetrics(
            self.backend.status, self.backend.store, self.api, self._replication, self.audit,
            self.tls, self.identities, self.retention.kept.find, self._clock,
        )  # fmt: skip
        access = None
        if self.identities is not None:
            access = HttpAccess(self.identities, self.audit.note, self._clock)
        self._history = StatusHistory(
            self.backend, self._clock, on_failure=self._on_failure,
            measure=partial(measured, self.backend.store.queues, self.backend.transfer),
        )  # fmt: skip
        self._http = http = HttpServer(
            self.config.bound("http"),
            self.backend.status,
            self.metrics.render,
            not_ready=self.backend.not_ready,
            not_master=self.backend.not_master,
            access=access,
            page=StatusPage(self._overview, self._history),
            tls=self.tls.http,
            hosts=KnownHosts(
                lambda: [a for one in self._known_nodes.values() for a in (one.ha, one.http)],
                self._clock,
                on_failure=self._on_failure,
            ),
            on_tls_failure=partial(self._tls_refused, "http"),
            on_failure=self._on_failure,
        )
        self.api.start()
        self.audit.start()
        if self._identity_reader is not None:
            self._identity_reader.start()
        return http

    def _overview(self) -> dict[str, Any]:
        """Return what the status page shows of this moment."""
        https, not_ready = self.config.security.http is Wire.TLS, self.backend.not_ready()
        return overview(self.backend.status(), self._known_nodes, not_ready, https=https)

    # What the modes do differently.

    @property
    def _known_nodes(self) -> Mapping[int, NodeAddress]:
        """The addresses of the group's nodes, as the configuration has them now."""
        raise NotImplementedError

    @property
    def _links(self) -> "HAService | PeerLinks":
        raise NotImplementedError

    def _dial_forward(self, node: int, timeout_ms: float) -> "Call":
        """Call a node, to forward requests to it; raises HastoreError or OSError."""
        raise NotImplementedError

    def _dial_repair(self, node: int, start: int, end: int) -> "Call":
        """Ask a node for bytes of the log; raises HastoreError or OSError."""
        raise NotImplementedError

    def _own_epochs(self) -> EpochStarts | None:
        """Return the history of the log; None if its entries have their terms."""
        return None

    @property
    def _replication(self) -> ReplicationCounts:
        raise NotImplementedError

    def _network(self) -> Network:
        port, fail = self._links.forward_port, self._on_failure
        return Network(port, self._dial_forward, self._ha_refused, fail, self.forward_counts)

    def _open_store(self) -> None:
        """Open the store, which is locked."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Bring the node's state in line with the opened store, before any HELLO."""

    def _start_threads(self, http: HttpServer) -> None:
        raise NotImplementedError

    def _stop_steps(self) -> Iterable[Callable[[], object]]:
        raise NotImplementedError

    def _close_store(self, clean: bool) -> None:
        """Sync and close the store. `clean`: the node's state was brought in line with it, and no
        step of the stop has failed.
        """
        raise NotImplementedError

    @property
    def role_text(self) -> str:
        """The fields of the ready line that depend on the mode: the role, and what goes with it."""
        raise NotImplementedError

    # -- while it runs -----------------------------------------------------------------------------

    @property
    def http_address(self) -> str:
        """The address that the HTTP port is bound to; before `start`, the configured one."""
        return self._http.address if self._http is not None else self.config.bound("http")

    def wake(self) -> None:
        """Read the configuration again now, after SIGHUP."""
        self.roles.wake()

    def ready_line(self) -> str:
        """Return the line that is printed to stdout once the node serves."""
        store = self.backend.store
        return (
            f"ready node={self.config.node} {self.role_text} "
            f"api={self.api.endpoint} ha={self.ha_address} http={self.http_address} "
            f"min_offset={store.min_offset} max_offset={store.max_offset}"
        )

    def delayed_status(self) -> dict[str, Any]:
        """Return how many delayed messages wait, and what became of others."""
        return self.delays.status()

    def quota_status(self) -> dict[str, Any]:
        """Return what the identities with a quota have asked of this node."""
        return {} if self._quotas is None else self._quotas.status()

    def _make_scrub(self, store: LogStore) -> ScrubService:
        config = self.config
        in_memory = config.store.kind is StoreKind.MEMORY
        file = self.config_path or "FILE"
        return ScrubService(
            store, self._clock, fs=self._fs, path=f"{config.store.root}/hastore/scrub.json",
            rate=None if in_memory else config.store.scrub_rate, mend=self._mend,
            remedy=lambda: f"stop the node, and run `hastore log repair -c {file}`",
            on_failure=self._on_failure,
        )  # fmt: skip

    def _mend(self, walk: LogWalk, damage: Damage, times_cut: int) -> Mended:
        """Repair a damaged range of the log from another node."""
        nodes = [node for node in self._known_nodes if node != self.config.node]
        store, stopping = self.backend.store, self.scrub.stopping

        def dial(node: int, start: int, end: int) -> "Call":
            if stopping.is_set():  # a node that hangs must not delay the stop once for each range
                raise ReplicationError("this node stops")
            return self._dial_repair(node, start, end)

        return mend_from(store, self._own_epochs(), nodes, dial, walk, damage, times_cut)

    def scrub_status(self) -> dict[str, Any]:
        """Return how far the log was scrubbed, what was found, and what was repaired."""
        return self.scrub.status()

    def own_notes(self) -> list[str]:
        """Return what is worth knowing of this node, and alarms nobody."""
        return []

    def own_problems(self) -> list[str]:
        """Return what is wrong with the changed file, the identities, TLS and the audit log."""
        found = []
        config_problem = self._config_problem()
        if config_problem is not None:
            found.append(f"the changed configuration is not followed: {config_problem}")
        if self.audit.problem is not None:
            found.append(self.audit.problem)
        if self.identities is not None and self.identities.problem is not None:
            found.append(
                f"the changed identities are not followed: {self.identities.problem}; "
                "the last good ones stay in force"
            )
        servers = self.name_servers.problems()
        scrubbed = self.scrub.problems()
        found += self.api.problems()
        return [*found, *scrubbed, *self.delays.problems(), *self.tls.problems(), *servers]

    def client_connections(self) -> int:
        """Return how many clients are connected, and have sent something."""
        return self.api.connections

    def name_server_status(self) -> list[dict[str, Any]]:
        """Return RocketMQ's name servers, and as what this node is registered there."""
        return self.name_servers.status()

    def _waiting_from(self, late_ms: float) -> int | None:
        """Return the offset from which on the log is needed for what waits in it, or None.

        That is a delayed message, or an open transaction while its producers may still be asked,
        and for `late_ms` more.
        """
        found = (self.delays.waiting_from(late_ms), self._open.held_from(late_ms))
        return min((offset for offset in found if offset is not None), default=None)

    def _put_again(self, payloads: Sequence[bytes]) -> PutResults:
        """Append for retention, which is made before the backend: the backend shows its holds."""
        return self.backend.put_encoded(payloads, [own_records] * len(payloads))

    def _identities_changed(self, changes: Changes) -> None:
        for outcome in ("added", "changed", "revoked"):
            for name in getattr(changes, outcome):
                what = changes.what.get(name, "")
                log.warning("identity %s: %s", name, f"{outcome}: {what}" if what else outcome)
                self.audit.note("identity", outcome=outcome, identity=name, reason=what)
        if changes.problem is not None:
            self.audit.note("identities", outcome="refused", reason=changes.problem)

    def _ha_refused(self, address: str, reason: str) -> None:
        self.audit.note("ha", outcome="refused", address=address, reason=reason)

    def _tls_refused(self, port: str, address: str, reason: str) -> None:
        self.audit.note(f"tls {port}", outcome="refused", address=address, reason=reason)

    def _on_failure(self, name: str, failure: BaseException) -> None:
        """Record a failure; the failing thread calls this.

        The failure of a service ends the node. A failure of the store ends it only if the store's
        folder was moved or removed; otherwise the node goes on and shows the reason.
        """
        if name != "store":
            with self._failing:
                if self.failure is None:  # keep the first: it may have caused the others
                    self.failure = f"{name} failed: {failure!r}"
        try:
            log.critical("%s failed: %s", name, failure)
        finally:  # the node ends also if its log fails
            if name != "store" or isinstance(failure, StoreMovedError):
                self.failed.set()

    # -- stop --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop cleanly: refuse puts, answer waiting puts, close links, sync and close the store.

        Each step runs even if an earlier one fails; the first failure is raised.
        """
        self.backend.begin_stop()
        failure: Exception | None = None
        ends = (self._stop_http, self._stop_security)
        begins: Sequence[Callable[[], object]] = (self._history.stop, self.name_servers.stop)
        for step in (*begins, *self._stop_steps(), *ends):
            try:
                step()
            except Exception as error:
                log.exception("a step of the node's stop failed")
                failure = failure or error
        self._close_store(clean=failure is None)
        if failure is not None:
            raise failure

    def _stop_http(self) -> None:
        if self._http is not None:
            self._http.stop()

    def _stop_security(self) -> None:
        if self._identity_reader is not None:
            self._identity_reader.stop()
        self.audit.stop()


def store_host(config: Config) -> Host:
    """Return the node's address as written into stored records; a host name is resolved.

    Raises NodeFailedError if it cannot be, which a restart may mend: at a machine's start the name
    service may come later.
    """
    endpoint = parse_address(config.nodes[config.node].api.removeprefix("tcp://"))
    assert endpoint is not None, "the configuration was checked"
    host, port = endpoint
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as failure:
        raise NodeFailedError(
            f"nodes.{config.node}.api: the name {host} cannot be resolved here "
            f"({failure.strerror}), and each message has this node's address; let this machine "
            "know the name, or write an IP address"
        ) from failure
    return Host.parse(address_text(str(resolved), port))


def read_secret(config: Config, fs: FileSystem) -> bytes | None:
    """Return the group's secret, None without one. Raises ConfigError if it is too short."""
    if config.ha.secret_file is None:
        return None
    secret = fs.read_bytes(config.ha.secret_file).strip()
    if len(secret) < 16:
        raise ConfigError(
            f"{config.ha.secret_file}: {len(secret)} bytes of secret; ha.secret_file needs at "
            "least 16 random bytes"
        )
    return secret
