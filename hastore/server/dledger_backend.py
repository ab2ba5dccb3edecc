"""DLedgerBackend: a node of mode dledger as its client API, its HTTP port and `hastore status` see
it.

It implements ApiBackend (server/api/backend.py). The driver appends a put while this node leads;
the put then waits until a majority of the members has it. The epoch of clients and positions is the
term.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hastore.clock import Clock
from hastore.config.model import Config, Flush, StoreKind
from hastore.dledger.driver.driver import DLedgerDriver
from hastore.dledger.driver.status import FollowerStatus
from hastore.errors import StoreFullError
from hastore.ha.master.group_transfer import GroupTransferService, Need, Outcome
from hastore.protocol.api import MapInfo
from hastore.protocol.dledger import Code
from hastore.server.base_backend import BaseBackend
from hastore.server.role_files import pending_changes
from hastore.service import OnFailure
from hastore.store.append.results import Guards, PutResults

_STREAMING = ("APPEND", "COMMIT")  # states of an EntryDispatcher whose follower is up to date


def make_transfer(
    clock: Clock, request_flush: Callable[[], None], on_failure: OnFailure
) -> GroupTransferService:
    """Return the service that holds puts until a majority has them."""
    return GroupTransferService(
        clock,
        request_flush,
        on_failure=on_failure,
        late=lambda _need: Outcome.WAIT_QUORUM_ACK_TIMEOUT,
        over=lambda _need: Outcome.TERM_CHANGED,
    )


def follower_name(node: int) -> str:
    """Return the name of a follower as a holder of log files."""
    return f"follower {node}"


class DLedgerBackend(BaseBackend):
    """One node as an ApiBackend; every method may be called from any thread.

    `latest_config` is that of the latest valid file.
    """

    def __init__(
        self, config: Config, driver: DLedgerDriver, transfer: GroupTransferService
    ) -> None:
        super().__init__(driver.store.messages, transfer)
        self.latest_config = config
        self._config = config
        self._driver = driver

    # -- puts --------------------------------------------------------------------------------------

    def put_encoded(self, payloads: Sequence[bytes], guards: Guards | None = None) -> PutResults:
        """Append as the leader. Raises NotStoredError if this node does not lead."""
        try:
            return self._driver.put_encoded(payloads, guards)
        except StoreFullError:
            self._full = True  # puts are refused until there is room again
            raise

    def writable_reason(self) -> str | None:
        """Return why puts are refused; None while they are accepted."""
        closed = self.closed_reason()
        if closed is not None:
            return closed
        refusal = self._driver.refusal()
        # A put beyond the limit is answered BUSY by put_encoded: this node still leads.
        if refusal is not None and not refusal.startswith(Code.LEADER_PENDING_FULL.name):
            return refusal
        return self.full_reason()

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put cannot be confirmed now; None if it can."""
        return self.never_flushed() if sync_flush else None

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

    def master_map(self) -> MapInfo:
        """Return this node's view of the group."""
        config, reason = self.latest_config, self.writable_reason()
        status, store = self._driver.status(), self.store
        leader = status["leader"]
        return MapInfo(
            node=config.node,
            role=status["role"],
            epoch=status["term"],
            writable=reason is None,
            readable_offset=store.readable_offset,
            master_node=leader,
            master_api=config.nodes[leader].api if leader in config.nodes else None,
            nodes={number: address.api for number, address in config.nodes.items()},
            reason=reason,
            default_queues=config.store.default_queues,
            min_offset=store.min_offset,
            cluster=config.cluster,
            group=config.group,
        )

    # -- status ------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return the problems that an operator must look at; empty when all is well."""
        return [*self.common_problems(), *self._driver.problems()]

    def status(self) -> dict[str, Any]:
        """Return the object of `hastore status --json`."""
        config, store = self._config, self.store
        fields, reason = self._driver.status(), self.writable_reason()
        del fields["followers"]  # `slaves` has them, with the keys of mode classic
        return {
            "node": config.node,
            "epoch": fields["term"],
            **fields,
            **self.log_status(),
            "writable": reason is None,
            "slaves": [self._follower(one) for one in self._driver.followers()],
            "waiting_puts": self.transfer.waiting,
            "topics": len(store.queues.topics()),
            "unclean": bool(fields["members"]) and not fields["remembers"],  # members: it has begun
            "reason": reason,
            "problems": self.problems(),
            "cluster": config.cluster,
            "group": config.group,
            "config": self.config_path,
            "config_pending": pending_changes(config, self.latest_config, ()),
            "store": config.store.root,
            "master": fields["leader"],
            "dispatched_offset": store.dispatched_offset,
            "history": [{"epoch": term, "start_offset": start} for term, start in self.history()],
        }

    def _follower(self, one: FollowerStatus) -> dict[str, Any]:
        """Return what this leader knows of a follower, with the keys of mode classic's slaves."""
        store, config = self._driver.store, self.latest_config
        known = store.begin_index - 1 <= one.index <= store.end_index
        offset = store.end_position(one.index) if known else None
        lag = max(0, self.store.max_offset - (self.store.min_offset if offset is None else offset))
        linked = one.node in self._driver.links.linked
        near = lag <= config.dledger.max_in_flight_bytes
        return {
            "node": one.node,
            "address": config.nodes[one.node].ha if one.node in config.nodes else "",
            "state": one.state if linked else "NO_LINK",
            "ack_index": one.index,
            "ack_offset": offset,
            "lag_bytes": lag,
            "lag_entries": one.lag_entries,
            "in_sync": linked and near and one.state in _STREAMING,
            "classic": False,
            "files_kept": self.keeps_files_for(follower_name(one.node)),
        }
