"""A node as its client API, its HTTP port and `hastore status` see it: put, roles, status.

NodeBackend (mode classic) and DLedgerBackend (mode dledger) implement ApiBackend
(server/api/backend.py); what both do is in BaseBackend. They append puts, and otherwise only read
the state of store, replication and role. Any thread may call every method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from hastore import __version__
from hastore.config.checks import remoting_refusal
from hastore.config.model import Config, Flush, Role, StoreKind
from hastore.errors import (
    STORE_CLOSED,
    NotStoredError,
    Status,
    StoreError,
    StoreFullError,
    UsageError,
)
from hastore.ha.master.group_transfer import GroupTransferService, Need
from hastore.ha.rules.epochs import (
    CLASSIC_EPOCH,
    EpochStarts,
    Standing,
    check_position,
    epoch_node,
    last_epoch,
)
from hastore.ha.rules.following import written_over_text
from hastore.protocol.api import MapInfo
from hastore.protocol.dledger import Code
from hastore.server.api.backend import ApiWaker
from hastore.server.callbacks import connect_api
from hastore.server.classic_slaves import ClassicSlaves
from hastore.server.remoting.acl import AclCounts
from hastore.server.remoting.forwarding import ForwardCounts
from hastore.server.role_service import RoleMode
from hastore.server.role_source import has_left, pending_changes
from hastore.store.append.results import Guards, Payload, PutResults

if TYPE_CHECKING:  # a node loads only what its mode needs
    from hastore.dledger.driver.driver import DLedgerDriver
    from hastore.dledger.driver.status import FollowerStatus
    from hastore.ha.master.ha_service import HAService
    from hastore.ha.node.member import Member
    from hastore.registry.node_registry import NodeRegistry
    from hastore.server.retention_service import RetentionService
    from hastore.server.role_service import RoleService
    from hastore.server.take_over import TakeOver
    from hastore.store.log_store import LogStore
    from hastore.store.message_store import MessageStore

_STREAMING = ("APPEND", "COMMIT")  # states of an EntryDispatcher whose follower is up to date


class NodeProcess(Protocol):
    """What a backend shows of the node around it: BaseNode."""

    failure: str | None  # which thread failed, and why; the node then ends
    config_path: str | None  # the absolute path of the file that the node follows
    forward_counts: ForwardCounts
    acl_counts: AclCounts

    def own_problems(self) -> list[str]:
        """Return what is wrong with the changed file, the identities, TLS and the audit log."""
        ...

    def own_notes(self) -> list[str]:
        """Return what is worth knowing of this node, and alarms nobody."""
        ...

    def scrub_status(self) -> dict[str, Any]:
        """Return how far the log was scrubbed, what was found, and what was repaired."""
        ...

    def quota_status(self) -> dict[str, Any]:
        """Return what the identities with a quota have asked of this node."""
        ...

    def delayed_status(self) -> dict[str, Any]:
        """Return how many delayed messages wait, and what became of others."""
        ...

    def client_connections(self) -> int:
        """Return how many clients are connected."""
        ...

    def name_server_status(self) -> list[dict[str, Any]]:
        """Return RocketMQ's name servers, and as what this node is registered there."""
        ...


