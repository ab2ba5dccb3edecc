"""NodeBackend: a node of mode classic as its client API, its HTTP port and `hastore status` see it.

It implements ApiBackend (server/api/backend.py). It holds the write gate around a put, and
otherwise only reads the state of store, replication and role.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hastore.config.model import Flush, Role
from hastore.errors import NotStoredError, Status, StoreFullError
from hastore.ha.master.group_transfer import GroupTransferService, Need
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.ha.rules.epochs import epoch_node, last_epoch
from hastore.protocol.api import MapInfo
from hastore.server.base_backend import BaseBackend
from hastore.server.role_files import pending_changes
from hastore.server.role_service import Mode, RoleService
from hastore.store.append.results import Guards, PutResults
from hastore.store.message_store import MessageStore

if TYPE_CHECKING:
    from hastore.registry.node_registry import NodeRegistry

NOT_WRITABLE = Status.SERVICE_NOT_AVAILABLE


class NodeBackend(BaseBackend):
    """One node as an ApiBackend; every method may be called from any thread."""

    store: MessageStore

    def __init__(
        self,
        member: Member,
        store: MessageStore,
        ha: HAService,
        transfer: GroupTransferService,
        roles: RoleService,
        registry: "NodeRegistry | None" = None,
    ) -> None:
        super().__init__(store, transfer)
        self._registry = registry
        self._member = member
        self._ha = ha
        self._roles = roles

    def put_encoded(self, payloads: Sequence[bytes], guards: Guards | None = None) -> PutResults:
        """Append through the write gate. Raises NotStoredError if this node is not the master."""
        member = self._member
        with member.gate.lock:
            epoch = member.open_epoch
            if not epoch or member.gate.epoch != epoch:
                raise NotStoredError(self.writable_reason() or "not writable", NOT_WRITABLE)
            try:
                results = self.store.put_encoded(payloads, guards=guards)
            except StoreFullError:
                self._full = True  # puts are refused until there is room again
                raise
            return results

    def writable_reason(self) -> str | None:
        """Return why puts are refused; None while they are accepted."""
        closed = self.closed_reason()
        if closed is not None:
            return closed
        if not self._member.open_epoch:
            return self._not_master_reason()
        return self.full_reason()

    def problems(self) -> list[str]:
        """Return the problems that an operator must look at; empty when all is well."""
        found = self.common_problems()
        if self._registry is not None:
            found += self._registry.problems()
        if self._ha.failure is not None:
            found.append(self._ha.failure)
        if self._member.open_epoch and self.default_acks_all():
            unconfirmable = self.can_confirm(False)
            if unconfirmable is not None:
                found.append(f"synchronous puts are refused: {unconfirmable}")
        client = self._roles.client
        if client is not None and client.notice is not None:
            found.append(client.notice)
        if self._roles.configured_role.is_master and not self._member.open_epoch:
            found.append(self._not_master_reason())
        return found

    def _not_master_reason(self) -> str:
        roles, client = self._roles, self._roles.client
        if roles.mode is not Mode.FOLLOWING:
            return f"waiting to be master: {roles.reason}"
        text = roles.reason or "this node is a slave"
        if client is not None and client.master is not None:
            return f"{text}; node {client.master} is the master"
        if client is not None and client.problem is not None:
            return f"{text}; {client.problem}"
        return text

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put with `acks` all cannot be confirmed now; None if it can."""
        return self._ha.can_confirm(flushed=sync_flush)

    def never_flushed(self) -> str | None:
        """Return why the slaves can never confirm a put with sync_flush; None if they can."""
        return self._ha.never_flushed()

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

    def epoch(self) -> int:
        """Return the last epoch of this node's history."""
        return self._member.open_epoch or self._member.state.last_epoch  # an open epoch is the last

    def history(self) -> Sequence[tuple[int, int]]:
        """Return the epoch history as (epoch, start offset) entries."""
        return [(entry.epoch, entry.start) for entry in self._member.state.history]

    def master_map(self) -> MapInfo:
        """Return this node's view of the group."""
        config, reason = self._member.config, self.writable_reason()
        master, apis = self._master_node(), self._member.api_addresses
        return MapInfo(
            node=config.node,
            role=self._roles.role,
            epoch=self.epoch(),
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
        )

    def _master_node(self) -> int | None:
        if self._member.open_epoch:
            return self._member.config.node
        client = self._roles.client
        if client is None:
            return None
        if client.master is not None:
            return client.master
        return client.known_master[1] if client.known_master is not None else None

    def status(self) -> dict[str, Any]:
        """Return the object of `hastore status --json`."""
        store, data = self.store, self._member.state.data
        return {
            "node": self._member.config.node,
            "mode": self._member.config.mode.value,
            "role": self._roles.role,
            "epoch": last_epoch(data.history),
            **self.log_status(),
            "writable": self.writable_reason() is None,
            "slaves": self._slaves(),
            "waiting_puts": self.transfer.waiting,
            "topics": len(store.queues.topics()),
            "unclean": data.unclean,
            "reason": self.writable_reason(),
            "problems": self.problems(),
            "cluster": data.cluster,
            "group": data.group,
            "config": self.config_path,
            "config_pending": pending_changes(
                self._member.config, self._roles.latest_config, data.history
            ),
            "registry": None if self._registry is None else self._registry.status(),
            "store": self._member.config.store.root,
            "master": self._master_node(),
            "promised_epoch": data.promised_epoch,
            "dispatched_offset": store.dispatched_offset,
            "push2_slave_max_offset": self._ha.push2_slave_max_offset,
            "history": [
                {"epoch": e.epoch, "node": epoch_node(e.epoch), "start_offset": e.start}
                for e in data.history
            ],
        }

    def _slaves(self) -> list[dict[str, Any]]:
        return [
            {**asdict(slave), "files_kept": self.keeps_files_for(slave.name)}
            for slave in self._ha.slaves()
        ]
