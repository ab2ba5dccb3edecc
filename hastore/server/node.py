"""Node: a node of mode classic; `run_node` (server/run.py) runs it as a process."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.checks import remoting_refusal
from hastore.config.classic_key import read_credentials
from hastore.config.model import Config, NodeAddress
from hastore.counters import ReplicationCounts
from hastore.fs.filesystem import REAL, FileSystem
from hastore.ha.hello.forward_link import dial_member
from hastore.ha.hello.peer import Call
from hastore.ha.master.group_transfer import GroupTransferService
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.ha.replica.rewind import finish_cut
from hastore.ha.rules.epochs import CLASSIC_EPOCH, EpochStarts
from hastore.protocol.hello import Purpose
from hastore.record.delays import parse_levels
from hastore.registry.remembered import RegistryMemory
from hastore.server.backend import NodeBackend
from hastore.server.base_node import BaseNode, read_secret, store_host
from hastore.server.broker_tables import LogRange
from hastore.server.broker_tables_service import BrokerTables, broker_address
from hastore.server.callbacks import connect_replication, connect_roles
from hastore.server.http_server import HttpServer
from hastore.server.kept_positions import KeptPositions
from hastore.server.retention_service import RetentionService
from hastore.server.role_service import RoleService
from hastore.server.role_source import OneShotFlags, RegistryRoles
from hastore.server.take_over import TakeOver
from hastore.store.message_store import MessageStore

if TYPE_CHECKING:  # it needs kazoo
    from hastore.registry.cluster_notes import ClusterNotes

log = logging.getLogger(__name__)

REGISTRY_WAIT_S = 2.0  # for its first answer, and for its end


class Node(BaseNode):
    """One node of mode classic. `start` and `stop` are called once each, from the same thread.

    `config_refused_ms` returns when the file was refused first, as it is now; see ConfigWatch.
    """

    backend: NodeBackend
    roles: RoleService

    def __init__(
        self,
        config: Config,
        read_config: Callable[[], Config | None],
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        config_path: str | None = None,
        config_problem: Callable[[], str | None] = lambda: None,
        config_refused_ms: Callable[[], float | None] = lambda: None,
        parse: Callable[[str, str], Config] | None = None,
    ) -> None:
        """Prepare; `read_config` returns the configuration once after each change of the file."""
        super().__init__(config, fs, clock, config_path, config_problem, parse)
        root, fail, read_config = config.store.root, self._on_failure, self._noted(read_config)
        own = store_host(config)
        self.store = MessageStore(config.store, fs=fs, clock=clock, store_host=own, on_failure=fail)
        self.member = Member(
            config, self.store, self.state, clock, read_secret(config, fs),
            tls=self.tls.ha, on_refused=self._ha_refused, on_failure=fail,
        )  # fmt: skip
        self.transfer = GroupTransferService(
            clock,
            self.store.flush_service.request,
            on_failure=fail,
            always_flush=self.member.counts_flushed,
        )
        self.ha = HAService(self.member, self.transfer)
        self._memory = RegistryMemory(fs, root, config.node)
        self._from_registry = None if config.registry is None else RegistryRoles(
            config, read_config, self._memory, lambda: self.state.data.store_id,
            fs=fs, clock=clock, on_addresses=self.member.relocate, on_failure=fail,
            greatest_epoch=lambda: max(self.state.data.promised_epoch, self.state.last_epoch),
        )  # fmt: skip
        self.registry = None if self._from_registry is None else self._from_registry.registry
        self.roles = RoleService(
            self.member,
            self.ha,
            self._from_registry or OneShotFlags(fs, root, clock),
            read_config if self._from_registry is None else self._from_registry.read,
            on_change=self._role_changed,
            refused_ms=config_refused_ms if config.registry is None else lambda: None,
        )
        self.retention = RetentionService(
            config.store.retention,
            self.store,
            KeptPositions(fs, root, lambda: self.state.data.aside, clock),
            clock,
            open_epoch=lambda: self.member.open_epoch,
            confirms=lambda: self.member.confirms,
            needed_from=self.ha.slave_offsets,
            put=self._put_again,
            on_failure=fail,
            waiting_from=self._waiting_from,
        )
        self.scrub = self._make_scrub(self.store)
        self.take_over = TakeOver(
            fs, root, self.store, clock,
            open_epoch=lambda: self.member.open_epoch, kept=self.retention.kept.find,
        )  # fmt: skip
        self.backend = NodeBackend(
            self, self.member, self.store, self.ha, self.transfer, self.retention, self.roles,
            self.registry, self.take_over,
        )  # fmt: skip
        self.broker_tables = self._make_broker_tables(config, fs, clock)
        self.delays = self._make_delays(self.backend, self.take_over)
        self.api = self._make_api(self.backend)
        self.notes = self._make_notes(config)
        connect_replication(self.store, self.ha)
        connect_roles(self.member, self.roles, self.registry, self.take_over)

    def _make_notes(self, config: Config) -> "ClusterNotes | None":
        """Return what tells groups of each other; None if RocketMQ's clients are not served."""
        if self._from_registry is None or remoting_refusal(config) is not None:
            return None
        return self._from_registry.make_notes(
            own=self.name_servers.note, on_notes=self.elsewhere.take
        )

    def _make_broker_tables(
        self, config: Config, fs: FileSystem, clock: Clock
    ) -> BrokerTables | None:
        ha = config.ha
        if ha.classic_master is None:
            return None
        key_file = ha.classic_key_file
        made = BrokerTables(
            fs, config.store.root, broker_address(ha.classic_master, ha.classic_broker),
            lambda: None if key_file is None else read_credentials(key_file), clock,
            group=config.group, follows=lambda: self.backend.classic_master() is not None,
            own_log=self._copied_log, file_size=self.store.file_size,
            delays_ms=parse_levels(config.store.message_delay_level),
            on_failure=self._on_failure,
        )  # fmt: skip
        self.backend.classic_lag = made.lag
        return made

    def _copied_log(self) -> LogRange | None:
        """Return where the log of a RocketMQ master's slave is; None if it has an own epoch."""
        if self.member.open_epoch or self.member.state.last_epoch != CLASSIC_EPOCH:
            return None
        return LogRange(self.store.min_offset, self.store.max_offset)

    def own_problems(self) -> list[str]:
        """Return what is wrong with this node itself, and with what a broker hands over."""
        asked = [] if self.broker_tables is None else self.broker_tables.problems()
        taken = [] if self.take_over.problem is None else [self.take_over.problem]
        told = [] if self.notes is None or self.notes.problem is None else [self.notes.problem]
        return [*super().own_problems(), *asked, *taken, *told]

    def own_notes(self) -> list[str]:
        """Return what is worth knowing of the RocketMQ broker that this node follows."""
        return [] if self.broker_tables is None else self.broker_tables.notes()

    def _role_changed(self, action: str, outcome: str, reason: str) -> None:
        if outcome == "asked":
            reason += ", by the node's file" if self.registry is None else ", by ZooKeeper"
        self.audit.note(action, outcome=outcome, reason=reason)

    def wake(self) -> None:
        """Read the configuration again now, after SIGHUP, and what ZooKeeper has."""
        super().wake()
        if self.registry is not None:
            self.registry.wake()

    @property
    def role_text(self) -> str:
        """The fields of the ready line that depend on the mode."""
        return f"role={self.roles.role} epoch={self.state.last_epoch}"

    @property
    def _known_nodes(self) -> Mapping[int, NodeAddress]:
        return self.roles.latest_config.nodes

    @property
    def _links(self) -> HAService:
        return self.ha

    @property
    def _replication(self) -> ReplicationCounts:
        return self.member.counts

    def _dial_forward(self, node: int, timeout_ms: float) -> Call:
        return dial_member(self.member, node, timeout_ms)

    def _dial_repair(self, node: int, start: int, end: int) -> Call:
        timeout_ms = self.config.ha.hello_timeout_ms
        return dial_member(
            self.member, node, timeout_ms, Purpose.REPAIR, copy_from=start, copy_to=end
        )

    def _own_epochs(self) -> EpochStarts:
        return [(entry.epoch, entry.start) for entry in self.state.history]

    def _open_store(self) -> None:
        if self.registry is not None:
            self.registry.load()
        else:
            self._memory.forget()
        state = self.state
        known = state.has_started
        alone = state.is_alone(self.config.nodes)
        if self.store.limits_lost(known=known):  # the open makes a new page
            state.note_lost_limits(alone=alone)
        if self.store.sync_failed():  # the same
            state.note_failed_sync(alone=alone)
        intent = state.data.intent
        self.store.open(
            intent_offset=None if intent is None else intent.offset,
            from_rocketmq=state.last_epoch == CLASSIC_EPOCH,
            rocketmq_end=state.rocketmq_end,
            known=known,
            on_doubt=lambda end: state.note_doubt(end, alone=alone),
        )

    def _prepare(self) -> None:
        """Finish a rewind that a crash interrupted, and mark the store unclean if a power loss may
        have taken bytes.
        """
        config, state, store = self.config, self.state, self.store
        if not self._fs.exists(f"{config.store.root}/hastore/node.json") and store.max_offset > 0:
            log.warning(
                "this store has a log but no node state: its bytes count as written by an unknown "
                "master until they have been compared with a master's log"
            )
        finish_cut(store, state)
        alone = state.is_alone(config.nodes)
        state.begin_boot(config.ha.ack_point.value, alone=alone, log_end=store.max_offset)
        # Readers get the log up to the confirmed offset; if the log is a RocketMQ master's, up to
        # the whole offset. A link, or the opening of an epoch, sets a new limit later.
        classic = config.ha.classic_master is not None and state.last_epoch == CLASSIC_EPOCH
        limit = store.whole_offset if classic else min(store.confirmed_offset, store.max_offset)
        store.set_limits(readable=limit)

    def _start_threads(self, http: HttpServer) -> None:
        self.transfer.start()
        self.ha.acceptor.start()
        http.start()
        self.retention.start()
        self.scrub.start()
        self.delays.start()
        if self.broker_tables is not None:
            self.broker_tables.start()
        if self._from_registry is not None:  # begin in the role that ZooKeeper has, if it answers
            registry = self._from_registry.registry
            registry.start()
            if not registry.settled.wait(REGISTRY_WAIT_S):
                log.warning("the registry has not answered yet; the node starts in its last role")
            self.roles.begin_with(self._from_registry.first())
        self.roles.start()
        if self.notes is not None:
            self.notes.start()

    def _stop_steps(self) -> Iterable[Callable[[], object]]:
        if self.registry is not None:
            registry = self.registry
            yield lambda: registry.stop(REGISTRY_WAIT_S)
        if self.notes is not None:
            notes = self.notes
            yield lambda: notes.stop(REGISTRY_WAIT_S)
        if self.broker_tables is not None:
            yield self.broker_tables.stop
        yield self.roles.stop
        yield self.scrub.stop
        yield self.retention.stop
        yield self.delays.stop
        yield self.member.step_down
        yield self.member.gate.close  # also for a link that did not end in time
        yield lambda: self.ha.close_epoch("the node stops")
        yield self.transfer.stop
        yield self.api.stop
        yield self.ha.stop

    def _close_store(self, clean: bool) -> None:
        clean = clean and self.store.broken_reason is None
        try:
            self.store.close(unlock=False)
            if clean:
                self.state.end_cleanly()
        finally:
            self.store.unlock()  # after node.json is written: the next start reads it