class BaseBackend:
    """The part of a node's ApiBackend that does not depend on its mode."""

    def __init__(
        self,
        node: NodeProcess,
        store: LogStore,
        transfer: GroupTransferService,
        retention: RetentionService,
    ) -> None:
        self.store = store
        self.transfer = transfer
        self.kept_positions = retention.kept.find
        self._node = node
        self._retention = retention
        self._stopping = False
        self._full = False  # the store had no room for the last put

    def attach_api(self, api: ApiWaker) -> None:
        """Let store and waiting puts wake the API from now on."""
        connect_api(self.store, self.transfer, api)

    def begin_stop(self) -> None:
        """Refuse puts from now on."""
        self._stopping = True

    @property
    def ends(self) -> bool:
        """Whether this process takes no puts any more: the node stops, or a thread has failed."""
        return self._stopping or self._node.failure is not None

    def writable_reason(self) -> str | None:
        """Return why puts are refused; None while they are accepted."""
        if self._node.failure is not None:
            return f"the node ends: {self._node.failure}"
        if self._stopping:
            return "the node is shutting down"
        if self.store.broken_reason is not None:
            return f"{STORE_CLOSED}{self.store.broken_reason}"
        reason = self._role_reason()
        if reason is None and self._full:
            reason = self.store.no_room
            self._full = reason is not None
        return reason

    def outdated(self) -> str | None:
        """Return why this node serves no reads; None while it does."""
        return None

    def _full_follower(self) -> str | None:
        """Return why a node that follows a master takes nothing; None while its disk has room."""
        raise NotImplementedError

    def positions_wait(self) -> bool:
        """Whether this node is the master and does not know its groups' positions yet."""
        return False

    def topics_wait(self) -> bool:
        """Whether this node is the master and does not know a broker's topics yet."""
        return False

    def routes_wait(self) -> bool:
        """Whether this node, master or not, will know a broker's topics in a moment."""
        return False

    def copies_broker(self) -> bool:
        """Whether this node has a broker's files, and its group has had no master of its own."""
        return False

    def positions_elsewhere(self) -> str | None:
        """Return who knows the groups' positions while this node does not; None: it does."""
        return None

    def ha_address(self, node: int) -> str | None:
        """Return where a node's HA port is now; None for a node that is not known."""
        raise NotImplementedError

    def note_classic_slave(self, address: str) -> None:
        """Nobody follows: see ApiBackend."""

    def _role_reason(self) -> str | None:
        """Return why this node takes no puts in its role; None while it does."""
        raise NotImplementedError

    def reading_nodes(self) -> Sequence[int]:
        """Return the nodes that clients may read from; see ApiBackend."""
        raise NotImplementedError

    def without_remoting(self) -> set[int]:
        """Return the linked nodes whose version knows no clients of RocketMQ."""
        raise NotImplementedError

    def _problems_of_versions(self, config: Config) -> list[str]:
        if remoting_refusal(config) is not None:
            return []
        return [
            f"node {node} runs a version that does not know RocketMQ's clients: upgrade it. While "
            "it is the master, it takes none of their requests and delivers no delayed messages, "
            "and its retention forgets topics"
            for node in sorted(self.without_remoting())
        ]

    def _map_of(
        self, config: Config, role: str, epoch: int, master: int | None, apis: dict[int, str]
    ) -> MapInfo:
        """Return this node's view of the group; `apis` are the nodes' client addresses."""
        reason = self.writable_reason()
        return MapInfo(
            node=config.node,
            role=role,
            epoch=epoch,
            writable=reason is None,
            readable_offset=self.store.readable_offset,
            master_node=master,
            master_api=None if master is None else apis.get(master),
            nodes=apis,
            reason=reason,
            default_queues=config.store.default_queues,
            min_offset=self.store.min_offset,
            cluster=config.cluster,
            group=config.group,
            queues=self.store.topic_table.other_queues,
        )

    def problems(self) -> list[str]:
        """Return the problems that an operator must look at; empty when all is well."""
        failure, clock = self._node.failure, self.store.clock_problem
        hangs = self.store.flush_service.sync_problem
        return [
            *([] if failure is None else [f"the node ends: {failure}"]),
            *self.store.problems,
            *([] if hangs is None else [hangs]),
            *([] if clock is None else [clock]),
            *self._node.own_problems(),
            *self._retention.problems(),
            *([] if self.store.rescued.problem is None else [self.store.rescued.problem]),
            *self.store.cuts.problems(),
            *self.store.transactions.problems(),
        ]

    def _refused_by_default(self, reason: str | None) -> str | None:
        """Return why a put that does not set `acks` is refused; `reason`: why all puts are."""
        if reason is not None or not self.default_acks_all():
            return reason
        return self.can_confirm(False)

    def _default_acks(self, reason: str | None) -> str | int | None:
        """Return the `acks` that counts for a put that sets none; None if no put is taken."""
        if reason is not None:
            return None
        return "all" if self.default_acks_all() else 1

    def _takes_acks(self, reason: str | None) -> list[str | int]:
        """Return the `acks` of the puts that are taken; `reason`: why all are refused."""
        if reason is not None:
            return []
        return [*(["all"] if self.can_confirm(False) is None else []), 1, 0]

    def not_master(self) -> str | None:
        """Return why a put that does not set `acks` would be refused; None if it is taken."""
        return self._refused_by_default(self.writable_reason())

    def not_ready(self) -> str | None:
        """Return why this node does not serve its role; None while it does.

        A master serves while it takes puts that do not set `acks`; another node while it follows a
        master, and its disk has room, so that its readers get what is new.
        """
        reason, role_reason = self.writable_reason(), self._role_reason()
        if role_reason is None or reason != role_reason:  # the master; or the node ends, or is full
            return self._refused_by_default(reason)
        blocked = self.store.replay.blocked_reason
        stale = self.outdated() or blocked or self._full_follower()
        return stale or (None if self.reading_nodes() else role_reason)

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put with `acks` all cannot be confirmed now; None if it can."""
        raise NotImplementedError

    def default_acks_all(self) -> bool:
        """Whether a put without `acks` waits for other nodes."""
        raise NotImplementedError

    def _common_status(
        self, config: Config, slaves: list[dict[str, Any]], unclean: bool, pending: list[Any]
    ) -> dict[str, Any]:
        """Return the fields of the status that nodes of both modes have, in their order."""
        store, reason = self.store, self.writable_reason()
        refused = self._refused_by_default(reason)
        return {
            "min_offset": store.min_offset,
            "max_offset": store.max_offset,
            "flushed_offset": store.flushed_offset,
            "confirmed_offset": store.confirmed_offset,
            "readable_offset": store.readable_offset,
            "writable": reason is None,
            "takes_default": refused is None,
            "default_refused": refused,
            "default_acks": self._default_acks(reason),
            "takes_acks": self._takes_acks(reason),
            "slaves": slaves,
            "waiting_puts": self.transfer.waiting,
            "sync_hangs": config.store.flush is Flush.SYNC
            and store.flush_service.sync_problem is not None,
            "connections": self._node.client_connections(),
            "forwarding": self._node.forward_counts.status(),
            "acl": self._node.acl_counts.status(),
            "quotas": self._node.quota_status(),
            "delayed": self._node.delayed_status(),
            "name_servers": self._node.name_server_status(),
            "transactions": store.transactions.status(),
            "topics": store.queues.topic_count,
            "rescued_bytes": store.rescued.bytes,
            "scrub": self._node.scrub_status(),
            "cuts": store.cuts.status(),
            "cut_messages": store.cuts.messages,
            "unclean": unclean,
            "reason": reason,
            "problems": self.problems(),
            "notes": [*store.cuts.notes(), *self._node.own_notes()],
            "version": __version__,
            "cluster": config.cluster,
            "group": config.group,
            "config": self._node.config_path,
            "config_pending": pending,
        }


class NodeBackend(BaseBackend):
    """A node of mode classic. It holds the write gate around a put."""

    store: MessageStore

    def __init__(
        self,
        node: NodeProcess,
        member: Member,
        store: MessageStore,
        ha: HAService,
        transfer: GroupTransferService,
        retention: RetentionService,
        roles: RoleService,
        registry: NodeRegistry | None,
        take_over: TakeOver,
    ) -> None:
        super().__init__(node, store, transfer, retention)
        self._take_over = take_over
        # How many bytes of its RocketMQ master's log this node lacks; Node sets it.
        self.classic_lag: Callable[[], int | None] = lambda: None
        self.never_flushed = ha.never_flushed
        self._member = member
        self._ha = ha
        self._classics = ClassicSlaves(member, store, member.clock, lambda: ha.classic_hosts)
        ha.refuse_classic = self._classics.refusal
        self._roles = roles
        self._registry = registry

    # -- puts --------------------------------------------------------------------------------------

    def put_encoded(self, payloads: Sequence[Payload], guards: Guards | None = None) -> PutResults:
        """Append through the write gate. Raises NotStoredError if this node is not the master."""
        member = self._member
        with member.gate.lock:
            epoch = member.open_epoch
            if not epoch or member.gate.epoch != epoch:
                reason = self.writable_reason() or "not writable"
                raise NotStoredError(reason, Status.SERVICE_NOT_AVAILABLE)
            try:
                return self.store.put_encoded(payloads, guards=guards)
            except StoreFullError:
                self._full = True  # puts are refused until there is room again
                raise

    def _full_follower(self) -> str | None:
        """Return why a node that follows a master takes nothing; None while its disk has room."""
        client = self._roles.client
        return None if client is None else client.full

    def _role_reason(self) -> str | None:
        return None if self._member.open_epoch else self._not_master_reason()

    def _not_master_reason(self) -> str:
        roles, client = self._roles, self._roles.client
        if roles.mode is not RoleMode.FOLLOWING:
            return roles.waits_for
        text = roles.reason or "this node is a slave"
        if client is not None and client.master is not None:
            return f"{text}; node {client.master} is the master"
        if client is not None and client.problem is not None:
            return f"{text}; {client.problem}"
        return text

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put with `acks` all cannot be confirmed now; None if it can."""
        return self._ha.can_confirm(flushed=sync_flush)

    def default_acks_all(self) -> bool:
        """Whether a put without `acks` waits for the slaves."""
        return self._roles.configured_role is Role.SYNC_MASTER

    def flush_each_put(self) -> bool:
        """Whether each put waits for this node's disk."""
        return self._member.config.store.flush is Flush.SYNC

    def wait_limit_ms(self, need: Need) -> float:
        """Return `store.flush_timeout` if `need` is this node's disk, else `ha.slave_timeout`."""
        config = self._member.config
        if need is Need.MASTER_DISK:
            return config.store.flush_timeout_ms
        return config.ha.slave_timeout_ms

    # -- the group ---------------------------------------------------------------------------------

    def epoch(self) -> int:
        """Return the last epoch of this node's history."""
        return self._member.open_epoch or self._member.state.last_epoch  # an open epoch is the last

    def history(self) -> Sequence[tuple[int, int]]:
        """Return the epoch history as (epoch, start offset) entries."""
        return [(entry.epoch, entry.start) for entry in self._member.state.history]

    def standing(self, history: EpochStarts, epoch: int, offset: int) -> tuple[Standing, int]:
        """Say how a position relates to this log with this history; see `check_position`."""
        return check_position(history, self.store.max_offset, epoch, offset)

    def master_map(self) -> MapInfo:
        """Return this node's view of the group."""
        member, role = self._member, self._roles.role
        master, apis = self._master_node(), member.api_addresses
        return self._map_of(member.config, role, self.epoch(), master, apis)

    def master_node(self) -> int | None:
        """Return the node that takes puts as far as this one knows; None without one.

        A candidate with this node's promise counts already: no other node can be master now.
        """
        member, client = self._member, self._roles.client
        if member.open_epoch:
            return member.config.node
        if client is not None and client.master is not None:
            return client.master
        epoch, node = (client and client.known_master) or (0, None)
        promised = member.state.data.promised_epoch
        if promised <= epoch:
            return node
        candidate = epoch_node(promised)
        is_other = candidate != member.config.node and candidate in member.nodes
        return candidate if is_other else None

    def _master_node(self) -> int | None:
        if self._member.open_epoch:
            return self._member.config.node
        client = self._roles.client
        if client is None:
            return None
        if client.master is not None:
            return client.master
        return client.known_master[1] if client.known_master is not None else None

    def reading_nodes(self) -> Sequence[int]:
        """Return the nodes that clients may read from; see ApiBackend."""
        if self._member.open_epoch:
            near = (slave for slave in self._ha.slaves() if slave.in_sync and not slave.classic)
            found = {slave.node for slave in near if slave.node is not None}
            return sorted(found - self.without_remoting())
        client = self._roles.client
        return [self._member.config.node] if client is not None and client.linked else []

    def without_remoting(self) -> set[int]:
        """Return the linked nodes whose version knows no clients of RocketMQ."""
        return self._ha.without_remoting()

    def positions_wait(self) -> bool:
        """Whether this node is the master and does not know its groups' positions yet."""
        return self._take_over.waits(self.history)

    def topics_wait(self) -> bool:
        """Whether this node is the master and does not know a broker's topics yet."""
        return self._take_over.topics_wait(self.history)

    def routes_wait(self) -> bool:
        """Whether this node, master or not, will know a broker's topics in a moment."""
        knows_master = self._master_node() is not None
        return self._take_over.routes_wait(self.history, knows_master=knows_master)

    def copies_broker(self) -> bool:
        """Whether this node has a broker's files, and its group has had no master of its own."""
        return self._take_over.copies_broker(self.history)

    def positions_elsewhere(self) -> str | None:
        """Return who knows the groups' positions while this node does not; None: it does."""
        member = self._member
        address = member.config.ha.classic_master
        if address is None or member.open_epoch or member.state.last_epoch != CLASSIC_EPOCH:
            return None
        return f"the RocketMQ master {address}"

    def classic_master(self) -> str | None:
        """Return the address of the RocketMQ master that this node follows now; None without."""
        client = self._roles.client
        follows = client is not None and client.linked and client.master is None
        return self._member.config.ha.classic_master if follows else None

    def ha_address(self, node: int) -> str | None:
        """Return where a node's HA port is now; None for a node that is not known."""
        return self._member.ha_address(node)

    def note_classic_slave(self, address: str) -> None:
        """Keep where a RocketMQ slave's broker answers."""
        self._classics.note(address)

    # -- status ------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return the problems that an operator must look at; empty when all is well."""
        found = super().problems() + self._problems_of_versions(self._member.config)
        if self._registry is not None:
            found += self._registry.problems(self._roles.role)
        if self._ha.failure is not None:
            found.append(self._ha.failure)
        if self._member.open_epoch and self.default_acks_all():
            unconfirmable = self.can_confirm(False)
            if unconfirmable is not None:
                found.append(f"synchronous puts are refused: {unconfirmable}")
        if self._member.open_epoch:
            found += self._classics.problems()
        found += self._problems_of_acks()
        found += self._problems_of_membership()
        over = self._member.written_over
        if over is not None:
            found.append(written_over_text(self._member.config.node, over))
        client = self._roles.client
        if client is not None and client.notice is not None:
            found.append(client.notice)
        if client is not None and client.no_room is not None:
            found.append(client.no_room)
        if self._roles.configured_role.is_master and not self._member.open_epoch:
            found.append(self._not_master_reason())
        if self._roles.new_epoch_problem is not None:
            found.append(self._roles.new_epoch_problem)
        return found

    def _problems_of_acks(self) -> list[str]:
        """Say that a SYNC_MASTER waits for no slave: its epoch began when the group had none."""
        history = self._member.state.data.history
        counts_classics = self._member.config.ha.count_classic_peers  # they confirm then
        is_sync = self._member.open_epoch and self.default_acks_all()
        if not is_sync or counts_classics or not history:
            return []
        others = self._roles.latest_config.nodes.keys() - {self._member.config.node}
        others |= self._ha.linked_nodes()
        if history[-1].acks or not others:
            return []
        return [
            f"puts wait for no slave: acks is 0 in epoch {history[-1].epoch}, which began as that "
            f"of a single node; run `hastore promote -c {self._node.config_path or 'FILE'}`, "
            "which puts acks and nodes of its file in force"
        ]

    def _problems_of_membership(self) -> list[str]:
        history, node = self._member.state.data.history, self._member.config.node
        if not has_left(node, history):
            return []
        listed = ", ".join(map(str, history[-1].nodes))
        return [
            f"node {node} has left the group: the list in force since epoch {history[-1].epoch} is "
            f"{listed}; stop it for good, or `hastore node add` it again"
        ]

    def status(self) -> dict[str, Any]:
        """Return the object of `hastore status --json`."""
        is_open = bool(self._member.open_epoch)  # first: by then the history has that epoch
        config, data = self._member.config, self._member.state.data
        over = self._member.written_over
        pending = pending_changes(config, self._roles.latest_config, data.history)
        is_open = is_open and bool(data.history)
        acks = data.history[-1].acks if is_open else config.effective_acks
        return {
            "node": config.node,
            "mode": config.mode.value,
            "role": self._roles.role,
            "epoch": last_epoch(data.history),
            "acks": acks,
            **self._common_status(config, self._slaves(), data.unclean, pending),
            "role_state": self._roles.mode.value,
            "registry": None if self._registry is None else self._registry.status(),
            "store": config.store.root,
            "master": self._master_node(),
            "unlinked": self._unlinked(),
            "classic_master": self.classic_master(),
            "classic_lag_bytes": self.classic_lag(),
            "promised_epoch": data.promised_epoch,
            "written_over": over
            and {"node": over.node, "epoch": over.epoch, "offset": over.offset},
            "dispatched_offset": self.store.dispatched_offset,
            "push2_slave_max_offset": self._ha.push2_slave_max_offset,
            "history": [
                {"epoch": e.epoch, "node": epoch_node(e.epoch), "start_offset": e.start}
                for e in data.history
            ],
        }

    def _unlinked(self) -> list[dict[str, Any]]:
        """Return the nodes of the group that this master, which looks each second, has no link to.

        `why` is None of a node that answers: it does not follow, and its own status says why.
        """
        if not self._member.open_epoch:
            return []
        linked = {slave.node for slave in self._ha.slaves()}
        return [
            {"node": number, "address": address, "why": why}
            for number, (address, why) in sorted(self._roles.unlinked.items())
            if number not in linked
        ]

    def _slaves(self) -> list[dict[str, Any]]:
        return [
            {**asdict(slave), "files_kept": self._retention.keeps_files_for(slave.name)}
            for slave in self._ha.slaves()
        ]


