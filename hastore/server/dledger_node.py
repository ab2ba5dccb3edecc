"""DLedgerNode: a node of a group that elects its leader; `run_node` in server/node.py runs it."""

import logging
import threading
from collections.abc import Callable

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.checks import config_notes
from hastore.config.model import Config, StoreKind
from hastore.dledger.core.events import Settings
from hastore.dledger.driver.driver import DLedgerDriver
from hastore.dledger.driver.requests import RequestFile, RequestOutcome
from hastore.dledger.links.peer_links import PeerMember
from hastore.dledger.store.mmap_file_store import (
    DLedgerMemoryStore,
    DLedgerMmapFileStore,
    EntryStore,
)
from hastore.errors import StoreError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.ha.node.node_state import NodeState
from hastore.server.api.server import ApiServer
from hastore.server.base_node import BaseNode, read_secret, refuse_other_log, store_host
from hastore.server.dledger_backend import DLedgerBackend, follower_name, make_transfer
from hastore.server.kept_positions import KeptPositions
from hastore.server.retention_service import RetentionService
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

SETTLE_ELECTIONS = 6  # after so many election timeouts without a leader the node says so
TICK_S = 0.5  # how often the configuration file is looked at
START_TICK_S = 0.02  # until a leader is known


def settings_of(config: Config) -> Settings:
    """Return the core's settings."""
    group = config.dledger
    return Settings(
        election_timeout_ms=group.election_timeout_ms,
        heartbeat_interval_ms=group.heartbeat_interval_ms,
        append_timeout_ms=group.append_timeout_ms,
        resend_ms=group.resend_timeout_ms,
        pending_max=group.max_pending_entries,
        in_flight_bytes=group.max_in_flight_bytes,
        in_flight_pushes=group.max_in_flight_pushes,
        batch_bytes=group.push_batch_size,
        transfer_gap=group.transfer_gap,
        transfer_timeout_ms=group.transfer_timeout_ms,
        preferred_leader=group.preferred_leader,
    )


