"""A node as a member of its group: its HELLO, its promises, and when it must stop being master.

All parts of a node's HA side share one Member and call it from their own threads.
"""

import functools
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hastore.clock import Clock
from hastore.config.model import AckPoint, Config, Flush, NodeAddress
from hastore.counters import ReplicationCounts
from hastore.ha.node.gate import WriteGate
from hastore.ha.node.node_state import Durable, NodeState
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import CLASSIC_EPOCH, EpochStarts, History, WrittenOver
from hastore.ha.rules.following import check_identity
from hastore.ha.rules.promotion import may_promise
from hastore.protocol.ha_link import BODY_BYTES_MAX
from hastore.protocol.hello import NONCE_BYTES, Hello, Promised, Purpose, Refused
from hastore.security.tls_contexts import TlsContexts
from hastore.service import OnFailure

log = logging.getLogger(__name__)


class Member:
    """The state that the parts of a node's HA side share.

    `open_epoch` changes only under the gate's lock. `on_superseded(epoch, who)` is called after a
    higher epoch has turned this master read-only, `on_lost_end()` after this master has ended its
    epoch (`end_short_epoch`), `on_promise()` after each promise: without the gate's lock, in the
    thread that learned of it.
    """

    def __init__(
        self,
        config: Config,
        store: ReplicaLog,
        state: NodeState,
        clock: Clock,
        secret: bytes | None,
        *,
        tls: TlsContexts | None = None,
        on_refused: Callable[[str, str], None] = lambda _address, _why: None,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `on_failure` is called for each service of the HA side that fails.

        `secret` and `tls`: what a peer must prove; None: nothing of the kind. `on_refused(address,
        why)` is called by a connection's thread for a caller that is no member of the group.
        """
        self.config = config
        self.store = store
        self.state = state
        self.clock = clock
        self.secret = secret
        self.tls = tls
        self.on_failure = on_failure
        self.gate = WriteGate()
        self.counts = ReplicationCounts()
        self._addresses = dict(config.nodes)
        self._listed: Mapping[int, NodeAddress] = dict(config.nodes)  # in the latest valid file
        self._stated: Mapping[int, NodeAddress] = {}  # what ZooKeeper has of other nodes
        self._addresses_lock = threading.Lock()  # for changes
        self.open_epoch = 0  # the epoch in which this node takes writes; 0: none
        self.role = "SLAVE"  # the present role, for HELLO and status
        self.on_superseded: Callable[[int, str], None] = lambda _epoch, _who: None
        self.on_lost_end: Callable[[], None] = lambda: None
        self.on_promise: Callable[[], None] = lambda: None
        self.on_opening: Callable[[EpochStarts], None] = lambda _: None  # before puts are taken
        self.on_refused = on_refused

    @property
    def nodes(self) -> tuple[int, ...]:
        """The group's configured node numbers, this node's included."""
        return tuple(sorted(self._addresses))

    @property
    def peers(self) -> list[tuple[int, str]]:
        """The other nodes' numbers and HA addresses."""
        known = sorted(self._addresses.items())
        return [(n, a.ha) for n, a in known if n != self.config.node]

    def may_be_old(self, node: int | None = None) -> bool:
        """Whether a node (None: some node of the group) may be of the version before."""
        peers = [number for number, _ in self.peers]
        return self.state.may_be_old(peers, node)

    @property
    def confirms(self) -> bool:
        """Whether this node's log is ever confirmed; that of a RocketMQ master never is."""
        return self.state.last_epoch != CLASSIC_EPOCH

    def learn_nodes(self, nodes: Mapping[int, NodeAddress]) -> None:
        """Take over the nodes that a changed configuration adds, so that the next promotion asks
        them, and the addresses of other nodes that it changes.

        This node keeps its own until a restart, and what ZooKeeper states of a node counts before
        the file. A removed node stays until `forget_removed`.
        """
        with self._addresses_lock:
            was, self._listed = self._listed, dict(nodes)
            changed = {
                n: self._stated.get(n, address)
                for n, address in nodes.items()
                if n not in self._addresses or (n != self.config.node and was.get(n) != address)
            }
            self._change_addresses(changed)

    def forget_removed(self) -> None:
        """Forget the nodes that are neither in the file nor in a list that may be in force.

        A node stays as long as a promotion may need its answer: the list of the last epoch has it,
        or that of a promise, whose epoch may have begun elsewhere. A node that does not know what
        is in force forgets none. What is left is what a restart would leave, or more.
        """
        data = self.state.data
        if not data.history or (data.restored and data.unclean):
            return
        with self._addresses_lock:
            due = {self.config.node, *self._listed, *data.history[-1].nodes}.union(*data.node_lists)
            gone = self._addresses.keys() - due
            if gone:
                log.info("node %s left the group", ", ".join(map(str, sorted(gone))))
                self._addresses = {n: a for n, a in self._addresses.items() if n in due}

    def relocate(self, addresses: Mapping[int, NodeAddress]) -> None:
        """Use these addresses to reach other nodes that the configuration lists.

        Only addresses come from outside the configuration, never members: the list of an epoch's
        nodes decides who must answer a promotion. Who answers at an address proves its number.
        """
        own = self.config.node
        with self._addresses_lock:
            self._stated = {n: a for n, a in addresses.items() if n != own}
            self._change_addresses({n: a for n, a in self._stated.items() if n in self._addresses})

    def _change_addresses(self, changed: Mapping[int, NodeAddress]) -> None:
        """Use these addresses from now on; the caller holds the lock."""
        for number, address in changed.items():
            known = self._addresses.get(number)
            if known is not None and address.ha != known.ha:
                log.info("node %d has moved to %s", number, address.ha)
        self._addresses = {**self._addresses, **changed}

    @property
    def api_addresses(self) -> dict[int, str]:
        """The client addresses of the group's nodes, as far as this node knows them."""
        return {number: one.api for number, one in sorted(self._addresses.items())}

    def ha_address(self, node: int) -> str | None:
        """Return where a node's HA port is, as far as this node knows."""
        known = self._addresses.get(node)
        return None if known is None else known.ha

    @property
    def written_over(self) -> WrittenOver | None:
        """What a master has replaced of what this log has; None if that is not known."""
        over, store = self.state.data.written_over, self.store
        # A resync that a crash has ended may leave an empty log that begins beyond that offset.
        if over is None or store.max_offset == store.min_offset:
            return None
        return over if store.max_offset > over.offset else None

    @functools.cached_property
    def counts_flushed(self) -> bool:
        """Whether this node, as master, counts only the synced part of its own log.

        That is so with `store.flush: sync`, and with `ha.ack_point: flushed`. With that ack point
        the node is not marked unclean after a power loss, so it must not have counted bytes that
        its disk did not have.
        """
        return self.config.store.flush is Flush.SYNC or self.config.ha.ack_point is AckPoint.FLUSHED

    def hello(self, purpose: Purpose, **extra: Any) -> Hello:
        """Describe this node at this moment, for a HELLO."""
        # `open_epoch` is read before the history, which then has that epoch's entry.
        open_epoch = self.open_epoch
        data, store = self.state.data, self.store
        max_offset = store.max_offset
        return Hello(
            purpose=purpose,
            cluster=self.config.cluster,
            group=self.config.group,
            node=self.config.node,
            store_id=data.store_id,
            role=self.role,
            open_epoch=open_epoch,
            promised_epoch=data.promised_epoch,
            history=_history_of(data, max_offset),
            min_offset=min(store.min_offset, max_offset),
            max_offset=max_offset,
            confirmed_offset=min(store.confirmed_offset, max_offset),
            ack_point=self.config.ha.ack_point.value,
            unclean=data.unclean,
            largest_frame=BODY_BYTES_MAX,
            file_size=store.file_size,
            nonce=secrets.token_bytes(NONCE_BYTES),
            remoting=True,
            readers=True,
            counts_written=not self.counts_flushed,
            unmet=data.unmet,
            written_over=self.written_over,
            **extra,
        )

    def identity_problem(self, hello: Hello) -> str | None:
        """Return why the peer is not a member of this group, None when it is."""
        return check_identity(
            hello,
            self.config.cluster,
            self.config.group,
            self.config.node,
            self.nodes,
            self.state.data.known_stores,
        )

    def promise(self, hello: Hello) -> Promised | Refused:
        """Promise the candidate's epoch, or refuse.

        When this returns a Promised, the promise is durable and no writer of a lower epoch may
        append.
        """
        epoch, candidate = hello.promised_epoch, hello.node
        with self.gate.lock:
            why = may_promise(self.state.data.promised_epoch, candidate, epoch)
            if why is not None:
                return Refused(why, self.state.data.promised_epoch)
            if self.state.data.promised_epoch == epoch and self.gate.epoch == epoch:
                return Refused(f"this node follows epoch {epoch} already", epoch)
            was = self.open_epoch
            # The promise is written before anything changes: if the write fails, no answer is sent.
            self.state.promise(epoch, hello.acks, hello.nodes, superseded=bool(was))
            self.gate.close()
            self.open_epoch = 0
            data, max_offset = self.state.data, self.store.max_offset
            answer = Promised(
                _history_of(data, max_offset),
                max_offset,
                data.unclean,
                data.acks_min,
                data.acks_max,
                data.node_lists,
            )
        log.info("promised epoch %d to node %d", epoch, candidate)
        self._tell(was, epoch, f"node {candidate}")
        return answer

    def observe_epoch(self, epoch: int, who: str) -> None:
        """If this node is master of an epoch below `epoch`, turn it read-only, durably.

        `who` names the node that has `epoch`, for the log.
        """
        with self.gate.lock:
            was = self.open_epoch
            if not was or epoch <= was:
                return
            self.gate.close()
            self.open_epoch = 0
        log.warning("epoch %d of %s supersedes this node's epoch %d: read-only", epoch, who, was)
        try:
            self.state.promise(epoch, superseded=True)
        finally:  # the node is read-only even if the write failed
            self._tell(was, epoch, who)

    def end_short_epoch(self, begin: int, node: int, more: int) -> None:
        """End this master's epoch, durably: `node` has it up to `more`, beyond this log's end.

        Then this node begins a new epoch with what `node` has. Not if this log has grown beyond
        `begin` since its end was lost: it has other bytes there, and the operator decides.
        """
        with self.gate.lock:
            if not self.open_epoch or self.store.max_offset != begin:
                return
            self.gate.close()
            self.open_epoch = 0
        try:
            self.state.note_lost_end(begin, node, more)
        finally:  # the node is read-only even if the write failed
            self.on_lost_end()

    def step_down(self) -> bool:
        """Stop being master without a higher epoch, as in a demotion.

        Return whether this node was master. The link of a node that follows goes on: its epoch is
        another node's, and a new link would take time in which that master's puts are refused.
        """
        with self.gate.lock:
            was = self.open_epoch
            if was:
                self.gate.close()
                self.open_epoch = 0
        return bool(was)

    def _tell(self, was: int, epoch: int, who: str) -> None:
        if was:
            self.on_superseded(epoch, who)
        self.on_promise()


def _history_of(data: Durable, max_offset: int) -> History:
    """Return the history of a log that ends at `max_offset`.

    After a cut whose last write has failed, the entries of what was cut are still in the state.
    """
    cut = data.intent
    return data.history if cut is None or max_offset > cut.offset else data.history[: cut.entries]