class DLedgerBackend(BaseBackend):
    """A node of mode dledger. The driver appends a put while this node leads.

    The put then waits until a majority of the members has it. The epoch of clients and positions is
    the term. `latest_config` is that of the latest valid file; GroupService's thread replaces it.
    """

    def __init__(
        self,
        node: NodeProcess,
        config: Config,
        driver: DLedgerDriver,
        transfer: GroupTransferService,
        retention: RetentionService,
    ) -> None:
        super().__init__(node, driver.store.messages, transfer, retention)
        self.latest_config = config
        self._config = config
        self._driver = driver

    # -- puts --------------------------------------------------------------------------------------

    def put_encoded(self, payloads: Sequence[Payload], guards: Guards | None = None) -> PutResults:
        """Append as the leader. Raises NotStoredError if this node does not lead."""
        try:
            return self._driver.put_encoded(payloads, guards)
        except StoreFullError:
            self._full = True  # puts are refused until there is room again
            raise

    def outdated(self) -> str | None:
        """Return why this node serves no reads: it was removed; None while it is in the group."""
        return self._driver.outdated()

    def _full_follower(self) -> str | None:
        """Return why a node that follows a leader takes nothing; None while its disk has room."""
        return self._driver.full()

    def _role_reason(self) -> str | None:
        refusal = self._driver.refusal()
        # A put beyond the limit is answered BUSY by put_encoded: this node still leads.
        if refusal is not None and refusal.startswith(Code.LEADER_PENDING_FULL.name):
            return None
        return refusal

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put cannot be confirmed now; None if it can."""
        if not sync_flush:
            return None
        return self.never_flushed() or self._driver.sync_flush_refusal()

    def never_flushed(self) -> str | None:
        """Return why a put with sync_flush can never be confirmed; None if it can."""
        store = self._config.store
        if store.kind is StoreKind.MEMORY:
            return "sync_flush: with store.kind: memory no message is ever on a disk"
        if store.flush is Flush.ASYNC:
            return "sync_flush: with store.flush: async no node confirms what is on its disk"
        return None

    def default_acks_all(self) -> bool:
        """Every put waits for a majority."""
        return True

    def flush_each_put(self) -> bool:
        """No put waits for this node's disk alone."""
        return False

    def wait_limit_ms(self, need: Need) -> float:
        """Return `dledger.append_timeout`."""
        return self._config.dledger.append_timeout_ms

    # -- the group ---------------------------------------------------------------------------------

    def epoch(self) -> int:
        """Return the current term."""
        return self._driver.term

    def history(self) -> Sequence[tuple[int, int]]:
        """Return the (term, position of its first entry) entries of the log."""
        return self._driver.store.epochs()

    def standing(self, history: EpochStarts, epoch: int, offset: int) -> tuple[Standing, int]:
        """Say how a position relates to this log with this history; see `check_position`.

        A log of DLedger does not say who wrote what retention has removed.
        """
        end = self.store.max_offset
        return check_position(history, end, epoch, offset, is_whole=False)

    def master_node(self) -> int | None:
        """Return the node that takes puts as far as this one knows; None while a term opens."""
        driver, core = self._driver, self._driver.core
        if driver.is_leader:
            return self._config.node if driver.takes_puts else None
        return None if core is None or core.leader == core.node else core.leader

    def master_map(self) -> MapInfo:
        """Return this node's view of the group."""
        config, status = self.latest_config, self._driver.status()
        apis = {number: address.api for number, address in config.nodes.items()}
        return self._map_of(config, status["role"], status["term"], status["leader"], apis)

    def reading_nodes(self) -> Sequence[int]:
        """Return the nodes that clients may read from; see ApiBackend."""
        leader = self.master_node()
        if leader != self._config.node:
            return [] if leader is None else [self._config.node]
        followers = (one for one in self._driver.followers() if not one.is_learner)
        found = {one.node for one in followers if self._follower(one)["in_sync"]}
        return sorted(found - self.without_remoting())

    def ha_address(self, node: int) -> str | None:
        """Return where a node's HA port is now; None for a node that is not known."""
        known = self.latest_config.nodes.get(node)
        return None if known is None else known.ha

    def without_remoting(self) -> set[int]:
        """Return the linked nodes whose version knows no clients of RocketMQ."""
        return self._driver.links.without_remoting

    # -- status ------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return the problems that an operator must look at; empty when all is well."""
        versions = self._problems_of_versions(self._config)
        return [*super().problems(), *self._driver.problems(), *versions]

    def status(self) -> dict[str, Any]:
        """Return the object of `hastore status --json`."""
        config, fields = self._config, self._driver.status()
        del fields["followers"]  # `slaves` has them, with the keys of mode classic
        followers = self._driver.followers()
        slaves = [self._follower(one) for one in followers if not one.is_learner]
        known = {one.node: self._learner(one) for one in followers if one.is_learner}
        fields["learners"] = [known.get(one["node"], one) for one in fields["learners"]]
        unclean = bool(fields["members"]) and not fields["remembers"]  # members: it has begun
        pending = pending_changes(config, self.latest_config, ())
        return {
            "node": config.node,
            "epoch": fields["term"],
            "acks": (len(fields["members"]) or len(config.nodes)) // 2,
            **fields,
            **self._common_status(config, slaves, unclean, pending),
            "store": config.store.root,
            "master": fields["leader"],
            "dispatched_offset": self.store.dispatched_offset,
            "history": [{"epoch": term, "start_offset": start} for term, start in self.history()],
        }

    def _follower(self, one: FollowerStatus) -> dict[str, Any]:
        """Return what this leader knows of a follower, with the keys of mode classic's slaves."""
        store, config = self._driver.store, self.latest_config
        try:
            offset = store.end_position(one.index)
        except (UsageError, StoreError):  # it was removed, or cut by a new leader just now
            offset = None
        lag = max(0, self.store.max_offset - (self.store.min_offset if offset is None else offset))
        linked = one.node in self._driver.links.linked
        answers = linked and not one.silent
        near = lag <= config.dledger.max_in_flight_bytes and one.counts
        full = linked and one.full
        return {
            "node": one.node,
            "address": config.nodes[one.node].ha if one.node in config.nodes else "",
            "state": one.state if linked else "NO_LINK",
            "ack_index": one.index,
            "ack_offset": offset,
            "lag_bytes": lag,
            "lag_entries": one.lag_entries,
            "in_sync": answers and near and one.state in _STREAMING and not full,
            "able": one.able,
            "full": full,
            "answers": answers,
            "classic": False,
            "files_kept": self._retention.keeps_files_for(follower_name(one.node)),
        }

    def _learner(self, one: FollowerStatus) -> dict[str, Any]:
        """Return what this leader knows of a learner."""
        names = ("node", "address", "state", "ack_index", "ack_offset", "lag_bytes", "lag_entries")
        found = self._follower(one)
        return {name: found[name] for name in names} | {"waits_for": one.waits_for}


def follower_name(node: int) -> str:
    """Return the name of a follower as a holder of log files."""
    return f"follower {node}"
