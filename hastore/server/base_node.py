"""BaseNode: what nodes of every mode have: identity on the network, API, HTTP, failures, stop.

Node (server/node.py) is a node of mode classic, DLedgerNode (server/dledger_node.py) one of mode
dledger. `run_node` in server/node.py runs either as a process.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial

from hastore.addresses import address_text, parse_address
from hastore.clock import Clock
from hastore.config.model import Config
from hastore.errors import ConfigError, StoreError, StoreMovedError
from hastore.fs.filesystem import FileSystem
from hastore.record.codec import Host
from hastore.security.audit_log import AuditLog
from hastore.security.identities import Changes, Identities
from hastore.security.tls_contexts import NodeTls
from hastore.server.api.access import Access
from hastore.server.api.server import ApiServer
from hastore.server.base_backend import BaseBackend
from hastore.server.http_server import HttpAccess, HttpServer
from hastore.server.metrics import render_metrics
from hastore.service import Service
from hastore.store.state.marker_files import other_log_problem

log = logging.getLogger(__name__)


class BaseNode:
    """One node of any mode. `start` and `stop` are called once each, from the same thread.

    A subclass sets `backend` and `api` in its constructor. `failed` is set when the node must end;
    `settled`, once it serves or has logged what it waits for. `identities` is None on a node that
    does not ask its clients who they are.
    """

    backend: BaseBackend
    api: ApiServer

    def __init__(self, config: Config, fs: FileSystem, clock: Clock) -> None:
        self.config = config
        self.audit = AuditLog(
            fs,
            config.security.audit_log or f"{config.store.root}/hastore/audit.log",
            config.node,
            clock=clock,
            on_failure=self._on_failure,
        )
        self.identities: Identities | None = None
        if config.security.identities is not None:
            self.identities = Identities(
                config.security.identities, clock=clock, on_change=self._identities_changed
            )
        self._identity_reader: Service | None = None
        if self.identities is not None:
            self._identity_reader = self.identities.reader(on_failure=self._on_failure)
        self.tls = NodeTls(config, clock=clock)
        self.failed = threading.Event()
        self.ha_address = config.nodes[config.node].ha
        self._fs = fs
        self._clock = clock
        self._failing = threading.Lock()
        self._http: HttpServer | None = None

    def start(self) -> None:
        """Recover the store, bind the ports, start the threads. If this fails, no thread runs.

        Raises StoreInUseError, StoreBrokenError or StoreError if the store cannot be opened,
        ConfigError if a port cannot be bound.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Stop cleanly: refuse puts, answer waiting puts, close links, sync and close the store.

        Each step runs even if an earlier one fails; the first failure is raised.
        """
        raise NotImplementedError

    @property
    def settled(self) -> threading.Event:
        """Set once the node serves, or has logged what it waits for."""
        raise NotImplementedError

    @property
    def reason(self) -> str | None:
        """Why the node does not serve yet."""
        raise NotImplementedError

    def wake(self) -> None:
        """Read the configuration again now, after SIGHUP."""
        raise NotImplementedError

    @property
    def role_text(self) -> str:
        """The fields of the ready line that depend on the mode: the role, and what goes with it."""
        raise NotImplementedError

    @property
    def http_address(self) -> str:
        """The address that the HTTP port is bound to; before `start`, the configured one."""
        return self._http.address if self._http is not None else self._own_address("http")

    def _access(self) -> Access | None:
        """Return what asks the API's clients who they are; None if any client may do anything."""
        if self.identities is None:
            return None
        return Access(self.identities, self.audit.note, clock=self._clock)

    def _identities_changed(self, changes: Changes) -> None:
        for outcome in ("added", "changed", "revoked"):
            for name in getattr(changes, outcome):
                log.warning("identity %s: %s", name, outcome)
                self.audit.note("identity", outcome=outcome, identity=name)
        if changes.problem is not None:
            self.audit.note("identities", outcome="refused", reason=changes.problem)

    def _ha_refused(self, address: str, reason: str) -> None:
        self.audit.note("ha", outcome="refused", address=address, reason=reason)

    def _tls_refused(self, port: str, address: str, reason: str) -> None:
        self.audit.note(f"tls {port}", outcome="refused", address=address, reason=reason)

    def _security_problems(self) -> list[str]:
        found = [self.audit.problem] if self.audit.problem is not None else []
        if self.identities is not None and self.identities.problem is not None:
            found.append(
                f"the changed identities are not followed: {self.identities.problem}; "
                "the last good ones stay in force"
            )
        return found + self.tls.problems()

    def _own_address(self, name: str) -> str:
        return str(getattr(self.config.nodes[self.config.node], name))

    def ready_line(self) -> str:
        """Return the line that is printed to stdout once the node serves."""
        store = self.backend.store
        return (
            f"ready node={self.config.node} {self.role_text} "
            f"api={self.api.endpoint} ha={self.ha_address} http={self.http_address} "
            f"min_offset={store.min_offset} max_offset={store.max_offset}"
        )

    def _bind(self, bind_ha: Callable[[str], str]) -> None:
        """Bind the three ports; `bind_ha` binds the HA port and returns the real address.

        The API and the audit log start too, once all ports are bound.
        """
        self.backend.security_problems = self._security_problems
        try:
            self.ha_address = bind_ha(self.ha_address)
        except OSError as error:
            raise ConfigError(
                f"cannot bind the HA port {self.ha_address}: {error.strerror or error}; free "
                "the address or "
                "change the node's `ha`"
            ) from error
        access = None
        if self.identities is not None:
            access = HttpAccess(self.identities, self.audit.note, self._clock)
        self._http = HttpServer(
            self._own_address("http"),
            self.backend.status,
            lambda: render_metrics(self.backend.status()),
            access=access,
            tls=self.tls.http,
            on_failure=self._on_failure,
        )
        self._http.on_tls_failure = partial(self._tls_refused, "http")
        self.api.on_tls_failure = partial(self._tls_refused, "api")
        self.api.start()
        self.audit.start()
        if self._identity_reader is not None:
            self._identity_reader.start()

    def _stop_security(self) -> None:
        if self._identity_reader is not None:
            self._identity_reader.stop()
        self.audit.stop()

    def _stop_http(self) -> None:
        if self._http is not None:
            self._http.stop()

    def _run_steps(self, steps: Iterable[Callable[[], object]]) -> Exception | None:
        """Run each step even if an earlier one fails; return the first failure."""
        failure: Exception | None = None
        for step in steps:
            try:
                step()
            except Exception as error:
                log.exception("a step of the node's stop failed")
                failure = failure or error
        return failure

    def _on_failure(self, name: str, failure: BaseException) -> None:
        """Record a failure; the failing thread calls this.

        The failure of a service ends the node. A failure of the store ends it only if the store's
        folder was moved or removed; otherwise the node goes on and shows the reason.
        """
        log.critical("%s failed: %s", name, failure)
        if name != "store":
            with self._failing:
                if self.backend.failure is None:  # keep the first: it may have caused the others
                    self.backend.failure = f"{name} failed: {failure!r}"
        if name != "store" or isinstance(failure, StoreMovedError):
            self.failed.set()


def refuse_other_log(fs: FileSystem, config: Config) -> None:
    """Raise StoreError if the store has a log that this node would ignore in silence."""
    problem = other_log_problem(fs, config.store.root, config.mode, config.node)
    if problem is not None:
        raise StoreError(problem)


def store_host(api: str) -> Host:
    """Return the node's address as written into stored records; a host name is resolved."""
    endpoint = parse_address(api.removeprefix("tcp://"))
    assert endpoint is not None, "the configuration was checked"
    host, port = endpoint
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
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
