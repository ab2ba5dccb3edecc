"""DLedgerNode: a node of a group that elects its leader; `run_node` (server/run.py) runs it."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, NodeAddress, StoreKind
from hastore.counters import ReplicationCounts
from hastore.dledger.core.events import Settings
from hastore.dledger.driver.driver import DLedgerDriver
from hastore.dledger.driver.joining import refuse_lost_identity
from hastore.dledger.driver.requests import RequestFile, RequestOutcome
from hastore.dledger.links.channel import LinkTimes
from hastore.dledger.links.peer_links import PeerLinks, PeerMember
from hastore.dledger.store.mmap_file_store import (
    DLedgerMemoryStore,
    DLedgerMmapFileStore,
    EntryStore,
)
from hastore.errors import UsageError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.ha.hello.peer import Call
from hastore.ha.master.group_transfer import GroupTransferService, Outcome
from hastore.server.administration import Leading
from hastore.server.backend import DLedgerBackend, follower_name
from hastore.server.base_node import BaseNode, read_secret, store_host
from hastore.server.callbacks import connect_driver
from hastore.server.http_server import HttpServer
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
    roles: "GroupService"

    def __init__(
        self,
        config: Config,
        read_config: Callable[[], Config | None],
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        config_path: str | None = None,
        config_problem: Callable[[], str | None] = lambda: None,
        parse: Callable[[str, str], Config] | None = None,
    ) -> None:
        """Prepare; `read_config` returns the configuration once after each change of the file."""
        super().__init__(config, fs, clock, config_path, config_problem, parse)
        root, fail, read_config = config.store.root, self._on_failure, self._noted(read_config)
        self.store = _make_store(config, fs, clock, fail)
        messages = self.store.messages
        member = PeerMember(
            config,
            self.state,
            read_secret(config, fs),
            lambda: (messages.min_offset, messages.max_offset),
            self.tls.ha,
            on_refused=self._ha_refused,
        )
        self.transfer = GroupTransferService(  # holds puts until a majority has them
            clock,
            messages.flush_service.request,
            on_failure=fail,
            late=lambda _need: Outcome.WAIT_QUORUM_ACK_TIMEOUT,
            over=lambda _need: Outcome.TERM_CHANGED,
        )
        self.driver = DLedgerDriver(
            member,
            self.store,
            settings_of(config),
            clock,
            self.transfer,
            RequestFile(fs, root, clock, on_outcome=self._request_ended),
            times=LinkTimes.of_election(config.dledger.election_timeout_ms),
            on_failure=fail,
        )
        self.retention = RetentionService(
            config.store.retention,
            messages,
            KeptPositions(fs, root, lambda: 0, clock),  # every log of the group is the same
            clock,
            open_epoch=lambda: self.driver.term if self.driver.is_leader else 0,
            confirms=lambda: True,
            needed_from=self._needed_from,
            put=self._put_again,
            on_failure=fail,
            keep_unconfirmed=True,
            before_removal=self._before_removal,
            waiting_from=self._waiting_from,
        )
        self.scrub = self._make_scrub(messages)
        self.backend = DLedgerBackend(self, config, self.driver, self.transfer, self.retention)
        self.delays = self._make_delays(self.backend)
        self.api = self._make_api(self.backend, always_all=True, leading=self._leading)
        self.roles = GroupService(self.driver, self.backend, read_config, clock, on_failure=fail)
        connect_driver(self.store, self.driver, self.roles.note_leader)

    def _leading(self) -> Leading:
        core = self.driver.core
        if core is None:
            return Leading(False, None, None)
        group = core.group
        return Leading(self.driver.is_leader, core.leader, (*group.members, *group.learners))

    def _request_ended(self, request: RequestOutcome) -> None:
        reason = f"node {request.node}" + (f": {request.reason}" if request.reason else "")
        outcome = str(request.outcome).lower()
        self.audit.note(f"dledger {request.command}", outcome=outcome, reason=reason)

    def _needed_from(self) -> dict[str, int]:
        """Return from which offset on each follower needs the log, by its name."""
        first, end = self.store.begin_index - 1, self.store.end_index
        try:
            return {
                follower_name(one.node): self.store.end_position(max(first, min(one.index, end)))
                for one in self.driver.followers()
            }
        except UsageError:  # a new leader has just cut the log: this node has no followers
            return {}

    def _before_removal(self, first_offset: int) -> None:
        """Let the core forget the entries that retention is about to remove."""
        self.driver.retained(self.store.index_at(first_offset) + 1)

    @property
    def role_text(self) -> str:
        """The fields of the ready line that depend on the mode."""
        status = self.driver.status()
        names = ("role", "term", "ledger_end_index", "committed_index")
        return " ".join(f"{name}={status[name]}" for name in names) + f" epoch={status['term']}"

    @property
    def _known_nodes(self) -> Mapping[int, NodeAddress]:
        return self.backend.latest_config.nodes

    @property
    def _links(self) -> PeerLinks:
        return self.driver.links

    @property
    def _replication(self) -> ReplicationCounts:
        return self.driver.counts

    def _dial_forward(self, node: int, timeout_ms: float) -> Call:
        return self.driver.links.dial_forward(node, timeout_ms)

    def _dial_repair(self, node: int, start: int, end: int) -> Call:
        timeout_ms = self.config.ha.hello_timeout_ms
        return self.driver.links.dial_repair(node, start, end, timeout_ms)

    def _open_store(self) -> None:
        # Before this version writes there again: a crash in between must not lose the trace.
        if not self.state.is_new and self.store.messages.is_of_version_before():
            self.state.forget_proved()
        self.store.open()

    def _prepare(self) -> None:
        """Refuse a store that has lost the group's members."""
        refuse_lost_identity(self.driver.member, self.store)

    def _start_threads(self, http: HttpServer) -> None:
        self.transfer.start()
        self.driver.start()
        http.start()
        self.retention.start()
        self.scrub.start()
        self.delays.start()
        self.roles.start()

    def _stop_steps(self) -> Iterable[Callable[[], object]]:
        yield self.roles.stop
        yield self.scrub.stop
        yield self.retention.stop
        yield self.delays.stop
        yield self.driver.stop  # it hands over first
        yield self.transfer.stop
        yield self.api.stop

    def _close_store(self, clean: bool) -> None:
        self.store.close()


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
        self._asks_ms = 0.0  # when a node without a leader asks whether it was removed

    def run(self) -> None:
        """Look at the file and the group until stopped."""
        patience_ms = SETTLE_ELECTIONS * self._backend.latest_config.dledger.election_timeout_ms
        says_ms = self._asks_ms = self._clock.monotonic_ms() + patience_ms
        while not self.stopping.is_set():
            self._follow_file()
            self.note_leader()
            self._ask_if_alone(patience_ms)
            if not self.settled.is_set() and self._clock.monotonic_ms() >= says_ms:
                # A node that is to be added waits for that: it is started before.
                level = logging.INFO if self._waits_to_be_added() else logging.WARNING
                log.log(level, "the node serves no puts yet: %s", self.reason)
                self.settled.set()
            self._wakeup.wait(TICK_S if self.settled.is_set() else START_TICK_S)
            self._wakeup.clear()

    @property
    def reason(self) -> str | None:
        """Why the node does not serve yet."""
        return self._backend.writable_reason()

    def _waits_to_be_added(self) -> bool:
        core = self._driver.core
        return core is not None and core.removed is None and core.node not in core.members

    def note_leader(self) -> None:
        """Note whether this node takes puts or knows who does; each change of role calls this."""
        core = self._driver.core
        if core is None or core.leader is None or self.settled.is_set():
            return
        if not self._driver.is_leader or self.reason is None:
            self.settled.set()

    def _ask_if_alone(self, patience_ms: float) -> None:
        """Without a leader for long, ask those that would call this node whether it was removed."""
        core, now = self._driver.core, self._clock.monotonic_ms()
        if core is None or core.leader is not None or self._driver.outdated() is not None:
            self._asks_ms = now + patience_ms
        elif now >= self._asks_ms:
            self._asks_ms = now + patience_ms
            self._driver.links.ask_callers()

    def _follow_file(self) -> None:
        config = self._read_config()
        if config is None:
            return
        self._backend.latest_config = config
        self._driver.set_addresses({node: one.ha for node, one in config.nodes.items()})

    def wake(self) -> None:
        """Let the thread read the file now. Called after SIGHUP, and by `stop`."""
        self._wakeup.set()


def _make_store(config: Config, fs: FileSystem, clock: Clock, on_failure: OnFailure) -> EntryStore:
    host = store_host(config)
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