class DLedgerNode(BaseNode):
    """One node of mode dledger. `start` and `stop` are called once each, from the same thread."""

    backend: DLedgerBackend

    def __init__(
        self,
        config: Config,
        read_config: Callable[[], Config | None],
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(config, fs, clock)
        root, own = config.store.root, config.nodes[config.node]
        self.store: EntryStore = _make_store(config, fs, clock, self._on_failure)
        messages = self.store.messages
        self.state = NodeState(fs, root)
        member = PeerMember(
            config,
            self.state,
            read_secret(config, fs),
            lambda: (messages.min_offset, messages.max_offset),
            self.tls.ha,
        )
        member.on_refused = self._ha_refused
        self.transfer = make_transfer(clock, messages.flush_service.request, self._on_failure)
        self.driver = DLedgerDriver(
            member,
            self.store,
            settings_of(config),
            clock,
            self.transfer,
            RequestFile(fs, root, clock, on_outcome=self._request_ended),
            on_failure=self._on_failure,
        )
        self.backend = DLedgerBackend(config, self.driver, self.transfer)
        self.api = ApiServer(
            own.api,
            self.backend,
            config.api,
            clock=clock,
            on_failure=self._on_failure,
            always_all=True,
            tls=self.tls.api,
            access=self._access(),
        )
        self._kept = KeptPositions(fs, root, lambda: 0, clock)  # every log of the group is the same
        self.retention = RetentionService(
            _Leading(config, self.driver),
            messages,
            _Followers(self.driver),
            self._kept,
            self.backend.put_encoded,
            clock,
            on_failure=self._on_failure,
            keep_unconfirmed=True,
            before_removal=self._before_removal,
        )
        self.backend.watch_retention(self.retention, self._kept)
        self._group = GroupService(
            self.driver, self.backend, read_config, clock, on_failure=self._on_failure
        )
        self.driver.on_role = self._group.look

    def _request_ended(self, request: RequestOutcome) -> None:
        reason = f"node {request.node}" + (f": {request.reason}" if request.reason else "")
        outcome = str(request.outcome).lower()
        self.audit.note(f"dledger {request.command}", outcome=outcome, reason=reason)

    @property
    def settled(self) -> threading.Event:
        """Set once a leader is known, or the node has logged what it waits for."""
        return self._group.settled

    @property
    def reason(self) -> str | None:
        """Why the node does not serve yet."""
        return self.backend.writable_reason()

    def wake(self) -> None:
        """Read the configuration again now, after SIGHUP."""
        self._group.wake()

    @property
    def role_text(self) -> str:
        """The fields of the ready line that depend on the mode."""
        status = self.driver.status()
        names = ("role", "term", "ledger_end_index", "committed_index")
        return " ".join(f"{name}={status[name]}" for name in names) + f" epoch={status['term']}"

    def start(self) -> None:
        """Recover the store, bind the ports, start the threads. If this fails, no thread runs.

        Raises StoreInUseError, StoreBrokenError or StoreError if the store cannot be opened,
        ConfigError if a port cannot be bound.
        """
        for note in config_notes(self.config):
            log.warning("%s", note)
        self._open_store()
        try:
            self._kept.load()
            self._bind(self.driver.links.bind)
        except BaseException:
            self.driver.links.stop()
            self.store.close()
            raise
        self.transfer.start()
        self.driver.start()
        if self._http is not None:
            self._http.start()
        self.retention.start()
        self._group.start()

    def _open_store(self) -> None:
        config, messages = self.config, self.store.messages
        try:
            messages.lock()  # before node.json is read: another process may write it
            try:
                refuse_other_log(self._fs, config)
                self.state.load(config.node, config.cluster, config.group)
                self.store.open()
            except BaseException:
                messages.unlock()
                raise
        except OSError as error:
            raise StoreError(
                f"{config.store.root}: the store cannot be opened: {error}; `store.root` must be a "
                "directory that this user may read and write"
            ) from error

    def _before_removal(self, first_offset: int) -> None:
        """Let the core forget the entries that retention is about to remove."""
        self.driver.retained(self.store.index_at(first_offset) + 1)

    def stop(self) -> None:
        """Stop cleanly: refuse puts, hand over, answer waiting puts, sync and close the store.

        Each step runs even if an earlier one fails; the first failure is raised.
        """
        self.backend.begin_stop()
        failure = self._run_steps(
            (
                self._group.stop,
                self.retention.stop,
                self.driver.stop,
                self.transfer.stop,
                self.api.stop,
                self._stop_http,
                self._stop_security,
            )
        )
        self.store.close()
        if failure is not None:
            raise failure


class GroupService(Service):
    """Follow the configuration file, and notice when the group has a leader.

    Of a changed file only `nodes` is in force at once: addresses, and nodes that become members
    later. `settled` is set once a leader is known, or the log says what the node waits for.
    """

    def __init__(
        self,
        driver: DLedgerDriver,
        backend: DLedgerBackend,
        read_config: Callable[[], Config | None],
        clock: Clock,
        *,
        on_failure: OnFailure,
    ) -> None:
        super().__init__("GroupService", on_failure=on_failure)
        self.settled = threading.Event()
        self._driver = driver
        self._backend = backend
        self._read_config = read_config
        self._clock = clock
        self._wakeup = threading.Event()

    def run(self) -> None:
        """Look at the file and the group until stopped."""
        patience_ms = SETTLE_ELECTIONS * self._backend.latest_config.dledger.election_timeout_ms
        says_ms = self._clock.monotonic_ms() + patience_ms
        while not self.stopping.is_set():
            self._follow_file()
            self.look()
            if not self.settled.is_set() and self._clock.monotonic_ms() >= says_ms:
                log.warning("the node serves no puts yet: %s", self._backend.writable_reason())
                self.settled.set()
            self._wakeup.wait(TICK_S if self.settled.is_set() else START_TICK_S)
            self._wakeup.clear()

    def look(self) -> None:
        """Note whether this node takes puts or knows who does; each change of role calls this."""
        core = self._driver.core
        if core is None or core.leader is None or self.settled.is_set():
            return
        if not self._driver.is_leader or self._backend.writable_reason() is None:
            self.settled.set()

    def _follow_file(self) -> None:
        config = self._read_config()
        if config is None:
            return
        self._backend.latest_config = config
        self._driver.set_addresses({node: one.ha for node, one in config.nodes.items()})

    def wake(self) -> None:
        """Look now."""
        self._wakeup.set()


class _Leading:
    """This node as the writer of its log, for retention."""

    confirms = True

    def __init__(self, config: Config, driver: DLedgerDriver) -> None:
        self.config = config
        self._driver = driver

    @property
    def open_epoch(self) -> int:
        """The term in which this node leads; 0: none."""
        return self._driver.term if self._driver.is_leader else 0


class _Followers:
    """The followers' water marks, for retention."""

    def __init__(self, driver: DLedgerDriver) -> None:
        self._driver = driver

    def slave_offsets(self) -> dict[str, int]:
        """Return from which offset on each of them needs the log, by its name."""
        store = self._driver.store
        first, end = store.begin_index - 1, store.end_index
        return {
            follower_name(one.node): store.end_position(max(first, min(one.index, end)))
            for one in self._driver.followers()
        }


def _make_store(config: Config, fs: FileSystem, clock: Clock, on_failure: OnFailure) -> EntryStore:
    host = store_host(config.nodes[config.node].api)
    if config.store.kind is StoreKind.MEMORY:
        return DLedgerMemoryStore(
            config.store, node=config.node, clock=clock, store_host=host, on_failure=on_failure
        )
    return DLedgerMmapFileStore(
        config.store,
        node=config.node,
        fs=fs,
        clock=clock,
        store_host=host,
        on_failure=on_failure,
    )
